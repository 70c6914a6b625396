"""`dcnet runs`: the run folders and their results, sorted, compared, or as JSON."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dcnet.cli.common import fail, folder_path, run_row, say, show_json, show_runs, show_table
from dcnet.training import Run
from dcnet.training.run import run_folders
from dcnet.util.suggest import nearest


def _number(name: str, sign: float = 1.0) -> Callable[[Run], float]:
    """Sort by a number of the result; runs without it come last."""
    return lambda run: sign * (run.result or {}).get(name, sign * math.inf)


_ORDERS: dict[str, Callable[[Run], Any]] = {
    "name": lambda run: str(run.folder),
    "accuracy": _number("accuracy", -1.0),
    "loss": _number("loss"),
    "epochs": _number("epochs"),
    "seconds": _number("seconds"),
    "parameters": _number("parameters"),
    "date": lambda run: (
        -max(
            path.stat().st_mtime
            for path in (run.folder / "recipe.json", run.folder / "metrics.jsonl")
            if path.is_file()
        )
    ),
}


def runs(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder to look in; runs if not given.", parser=folder_path, metavar="FOLDER"),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            help=f"By what: {', '.join(_ORDERS)}; the highest accuracy and the latest first, of all else the least.",
            autocompletion=lambda: list(_ORDERS),
            metavar="WHAT",
        ),
    ] = "name",
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Two run folders: how their recipes and results differ.", metavar="RUN RUN"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with the whole recipe and result of each run.")
    ] = False,
) -> None:
    """List the run folders and their results."""
    try:
        if sort not in _ORDERS:
            raise ValueError(f"unknown order {sort!r}.{nearest(sort, _ORDERS)} Possible: {', '.join(_ORDERS)}")
        if compare is not None:
            _compare(Run(compare[0]), Run(compare[1]), as_json)
            return
        if folder is not None and not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise ValueError(f"{folder} {what}; possible: a folder in which there are run folders")
    except (ValueError, OSError) as error:
        fail(error)
    folder = Path("runs") if folder is None else folder
    found: list[tuple[Any, list[str], dict[str, Any]]] = []
    unreadable: dict[str, str] = {}
    for path in run_folders(folder):
        try:
            run = Run(path)
            found.append((_ORDERS[sort](run), run_row(run), _entry(run)))
        except Exception as error:  # whatever one folder holds, the others are shown
            unreadable[str(path)] = (
                f"{error}" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
            )
    found.sort(key=lambda one: one[0])
    if as_json:
        show_json(
            [*(entry for _, _, entry in found), *({"run": path, "error": why} for path, why in unreadable.items())]
        )
        return
    if found:
        show_runs([row for _, row, _ in found])
    elif not unreadable:
        say(f"no runs under {folder}")
    for name, why in unreadable.items():
        say(f"{name} cannot be read: {why}", stderr=True)


def _entry(run: Run) -> dict[str, Any]:
    metrics = run.metrics
    return {
        "run": str(run.folder),
        "finished": run.result is not None,
        "recipe": asdict(run.recipe),
        "result": run.result,
        "epochs": len(metrics),
    }


_RESULTS = ("accuracy", "loss", "epochs", "steps", "seconds", "images_per_second", "parameters")


def _compare(one: Run, other: Run, as_json: bool) -> None:
    """Show what differs in two recipes, and both results."""
    recipes = [asdict(run.recipe) for run in (one, other)]
    fields = {name: [recipe[name] for recipe in recipes] for name in recipes[0] if recipes[0][name] != recipes[1][name]}
    found = [run.result or {} for run in (one, other)]
    results = {name: [result.get(name) for result in found] for name in _RESULTS}
    if as_json:
        show_json({"runs": [str(one.folder), str(other.folder)], "recipe": fields, "result": results})
        return
    columns = ("", str(one.folder), str(other.folder))
    if fields:
        show_table(
            columns,
            [[name, *(_value(value) for value in values)] for name, values in fields.items()],
            "Recipes: what differs",
        )
    else:
        say("The recipes are the same.")
    rows = []
    for name, (a, b) in results.items():
        rows.append([name.replace("_", " "), _value(a), _value(b), "" if a is None or b is None else f"{b - a:+,.6g}"])
    show_table((*columns, "difference"), rows, "Results", right=(*columns[1:], "difference"))
    for run in (one, other):
        if run.result is None:
            say(f"{run.folder} is unfinished")


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple | list):
        return ", ".join(_value(part) for part in value) or "none"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
