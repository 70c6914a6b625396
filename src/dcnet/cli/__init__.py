"""The command line: `dcnet COMMAND`, also `python -m dcnet COMMAND`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import dcnet
from dcnet.cli import attacking, training
from dcnet.formulas import nearest

FIGURES = ("functions",)


def _catalogue() -> str:
    sections = [("Magnitude functions h", dcnet.magnitudes()), ("Angular functions g", dcnet.angulars())]
    return "\n\n".join("\n\n".join([f"{title}:", *(f"- {formula}" for formula in known.values())]) for title, known in sections)


app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="markdown", help=f"Decoupled networks for PyTorch.\n\n{_catalogue()}")


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        Console().print(f"dcnet {dcnet.__version__}")
        raise typer.Exit


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help=f"Which figure: {', '.join(FIGURES)}.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; its ending says the format (png, svg, pdf).")] = None,
) -> None:
    """Draw a figure into a file."""
    if name not in FIGURES:
        raise typer.BadParameter(f"unknown figure {name!r}.{nearest(name, FIGURES)} Known: {', '.join(FIGURES)}", param_hint="NAME")
    from dcnet.figures import draw_functions

    path = out or Path(f"{name}.png")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"{path} ends in {path.suffix!r}; possible: .png, .svg, .pdf", param_hint="--out")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_functions().savefig(path, dpi=150)
    Console().print(f"{path} written")


@app.command()
def bench(
    out: Annotated[Path, typer.Option("--out", "-o", help="CSV of the records; what it has is not measured again.")] = Path("bench.csv"),
    what: Annotated[str, typer.Option(help="What to measure: all, networks or layers.")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Only the figures of the README.")] = False,
    repeats: Annotated[int, typer.Option(min=3, help="How often each is timed.")] = 20,
    cpu: Annotated[bool, typer.Option("--cpu", help="Measure on the CPU even if there is a GPU.")] = False,
    commit: Annotated[str | None, typer.Option(help="The commit to put into the records, where the source is no repository.")] = None,
    render: Annotated[bool, typer.Option("--render", help="Measure nothing: only make the table of what is there.")] = False,
    into: Annotated[Path | None, typer.Option(help="Put the table into this file, between its marks.")] = None,
) -> None:
    """Measure what decoupling costs, as a ratio to the plain network in the same run."""
    import torch

    from dcnet import bench as benchmarks
    from dcnet.bench.records import read

    if what not in (possible := ("all", "networks", "layers")):
        raise typer.BadParameter(f"unknown {what!r}.{nearest(what, possible)} Possible: {', '.join(possible)}", param_hint="--what")
    if render:
        if not out.exists():
            raise typer.BadParameter(f"{out} does not exist", param_hint="--out")
        rows = read(out)
    else:
        cuda = torch.cuda.is_available() and not cpu
        console = Console()
        if not cuda:
            console.print("no GPU: small shapes on the CPU" if not cpu else "on the CPU: small shapes", highlight=False)
        device = torch.device("cuda" if cuda else "cpu")
        rows = benchmarks.run(benchmarks.cases(cuda, what, quick), out, device, repeats, lambda line: console.print(line, highlight=False), commit)
    table = benchmarks.render(rows)
    if into is None:
        typer.echo(table)
    else:
        benchmarks.render_into(into, table)


app.command(no_args_is_help=True)(training.with_recipe_flags(training.train))
app.command()(training.evaluate)
app.command()(training.runs)
app.command()(attacking.attack)


def main() -> None:
    app()
