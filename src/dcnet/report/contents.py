"""The contents of the page for each run and for all together, without their layout."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from dcnet.figures import titles_of
from dcnet.inspection import inspect_run
from dcnet.robustness.records import Headline, Record, check_up_at, doubt, eps_of, headline
from dcnet.training import Recipe, Run


@dataclass
class Shown:
    """One run, as the page shows it. missing: sentences that say what is not shown, and why."""

    title: str
    run: Run
    anchor: str = ""
    inspection: dict[str, Any] | None = None
    missing: list[str] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(init=False)  # read once: `Run` reads its files each time it is asked
    records: list[Record] = field(init=False)  # of attacks

    def __post_init__(self) -> None:
        self.metrics, self.records = self.run.metrics, self.run.attacks

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

    def headline(self, eps: float | None) -> Headline | None:
        """Return the figure for its robustness at that ε, in units of 1/255; None if it was not attacked with it."""
        return headline(self.records, eps)

    @property
    def sizes(self) -> list[float]:
        """The ε, in units of 1/255, that it was attacked with."""
        return sorted({eps for record in self.records if (eps := eps_of(record)) is not None})

    @property
    def check_ups(self) -> dict[float, dict[str, Any]]:
        """By ε, in units of 1/255, the last check-up with it."""
        return {eps: found for eps in self.sizes if (found := check_up_at(self.records, eps)) is not None}

    def doubted(self, record: Record, entry: dict[str, Any]) -> str | None:
        """Return why the check-up at its ε casts doubt on an accuracy in a record; None if it does not.

        Images made on another network are not doubted, since they do not depend on this one's gradients. That stronger
        attacks exist is only said of the lowest accuracy of a record, since for the others it is obvious.
        """
        check_up = self.check_ups.get(eps_of(record) or -1.0)
        if record["transfer"] or check_up is None or "accuracy" not in entry:
            return None
        lowest = min(other["accuracy"] for other in record["attacks"] if "accuracy" in other)
        return doubt(entry["accuracy"] if entry["accuracy"] == lowest else 0.0, check_up)


def gather(folders: Sequence[str | Path], data_root: str | Path) -> list[Shown]:
    """Return the runs in these folders, inspected where that is possible; raise where a folder is no run's."""
    runs = [Run(folder) for folder in folders]
    repeated = {
        str(run.folder) for run in runs if [other.folder.resolve() for other in runs].count(run.folder.resolve()) > 1
    }
    if repeated:
        raise ValueError(f"given more than once: {', '.join(sorted(repeated))}")
    shown = [
        Shown(title, run, f"run-{number}")
        for number, (title, run) in enumerate(zip(titles_of(runs), runs, strict=True), 1)
    ]
    for one in shown:
        if one.run.result is None:
            last = one.metrics[-1]["epoch"] if one.metrics else 0
            one.missing.append(
                f"This run is not finished (epoch {last:g}). Go on with: dcnet train --resume "
                f"{quote(str(one.run.folder))}"
            )
        try:
            one.inspection = inspect_run(one.run, data_root)
        except (FileNotFoundError, ValueError) as error:
            one.missing.append(f"No filters, angles and examples: {error}")
        if not one.records and one.run.checkpoint.is_file():
            one.missing.append(f"Not attacked yet. Run: dcnet attack {quote(str(one.run.folder))}")
    return shown


def differing_fields(shown: Sequence[Shown]) -> dict[str, list[Any]]:
    """Return the recipe's fields that are not the same in all runs, with each run's value."""
    recipes = [_fields(one.run.recipe) for one in shown]
    return {
        name: [recipe[name] for recipe in recipes]
        for name in recipes[0]
        if len({str(recipe[name]) for recipe in recipes}) > 1
    }


def _fields(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's fields; where it counts steps, its epochs mean nothing."""
    return asdict(recipe) | ({} if recipe.steps is None else {"epochs": None})
