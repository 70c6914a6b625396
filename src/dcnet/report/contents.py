"""What the page says of each run, and of all together; nothing about how it looks."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from dcnet.figures import titles_of
from dcnet.inspection import inspect_run
from dcnet.training import Recipe, Run


@dataclass
class Shown:
    """One run, as the page shows it. missing: sentences that say what is not shown, and why."""

    title: str
    run: Run
    anchor: str = ""
    inspection: dict[str, Any] | None = None
    missing: list[str] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(init=False)  # read once: `Run` reads its file each time it is asked

    def __post_init__(self) -> None:
        self.metrics = self.run.metrics

    @property
    def operator(self) -> str:
        recipe = self.run.recipe
        if recipe.magnitude is None:
            return "plain"
        weighting = f", weighting {recipe.weighting}" if recipe.weighting else ""
        return f"{recipe.magnitude} + {recipe.angular}{weighting}"

    @property
    def changed_fields(self) -> dict[str, Any]:
        """The recipe's fields that are not a recipe's defaults."""
        usual = asdict(Recipe())
        return {name: value for name, value in _fields(self.run.recipe).items() if value != usual[name]}

    @property
    def worst(self) -> tuple[float, float] | None:
        """The lowest accuracy, in percent, that attacks on the run itself with true labels have left at the ε of the last of them; and that ε."""
        own = [result for result in self.run.attacks if not result["transfer"] and result["labels"] == "true"]
        own = [result for result in own if any("accuracy" in entry for entry in result["attacks"])]
        if not own:
            return None
        eps = own[-1]["eps"]
        return min(entry["accuracy"] for result in own if result["eps"] == eps for entry in result["attacks"] if "accuracy" in entry), eps

    @property
    def verdict(self) -> str | None:
        """The last check-up's."""
        check_ups = [result["check-up"] for result in self.run.attacks if "check-up" in result]
        return check_ups[-1]["verdict"] if check_ups else None


def gather(folders: Sequence[str | Path], data_root: str | Path) -> list[Shown]:
    """The runs in these folders, inspected where that is possible; raises where a folder is no run's."""
    runs = [Run(folder) for folder in folders]
    repeated = {str(run.folder) for run in runs if [other.folder.resolve() for other in runs].count(run.folder.resolve()) > 1}
    if repeated:
        raise ValueError(f"given more than once: {', '.join(sorted(repeated))}")
    shown = [Shown(title, run, f"run-{number}") for number, (title, run) in enumerate(zip(titles_of(runs), runs, strict=True), 1)]
    for one in shown:
        if one.run.result is None:
            last = one.metrics[-1]["epoch"] if one.metrics else 0
            one.missing.append(f"This run is not finished (epoch {last:g}). Go on with: dcnet train --resume {quote(str(one.run.folder))}")
        try:
            one.inspection = inspect_run(one.run, data_root)
        except (FileNotFoundError, ValueError) as error:
            one.missing.append(f"No filters, angles and examples: {error}")
        if not one.run.attacks and one.run.checkpoint.is_file():
            one.missing.append(f"Not attacked yet. Run: dcnet attack {quote(str(one.run.folder))}")
    return shown


def differing_fields(shown: Sequence[Shown]) -> dict[str, list[Any]]:
    """The recipe's fields that are not the same in all runs, with each run's value."""
    recipes = [_fields(one.run.recipe) for one in shown]
    return {name: [recipe[name] for recipe in recipes] for name in recipes[0] if len({str(recipe[name]) for recipe in recipes}) > 1}


def _fields(recipe: Recipe) -> dict[str, Any]:
    """The recipe's fields; where it counts steps, its epochs mean nothing."""
    return asdict(recipe) | ({} if recipe.steps is None else {"epochs": None})
