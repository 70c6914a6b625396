"""`dcnet figure` and `dcnet report`: pictures of operators and of runs."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dcnet.cli.own_formulas import Formulas, register
from dcnet.cli.training import DataRoot, fail
from dcnet.figures import FIGURES, make_figure

FORMATS = (".png", ".svg", ".pdf")
_LIST = "\n\n".join(f"- {name}: {kind.shows}" for name, kind in FIGURES.items())


def figure(
    name: Annotated[str, typer.Argument(help=f"Which figure: {', '.join(FIGURES)}.")],
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders, for the figures that are of runs.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; its ending says the format (png, svg, pdf).")] = None,
    dpi: Annotated[int, typer.Option(min=10, max=1000, help="Pixels an inch, of png.")] = 200,
    formulas: Formulas = None,
    data_root: DataRoot = Path("data"),
) -> None:
    path = out or Path(f"{name}.png")
    try:
        if path.suffix.lower() not in FORMATS:
            raise ValueError(f"{path} ends in {path.suffix!r}; possible: {', '.join(FORMATS)}")
        register(formulas)
        drawn = make_figure(name, runs or [], data_root)
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(drawn, path, dpi)
    except (ValueError, OSError) as error:
        fail(error)
    Console().print(f"{path} written")


def _save(drawn: Any, path: Path, dpi: int) -> None:
    """Write the figure; the same figure gives the same file, whatever the day."""
    import matplotlib

    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": "dcnet"}):
        drawn.savefig(path, dpi=dpi, metadata=dates.get(path.suffix.lower()))


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write index.html into, or a file ending in .html.")] = Path("report"),
    formulas: Formulas = None,
    data_root: DataRoot = Path("data"),
) -> None:
    """Write a page about one or more runs: results, curves, kernels, angles, robustness; a single file that needs nothing else."""
    from dcnet.report import write_report

    try:
        register(formulas)
        path = write_report(runs, out, data_root)
    except (ValueError, OSError) as error:
        fail(error)
    Console().print(f"{path} written: {path.stat().st_size / 2**20:.1f} MiB", highlight=False)


figure.__doc__ = f"Draw a figure into a file.\n\n{_LIST}"
