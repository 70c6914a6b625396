"""`dcnet figure` and `dcnet report`: pictures of operators and of runs."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dcnet.cli.common import DataRoot, RunsArgument, fail, folder_path, say
from dcnet.cli.own_formulas import Formulas, TrustFormulas, register
from dcnet.figures import FIGURES, make_figure
from dcnet.training import Run
from dcnet.training.own_formulas import MissingFormula, check_formulas
from dcnet.util.files import write_atomically

FORMATS = (".png", ".svg", ".pdf")
_LIST = "\n\n".join(f"- {name}: {kind.shows}" for name, kind in FIGURES.items())


@contextmanager
def _glyphs() -> Iterator[None]:
    """Draw a box for what the font lacks, without a warning for each letter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from", UserWarning)
        yield


def figure(
    name: Annotated[str, typer.Argument(help=f"Which figure: {', '.join(FIGURES)}.")],
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, for the figures that are of runs.", parser=folder_path, metavar="RUNS..."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; its ending says the format (png, svg, pdf).")
    ] = None,
    dpi: Annotated[int, typer.Option(min=10, max=1000, help="Pixels an inch, of png.")] = 200,
    formulas: Formulas = None,
    trust_formulas: TrustFormulas = False,
    data_root: DataRoot = Path("data"),
) -> None:
    path = out or Path(f"{name}.png")
    try:
        check_format(path)
        register(formulas, (runs or []) if trust_formulas else ())
        drawn = make_figure(name, runs or [], data_root)
        save_figure(drawn, path, dpi)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        fail(error)
    say(f"{path} written")


def check_format(path: Path) -> None:
    """Raise where the ending of a file says no format that a figure can have."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path} ends in {path.suffix!r}; possible: {', '.join(FORMATS)}")


def save_figure(drawn: Any, path: Path, dpi: int = 200) -> None:
    """Write the figure; the same figure gives the same file, whatever the day."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)

    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "dcnet"}), _glyphs():
        drawn.savefig(file, format=path.suffix[1:].lower(), dpi=dpi, metadata=dates.get(path.suffix.lower()))
    write_atomically(path, file.getvalue())


def report(
    runs: RunsArgument,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder to write index.html into, or a file ending in .html.")
    ] = Path("report"),
    formulas: Formulas = None,
    trust_formulas: TrustFormulas = False,
    data_root: DataRoot = Path("data"),
) -> None:
    """Write a page about one or more runs: results, curves, kernels, angles, robustness.

    It is a single file that needs nothing else.
    """
    from dcnet.report import write_report

    try:
        register(formulas, runs if trust_formulas else ())
        with _glyphs():
            path = write_report(runs, out, data_root)
        for folder in runs:
            if not (folder / "inspection.json").is_file():
                check_formulas(folder, Run(folder).recipe)
    except MissingFormula as error:
        say(f"note: the page has no kernels, angles and examples of that run: {error}", stderr=True)
    except (ValueError, OSError) as error:
        fail(error)
    say(f"{path} written: {path.stat().st_size / 2**20:.1f} MiB")


figure.__doc__ = f"Draw a figure into a file.\n\n{_LIST}"
