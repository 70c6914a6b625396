"""What all commands share: how they print, how they fail, and options that several have."""

import contextlib
import errno
import json
import os
import sys
import typing
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from dcnet.models import error_of_own_code
from dcnet.training import Run
from dcnet.util.text import printable, valid


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
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; the GPU if there is one.", metavar="DEVICE")]


def has_a_width(stderr: bool = False) -> bool:
    """Return whether there is a width to keep to: that of a terminal, or one that the user has set."""
    return (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ


def console(stderr: bool = False, wrap: bool = True, width: int | None = None) -> Console:
    """Return a console that prints words as they are: in names, [ ] are no markup and :x: is no emoji."""
    wide = width if width is not None or has_a_width(stderr) else 120
    return Console(stderr=stderr, width=wide, markup=False, emoji=False, highlight=False, soft_wrap=not wrap)


@contextmanager
def printing() -> Iterator[None]:
    """End the program where what is printed cannot be written: silently where nobody reads it, else with a line.

    By `SystemExit`, which no command takes for an error of its own work.
    """
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):  # Python writes what is left once more when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            what = "the output cannot be written: " * (error.filename is None)  # a file's error has its name
            say(f"error: {what}{_words(error)}", stderr=True)
        raise SystemExit(1) from None


def show_json(value: Any) -> None:
    """Print a value as JSON."""
    echo(valid(json.dumps(value, indent=2, ensure_ascii=False)))


def say(text: object, stderr: bool = False) -> None:
    """Print a message; lines are not broken, so that commands in them can be copied."""
    with contextlib.suppress(OSError) if stderr else printing():
        console(stderr, wrap=False).print(printable(text, keep="\n\t"))


def echo(text: str) -> None:
    """Print a text for other programs, such as JSON, as it is."""
    with printing():
        typer.echo(text)


def show(table: Table) -> None:
    """Print a table that is made already."""
    with printing():
        console().print(table)


def show_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    title: str | None = None,
    right: Sequence[str] = (),
    widths: Sequence[int] | None = None,
) -> None:
    """Print a table; `right`: the columns of numbers; `widths`: of all columns, where rich is not to choose them."""
    table = Table(title=None if title is None else printable(title))
    for number, name in enumerate(columns):
        width = None if widths is None else widths[number]
        table.add_column(printable(name), overflow="fold", justify="right" if name in right else "left", width=width)
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    with printing():
        console(width=None if widths is None else _width(widths)).print(table)


def fail(error: BaseException) -> typing.NoReturn:
    """End the command with the error's words."""
    with printing():  # where the output is what has failed, that is said
        sys.stdout.flush()
        if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EPIPE):
            raise error  # of files that are written, errors have the names
    say(f"error: {error_of_own_code(error) or _words(error)}", stderr=True)
    raise typer.Exit(1) from error


def _words(error: BaseException) -> str:
    """Return the error's words; those of the operating system without its numbers."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)


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


_FIRST_TO_GO = ("seconds", "loss", "epochs", "parameters", "operator", "data, model")


def show_runs(rows: Sequence[Sequence[str]]) -> None:
    """Print a table of runs, with whole paths, which can be copied, and whole words.

    Where it would be too wide, other columns take more lines; on a narrow terminal some are left out, and named.
    """
    cells = {name: [name, *(printable(row[number]) for row in rows)] for number, name in enumerate(RUN_COLUMNS)}
    least = {name: _least(column, whole=name == "run") for name, column in cells.items()}
    left_out = []
    for name in _FIRST_TO_GO:
        if has_a_width() and _width(least.values()) > console().width:
            left_out.append(name)
            del least[name]
    widths = _widths({name: _least(cells[name], whole=True) for name in least}, least, console().width)
    shown = [[row[RUN_COLUMNS.index(name)] for name in least] for row in rows]
    show_table(list(least), shown, right=RUN_COLUMNS[3:], widths=list(widths.values()))
    if left_out:
        say(f"too narrow for: {'; '.join(reversed(left_out))}. dcnet runs --json shows all", stderr=True)


def _least(cells: Sequence[str], whole: bool) -> int:
    """Return the width that cells need: each in one line, or their words."""
    return max(cell_len(part) for cell in cells for part in ([cell] if whole else cell.split() or [""]))


def _widths(wanted: dict[str, int], least: dict[str, int], room: int) -> dict[str, int]:
    """Return widths of columns that fit in, if they can: those that have the most to spare become narrower."""
    widths = dict(wanted)
    while _width(widths.values()) > room and widths != least:
        widths[max(widths, key=lambda name: widths[name] - least[name])] -= 1
    return widths


def _width(columns: Collection[int]) -> int:
    """Return the width of a table whose columns have these: with a line and two blanks for each, and a last line."""
    return sum(columns) + 3 * len(columns) + 1
