"""What all commands share: how they print, how they fail, and options that several have."""

import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from dcnet.training import Run
from dcnet.util.text import printable


def folder_path(text: str) -> Path:
    """Return the path; an empty one, such as that of an unset variable, would be the current folder."""
    if not str(text).strip():
        raise typer.BadParameter("it is empty; possible: the path of a folder, . for the current one")
    return Path(text)


def _folder(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, parser=folder_path, metavar="FOLDER")


RunArgument = Annotated[Path, typer.Argument(help="Run folder.", parser=folder_path, metavar="RUN")]
TrainedArgument = Annotated[
    Path,
    typer.Argument(
        help="Run folder, a .safetensors file of its weights, or hub:NAME (dcnet models).",
        parser=folder_path,
        metavar="RUN|FILE",
    ),
]
RunsArgument = Annotated[list[Path], typer.Argument(help="Run folders.", parser=folder_path, metavar="RUNS...")]
DataRoot = Annotated[Path, _folder("Folder of the data sets' official files.", "--data-root")]
Download = Annotated[bool, typer.Option("--download", help="Fetch missing files of the data set from its own site.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; the GPU if there is one.", metavar="DEVICE")]


def console(stderr: bool = False, wrap: bool = True) -> Console:
    """Return a console that prints words as they are: in names, [ ] are no markup and :x: is no emoji."""
    wide = None if (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ else 120
    return Console(stderr=stderr, width=wide, markup=False, emoji=False, highlight=False, soft_wrap=not wrap)


def say(text: object, stderr: bool = False) -> None:
    """Print a message; lines are not broken, so that commands in them can be copied."""
    console(stderr, wrap=False).print(printable(text, keep="\n\t"))


def show_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None, right: Sequence[str] = ()
) -> None:
    """Print a table; `right`: the columns of numbers."""
    known = (Column(printable(name), overflow="fold", justify="right" if name in right else "left") for name in columns)
    table = Table(*known, title=None if title is None else printable(title))
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    console().print(table)


def fail(error: BaseException) -> typing.NoReturn:
    """End the command with the error's words."""
    say(f"error: {error}", stderr=True)
    raise typer.Exit(1) from error


RUN_COLUMNS = ("run", "data, model", "operator", "parameters", "epochs", "test accuracy", "loss", "seconds")


def run_row(run: Run) -> list[str]:
    """Return what was trained, and what came out."""
    recipe, result = run.recipe, run.result
    operator = "plain" if recipe.magnitude is None else f"{recipe.magnitude} + {recipe.angular}"
    if recipe.weighting is not None:
        operator += f", {recipe.weighting}"
    if recipe.where:
        operator += f"; where: {', '.join(recipe.where)}"
    if result is not None:
        numbers = [
            f"{result['parameters']:,}",
            f"{result['epochs']:.4g}",
            f"{result['accuracy']:.2f}%",
            f"{result['loss']:.4f}",
        ]
        numbers.append(f"{result['seconds']:.1f}")
    else:
        last = (run.metrics or [{"epoch": 0, "seconds": 0}])[-1]
        numbers = ["", f"{last['epoch']:g}", "unfinished", "", f"{last['seconds']:.1f}"]
    return [str(run.folder), f"{recipe.data}, {recipe.model}", operator, *numbers]


def show_runs(rows: Sequence[Sequence[str]]) -> None:
    """Print a table of runs."""
    show_table(RUN_COLUMNS, rows, right=RUN_COLUMNS[3:])
