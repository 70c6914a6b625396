"""`dcnet table`: the paper's tables, trained cell by cell, and rendered with the paper's numbers."""

import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table as Shown

from dcnet.bench import around, read_page, render_into
from dcnet.cli.common import DataRoot, Device, Download, fail, say
from dcnet.cli.common import show as show_made
from dcnet.cli.figure import check_format, save_figure
from dcnet.cli.own_formulas import Formulas, register
from dcnet.cli.train import value_of_flag
from dcnet.data import FOLDER, check_name
from dcnet.tables import (
    SCHEDULES,
    TABLES,
    WORTH_STARTING,
    Ledger,
    Plan,
    Runner,
    check_matches,
    costs,
    find_table,
    in_order,
    markdown,
    page,
    picture,
    plan,
    settings_of,
    under_torchrun,
    usual_device,
)
from dcnet.training.recipe import hints
from dcnet.util.files import write_atomically
from dcnet.util.suggest import nearest

_LIST = "\n\n".join(f"- {table.name}: {table.title}" for table in TABLES.values())
_SHARES = ", ".join(f"{name} is {share:g} of it" for name, share in SCHEDULES.items() if share != 1.0)
# On a GPU: how a cell is computed, not what. A test image is looked at every fifth epoch.
_ON_A_GPU = {"precision": "bf16", "channels_last": True, "graphs": True, "evaluate_every": 5, "save_every": 10_000}
_ON_A_CPU = {"graphs": None}  # which some recipes ask for


def table(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Which tables; all of them if none is named, with --list, --render, --into and --picture."),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help=f"paper is the whole schedule, {_SHARES}. paper if not given; smoke with --data digits."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, as in 0,1,2.")] = "0",
    match: Annotated[
        list[str] | None,
        typer.Option(
            help="Only cells with this in their name, such as SegConv; with a ! in front, as in !AutoAttack, all "
            "others; may be repeated; cells are trained in that order."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cells trained at once on the device.")] = 1,
    budget: Annotated[
        str | None, typer.Option(help="Stop in time, as in 9m, 1h30m or 540s; what runs then goes on the next time.")
    ] = None,
    only_whole: Annotated[
        bool,
        typer.Option(
            "--only-whole", help="Start a cell only if, judged by earlier cells, it will finish within the budget."
        ),
    ] = False,
    runs: Annotated[Path, typer.Option(help="Folder of the cells' run folders.")] = Path("runs/tables"),
    ledger: Annotated[
        Path | None, typer.Option(help="File with a JSON line for each cell; RUNS/ledger.jsonl if not given.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Another data set for all cells, such as digits, or imagefolder:PATH.")
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--set", help="A recipe field for all cells, as in precision=tf32; may be repeated."),
    ] = None,
    show: Annotated[
        bool,
        typer.Option("--list", help="Train nothing: show what there is, what is done and what the rest will cost."),
    ] = False,
    render: Annotated[
        Path | None, typer.Option(help="Train nothing: write tables.md and tables.html into this folder.")
    ] = None,
    into: Annotated[
        list[Path] | None, typer.Option(help="Train nothing: put the tables between their marks in this Markdown file.")
    ] = None,
    picture_file: Annotated[
        Path | None,
        typer.Option(
            "--picture", help="Train nothing: draw how far our test errors are from the paper's (png, svg or pdf)."
        ),
    ] = None,
    keep_weights: Annotated[
        Path | None,
        typer.Option(
            "--keep-weights",
            help="Folder for the weights of finished cells; attacks need no training of networks that are there.",
        ),
    ] = None,
    keep_records: Annotated[
        Path | None,
        typer.Option(
            "--keep-records", help="Folder for a copy of finished cells' records: all but checkpoints and logs."
        ),
    ] = None,
    data_root: DataRoot = Path("data"),
    download: Download = False,
    device: Device = None,
    formulas: Formulas = None,
) -> None:
    try:
        register(formulas)
        written = bool(render or into or picture_file)
        chosen = [find_table(name) for name in names or (TABLES if show or written else [])]
        if not chosen:
            raise ValueError(f"name the tables to train; known: {', '.join(TABLES)}")
        if ledger is not None and (show or written) and not ledger.is_file():
            what = "is a folder" if ledger.is_dir() else "does not exist"
            raise ValueError(f"--ledger {ledger} {what}; possible: a file that `dcnet table` has written")
        seconds = _seconds(budget)
        book = Ledger(ledger or runs / "ledger.jsonl")
        if written:
            if picture_file is not None:
                check_format(picture_file)
            if render is not None or into:
                _write(chosen, book, render, into or [], _set(fields or []))
            if picture_file is not None:
                save_figure(picture(chosen, book, **_set(fields or [])), picture_file)
                say(f"{picture_file} written")
            return
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        settings: dict[str, Any] = {
            **(_ON_A_GPU if kind == "cuda" else _ON_A_CPU),
            **_set(fields or []),
            **({} if data is None else {"data": data}),
        }
        if data is not None and not data.startswith(FOLDER):
            check_name(data)
        which = schedule or ("smoke" if data == "digits" else "paper")
        if which not in SCHEDULES:
            raise ValueError(f"unknown schedule {which!r}.{nearest(which, SCHEDULES)} Possible: {', '.join(SCHEDULES)}")
        plans = [plan(one, book, runs, which, _seeds(seeds), match, keep_weights, **settings) for one in chosen]
        check_matches(plans, match)
        for file in dict.fromkeys(file for one in plans for file in one.unused):
            say(f"{file}: not used, since these are not the weights of the network that counts in {book.path}")
        if show:
            _show(plans, book)
            _show_others(plans, book, which, settings)
            return
        options = {"data_root": data_root, "download": download, "device": device}
        tasks = in_order(task for one in plans for task in one.missing)
        runner = Runner(book, say, options, keep_weights, keep_records)
        if under_torchrun():
            runner.run_together(tasks, seconds)
            return
        failed = runner.run(tasks, jobs, seconds, only_whole)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        fail(error)
    except KeyboardInterrupt:
        say("stopped; the same command goes on", stderr=True)
        raise typer.Exit(130) from None
    if failed:
        fail(RuntimeError(f"{len(failed)} cells failed; their run folders have train.log"))


table.__doc__ = (
    f"Train the cells of the paper's tables that are missing, and render them beside the paper's numbers.\n\n{_LIST}"
)


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"seeds={text!r} must be whole numbers, as in 0,1,2") from None


