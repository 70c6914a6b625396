"""Checks before the first cell is trained, so that a mistake shows at once and not after hours."""

from pathlib import Path
from typing import Any

from dcnet.robustness.evaluate import parse_attacks
from dcnet.tables.ledger import Ledger
from dcnet.tables.plan import Task
from dcnet.training import find_data, recipe_differences
from dcnet.util.files import check_writable, check_writable_folder


def check_places(tasks: list[Task], ledger: Ledger, weights: Path | None, records: Path | None) -> None:
    """Raise if what is found cannot be written, before a cell is trained instead of after it."""
    if not tasks:
        return
    check_writable(ledger.path)
    for folder in (tasks[0].folder.parent, weights, records):
        if folder is not None:
            check_writable_folder(folder)


def check_folders(tasks: list[Task], ledger: Ledger) -> None:
    """Raise if the run folder of a task has another run, of another cell or of a training that does not count."""
    for task in tasks:
        what = None
        if (there := task.other) is not None:
            what = f"holds the run of another cell: {', '.join(recipe_differences(there, task.recipe).values())}"
        elif task.setup is None and task.ended is not None and ledger.find(task.recipe) is not None:
            if ledger.replaced_in(task.folder, task.recipe):
                continue  # a runner was killed before it could enter it
            what = f"holds another training of this cell than the one that counts in {ledger.path}"
            if ledger.counts(task.recipe, task.ended.result):
                what = f"holds this cell without the weights ({task.ended.checkpoint.name}) that attacks need"
        if what is not None:
            raise ValueError(
                f"{task.folder} {what}. Possible: another folder (--runs), or remove that one to train it again"
            )


def find_all_data(tasks: list[Task], options: dict[str, Any]) -> None:
    """Raise if data is missing, here instead of in the process of every cell; fetch it if asked to."""
    for name in dict.fromkeys(task.recipe.data for task in tasks if task.ended is None):
        find_data(name, options.get("data_root", "data"), bool(options.get("download")))


def check_attacks(tasks: list[Task]) -> None:
    """Raise if an attack needs a package that is not installed, before a cell is trained instead of after all."""
    for task in tasks:
        if task.setup is not None and task.ended is None:
            try:
                parse_attacks(task.setup.attacks)
            except ImportError as error:
                raise ImportError(
                    f"{task.title}: {error}, or leave such cells out: --match '!{task.setup.name}'"
                ) from error
