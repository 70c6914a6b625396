"""The command line: `dcnet COMMAND`, also `python -m dcnet COMMAND`."""

from typing import Annotated

import typer
from rich.console import Console

import dcnet
from dcnet.cli import attacking, benching, drawing, exploring, training
from dcnet.cli.table import table


def _catalogue() -> str:
    sections = [("Magnitude functions h", dcnet.magnitudes()), ("Angular functions g", dcnet.angulars())]
    return "\n\n".join("\n\n".join([f"{title}:", *(f"- {formula}" for formula in known.values())]) for title, known in sections)


app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="markdown", help=f"Decoupled networks for PyTorch.\n\n{_catalogue()}")


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        Console().print(f"dcnet {dcnet.__version__}")
        raise typer.Exit


app.command(no_args_is_help=True)(training.with_recipe_flags(training.train))
app.command()(training.evaluate)
app.command()(training.runs)
app.command()(attacking.attack)
app.command()(benching.bench)
app.command(no_args_is_help=True)(drawing.figure)
app.command(no_args_is_help=True)(drawing.report)
app.command()(exploring.explore)
app.command(no_args_is_help=True)(table)


def main() -> None:
    app()
