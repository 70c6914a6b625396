"""The folder of a run: its own from before, a new one, or another run's to overwrite; for one process at a time."""

import hashlib
import json
import shutil
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote

from dcnet.training.checkpoint import load_state
from dcnet.training.own_formulas import FILE as FORMULAS
from dcnet.training.own_formulas import check_formulas, keep_formulas
from dcnet.training.recipe import Recipe, change
from dcnet.training.recipes import recipe_differences
from dcnet.training.run import Run
from dcnet.training.schedule import Schedule
from dcnet.util.files import remove_partial, write_json
from dcnet.util.lock import InUse, locked

LENGTH = ("epochs", "steps")
# files that only the process with the lock writes
_WRITTEN = ("recipe.json", FORMULAS, "metrics.jsonl", "checkpoint.safetensors", "result.json")
_OF_THE_RUN = (*_WRITTEN, "diverged.json", "attacks.json", "inspection.json")


class Place:
    """The place where a run is trained.

    recipe: its recipe, which may have another length with `extend`. overwrite: start again, even if a run is there.
    """

    def __init__(
        self, recipe: Recipe, folder: str | Path | None, held: ExitStack, overwrite: bool = False, extend: bool = False
    ) -> None:
        self.recipe, self.held, self.overwrite, self.extend = recipe, held, overwrite, extend
        self.given = None if folder is None else Path(folder)
        self.locked = False

    def find(self) -> tuple[Path, bool]:
        """Return the folder, and whether its run is finished.

        A run to continue is locked now; a new one is locked by `enter`.
        """
        folder = self._folder()
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file; a run needs a folder")
        if not (folder / "recipe.json").is_file():
            return folder, False
        if not self.overwrite:
            self.check_recipe(folder)
            if (folder / "result.json").is_file() and Run(folder).recipe == self.recipe:
                return folder, True
            check_formulas(folder, self.recipe)
        self._lock(folder)
        return folder, False

    def enter(self, folder: Path) -> Path:
        """Make the folder if necessary, lock it, write the recipe into it, and return it."""
        if not self.locked:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock(folder)
            except InUse:  # another process was faster; if no folder was given, take another one
                if self.given is not None or _holds(folder, self.recipe):
                    raise
                folder = self._suffixed()
                folder.mkdir(parents=True, exist_ok=True)
                self._lock(folder)
            if not self.overwrite:
                self.check_recipe(folder)
        for name in _WRITTEN:
            remove_partial(folder / name)
        if self.overwrite:
            _clear(folder)
        keep_formulas(folder, self.recipe)
        _set_aside_results(folder)  # of another length, or of the steps so far
        if not _holds(folder, self.recipe):
            write_json(folder / "recipe.json", asdict(self.recipe), indent=2)
        return folder

    def _folder(self) -> Path:
        if self.given is not None:
            return self.given
        plain = Path("runs") / self.recipe.title
        return (
            self._suffixed()
            if (plain / "recipe.json").is_file() and not self.overwrite and not _holds(plain, self.recipe)
            else plain
        )

    def _suffixed(self) -> Path:
        """Return a name for this recipe alone, the same every time.

        It does not depend on fields at their defaults, so that new fields do not change it.
        """
        usual = asdict(Recipe())
        own = {name: value for name, value in asdict(self.recipe).items() if value != usual[name]}
        digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
        return Path("runs") / f"{self.recipe.title}-{digest[:6]}"

    def _lock(self, folder: Path) -> None:
        self.held.enter_context(locked(folder))
        self.locked = True

    def check_recipe(self, folder: Path) -> None:
        """Raise if another recipe's run is in the folder."""
        if not (folder / "recipe.json").is_file():
            return
        there = Run(folder).recipe
        other = recipe_differences(there, self.recipe)
        if not other or (self.extend and set(other) <= set(LENGTH)):
            return
        hint = "Choose another folder, or overwrite that run: --overwrite (in Python overwrite=True)"
        if set(other) <= set(LENGTH) and not _shorter(self.recipe, there):
            flag = (
                f"--steps {self.recipe.steps}" if self.recipe.steps is not None else f"--epochs {self.recipe.epochs:g}"
            )
            command = f"dcnet train --resume {quote(str(folder))} {flag}"
            hint += f"; or go on with it to another length: {command} (in Python extend=True)"
        raise ValueError(f"{folder} holds another recipe's run: {', '.join(other.values())}. {hint}")