def _seconds(text: str | None) -> float:
    """Return a duration such as 1h30m in seconds; without one there is no end."""
    if text is None:
        return float("inf")
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    if not text or found is None:
        raise ValueError(f"budget={text!r} must be a duration, as in 9m, 1h30m or 540s")
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    total = 3600.0 * hours + 60.0 * minutes + seconds
    if total <= WORTH_STARTING:
        raise ValueError(
            f"budget={text!r} leaves no time for any cell; possible: more than {WORTH_STARTING:g}s, as in 9m or 1h30m"
        )
    return total


def _set(fields: list[str]) -> dict[str, Any]:
    """Return recipe fields from texts such as precision=tf32."""
    values = {}
    for text in fields:
        name, equals, value = text.partition("=")
        if not equals and name in hints:
            raise ValueError(f"--set {text}: give a value, as in precision=bf16")
        if not equals or name not in hints:
            raise ValueError(
                f"--set {text}: must be FIELD=VALUE with a field of a recipe.{nearest(name, hints)} Known: "
                f"{', '.join(hints)}"
            )
        if name == "seed":
            raise ValueError(f"--set {text}: all cells would have this seed; possible: --seeds {value or '0,1,2'}")
        values[name] = value_of_flag(name, value)
    return values


def _show(plans: list[Plan], ledger: Ledger) -> None:
    expected = costs(plans, ledger)
    shown = Shown(
        "table",
        "cells done",
        "missing",
        "will cost",
        title=f"Time of {usual_device(ledger) or 'a device'}, judged by cells that are done on it",
    )
    for one in plans:
        known = [expected[task.title] for task in one.missing]
        total = sum(cost for cost in known if cost is not None)
        unknown = sum(cost is None for cost in known)
        words = " + ".join(
            filter(None, (f"{total / 60:.1f} min" if total else "", f"{unknown} × unknown" if unknown else ""))
        )
        shown.add_row(f"{one.table.name}: {one.table.title}", str(len(one.done)), str(len(one.missing)), words)
    show_made(shown)
    if len(plans) == 1:
        for cell, entry in plans[0].done:
            attack = None if cell.attack is None else cell.attack[1]
            number = "N/C" if entry.diverged else f"{entry.number(plans[0].table.measure, attack):.2f}%"
            say(f"  done     {cell.title}, seed {entry.recipe.seed}: {number}")
        for task in plans[0].missing:
            begun = " (begun)" if task.setup is None and (task.folder / "checkpoint.safetensors").is_file() else ""
            say(f"  missing  {task.title}{begun}")


def _show_others(plans: list[Plan], ledger: Ledger, schedule: str, settings: dict[str, Any]) -> None:
    """Say which cells are in the ledger in another arithmetic, under another schedule, or with other data."""
    for one in plans:
        first = one.table.recipe(one.table.cells[0], schedule, **settings)
        for other, shown in settings_of(one.table, ledger, {}).items():
            flags = [f"--schedule {other.schedule}"] * (other.schedule != schedule)
            flags += [f"--set precision={other.precision}"] * (other.precision != first.precision)
            flags += [f"--data {other.data}"] * (bool(other.data) and other.data != first.data)
            how = [f"with {' '.join(flags)}"] * bool(flags)
            how += ["without --data"] * (not other.data and "data" in settings)
            if how:
                count = sum(bool(cell.ours) for cell in shown.values())
                say(f"  {one.table.name}: {count} cells are done {', '.join(how)}")


def marks(name: str) -> tuple[str, str]:
    """Return the lines that a table goes between."""
    return f"<!-- dcnet table {name}: begin -->", f"<!-- dcnet table {name}: end -->"


def _write(chosen: list[Any], ledger: Ledger, folder: Path | None, files: list[Path], settings: dict[str, Any]) -> None:
    texts = {one.name: text for one in chosen if (text := markdown(one, ledger, **settings))}
    if not texts:
        raise ValueError(f"{ledger.path} has no cell of these tables yet")
    placed = {file: _marked(file, list(texts)) for file in files}  # all, before anything is written
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--render {folder} is a file; possible: a folder for tables.md and tables.html")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(
            folder / "tables.md", ("# The paper's tables, measured\n\n" + "\n\n".join(texts.values()) + "\n").encode()
        )
        write_atomically(folder / "tables.html", page(chosen, ledger, **settings).encode())
        say(f"{folder / 'tables.md'} and {folder / 'tables.html'} written")
    for file, wanted in placed.items():
        for name in wanted:
            render_into(file, texts[name], *marks(name))
        say(f"{file}: {', '.join(wanted)} put in place")


def _marked(file: Path, names: list[str]) -> list[str]:
    """Return those of the tables for which the file has marks; raise where it has none of any, or damaged ones."""
    text = read_page(file)
    found = [name for name in names if marks(name)[0] in text]
    if not found:
        begin, end = marks(names[0] if len(names) == 1 else "NAME")
        raise ValueError(
            f"{file} has no place for {', '.join(names)}; a table goes between the lines {begin} and {end}"
        )
    for name in found:
        around(file, *marks(name))
    return found
