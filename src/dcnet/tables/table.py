"""Tables: rows, columns, and for each cell the recipe that fills it and the paper's number."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dcnet.training import Recipe, change, make_recipe

Number = (
    float | str | None
)  # in percent; "N/C" where the paper says that the network cannot converge; None where it has no number
NOT_CONVERGED = "N/C"

# The share of every cell's schedule that is run. Milestones are fractions of a run, so they are scaled too.
SCHEDULES = {"paper": 1.0, "short": 0.2, "smoke": 0.0005}
SMOKE_IMAGES = 32  # attacked under the smoke schedule; the others attack all images
MEASURES = {"error": "test error", "top5_error": "top-5 test error", "accuracy": "accuracy on the test images"}


@dataclass(frozen=True)
class Setup:
    """How trained networks are attacked: by these attacks, each on all images.

    Adversarial images are made on the network itself, or on that of the recipe `source`.
    """

    name: str
    attacks: str
    source: tuple[tuple[str, Any], ...] | None = None  # recipe fields of the network that images are made on
    predicted: bool = False
    statistics: str = "running"

    @property
    def long(self) -> bool:
        """Whether it takes minutes on a GPU, not seconds."""
        return "auto" in self.attacks


@dataclass(frozen=True)
class Cell:
    """One number of a table: its own recipe fields, and the paper's number."""

    row: str
    column: str
    fields: dict[str, Any] = field(hash=False)
    paper: Number = None
    attack: tuple[Setup, str] | None = (
        None  # the set-up, and which of its attacks; None for the network as it is trained
    )
    network: str = ""  # the name of the network, if several cells share it

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.row, self.column)))


@dataclass(frozen=True)
class Table:
    """A table of the paper, or one of ours: what it is about, the recipe its cells start from, and the cells."""

    name: str
    title: str
    base: str
    cells: tuple[Cell, ...]
    measure: str = "error"
    note: str = ""
    networks: str = ""  # a name shared by tables of the same networks, so that each network is trained once

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> list[str]:
        """In the order of the fullest row."""
        of_rows = [[cell.column for cell in self.cells if cell.row == row] for row in self.rows]
        return list(dict.fromkeys(column for columns in sorted(of_rows, key=len, reverse=True) for column in columns))

    @property
    def data(self) -> list[str]:
        """The data sets it is about."""
        return list(dict.fromkeys(cell.fields.get("data", make_recipe(self.base).data) for cell in self.cells))

    def source(self, setup: Setup, recipe: Recipe) -> Recipe | None:
        """Return the recipe of the network that adversarial images are made on: of another seed."""
        return None if setup.source is None else change(recipe, **dict(setup.source), seed=recipe.seed + 1)

    def recipe(self, cell: Cell, schedule: str = "paper", seed: int = 0, /, **settings: Any) -> Recipe:
        """Return the recipe of a cell. settings: fields for all cells, such as another data set, also `schedule`."""
        recipe = change(make_recipe(self.base), **cell.fields, seed=seed)
        share = SCHEDULES[schedule]
        length: dict[str, Any] = (
            {"steps": max(1, round(share * recipe.steps))} if recipe.steps else {"epochs": share * recipe.epochs}
        )
        if {"steps", "epochs"} & set(settings):
            length = {}
        return change(recipe, **length, **settings)


@dataclass(frozen=True)
class Row:
    """The name of a row (or column), and the recipe's fields it stands for."""

    name: str
    fields: dict[str, Any] = field(hash=False)


def grid(
    rows: Iterable[Row], columns: Iterable[Row], numbers: dict[str, tuple[Number, ...]], leave: str = "-"
) -> tuple[Cell, ...]:
    """Return the cells of all rows and columns, with the paper's numbers by row.

    If a number is `leave`, there is no such cell.
    """
    columns = list(columns)
    return tuple(
        Cell(row.name, column.name, row.fields | column.fields, paper)
        for row in rows
        for column, paper in zip(columns, numbers.get(row.name, (None,) * len(columns)), strict=True)
        if paper != leave
    )