def open_run(folder: Path, recipe: Recipe) -> Run:
    """Return the run in the folder, made if there is none, for another process to train.

    Raise if another recipe's run is there.
    """
    with ExitStack() as held:
        place = Place(recipe, folder, held)
        place.check_recipe(folder)
        if not (folder / "recipe.json").is_file():
            place.enter(folder)
    return Run(folder)


def total_steps(recipe: Recipe, per_epoch: int) -> int:
    """Return how many steps the recipe takes."""
    return recipe.steps or max(1, round(recipe.epochs * per_epoch))


def check_length(run: Run, recipe: Recipe, per_epoch: int) -> None:
    """Raise if the run's checkpoint cannot be continued to the recipe's length.

    It can be continued if its steps so far had the learning rates of the recipe: then the run becomes what it would
    have been with that length from the start.
    """
    if not run.checkpoint.is_file():
        if run.result is not None:  # to start again would lose its result
            raise ValueError(
                f"{run.folder} is finished, but its weights ({run.checkpoint.name}) are not there, so that it cannot "
                "go on to another length. Possible: a run of its own, with --run FOLDER"
            )
        return
    if run.restored:
        raise ValueError(
            f"{run.folder} was made from a file of weights, and has no optimizer to go on with. Possible: a run of its "
            f"own that starts from them: --pretrained {quote(str(run.folder))}"
        )
    state = load_state(run.checkpoint)
    before, done = change(Recipe(), **state["recipe"]), int(state["step"])
    if before == recipe or not same_but_length(
        before, recipe
    ):  # another recipe: restoring the checkpoint raises an error
        return
    old, new = total_steps(before, per_epoch), total_steps(recipe, per_epoch)
    if new < done:
        raise ValueError(
            f"{run.folder} has done {done} steps already; it cannot end after {new}. Possible: {done} or more"
        )
    earlier, later = Schedule(before, old), Schedule(recipe, new)
    for schedule in (earlier, later):
        schedule.load_state_dict(state["schedule"])
    changed = next((step for step in range(done) if earlier.factor(step) != later.factor(step)), None)
    if changed is not None:
        rates = [recipe.lr * schedule.factor(changed) for schedule in (earlier, later)]
        raise ValueError(
            f"{run.folder} cannot go on to {new} steps: with schedule={recipe.schedule!r} the learning rates "
            "depend on the length of the run, "
            f"and at step {changed + 1} it was {rates[0]:.3g} where a run of {new} steps has {rates[1]:.3g}. "
            "Possible: a run of its own, "
            f"from the start, or from these weights: --pretrained {quote(str(run.folder))}. Constant and plateau "
            "schedules can be extended"
        )


def _shorter(here: Recipe, there: Recipe) -> bool:
    """Return whether a length is less than another of the same kind."""
    if here.steps is None or there.steps is None:
        return here.steps is there.steps and here.epochs < there.epochs
    return here.steps < there.steps


def same_but_length(a: Recipe, b: Recipe) -> bool:
    """Return whether two recipes are the same except for their length."""
    return replace(a, epochs=b.epochs, steps=b.steps) == b


def _holds(folder: Path, recipe: Recipe) -> bool:
    """Return whether the folder has this recipe; False if it cannot be read."""
    try:
        return Run(folder).recipe == recipe
    except (ValueError, OSError):
        return False


def _clear(folder: Path) -> None:
    """Remove the files of a run from the folder, its recipe first: without that it is no longer a run."""
    for name in _OF_THE_RUN:
        (folder / name).unlink(missing_ok=True)
    if (folder / "tensorboard").is_dir():
        shutil.rmtree(folder / "tensorboard")


def _set_aside_results(folder: Path) -> None:
    """Remove the result of a run that will be continued, and rename its attacks, which were on its weights so far."""
    run_result, attacks = folder / "result.json", folder / "attacks.json"
    if attacks.is_file():
        step = (
            int(load_state(folder / "checkpoint.safetensors")["step"])
            if (folder / "checkpoint.safetensors").is_file()
            else 0
        )
        attacks.replace(folder / f"attacks-of-step-{step}.json")
    run_result.unlink(missing_ok=True)
