"""The command line: `dcnet COMMAND`, also `python -m dcnet COMMAND`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import dcnet
from dcnet.cli import attacking, benching, training
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


app.command(no_args_is_help=True)(training.with_recipe_flags(training.train))
app.command()(training.evaluate)
app.command()(training.runs)
app.command()(attacking.attack)
app.command()(benching.bench)


def main() -> None:
    app()
