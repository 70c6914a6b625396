"""Our numbers against the paper's, as one picture."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from dcnet.figures.style import COLORS, MARKERS, add_legend, new_figure
from dcnet.tables.ledger import Ledger, kind_of
from dcnet.tables.render import Shown, settings_of
from dcnet.tables.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FARTHEST = 3.0  # points: cells that differ by more are named below the picture, which the others fill


@dataclass(frozen=True)
class Compared:
    """The cells of one table for which the paper has a number, and so do we."""

    table: Table
    cells: tuple[Shown, ...]


def compared(tables: Iterable[Table], ledger: Ledger, **settings: Any) -> list[Compared]:
    """Return the test errors that can be compared with the paper's: the whole schedule, the paper's data.

    A network that stands in several tables is in the largest of them only.
    """
    found, seen = [], set()
    for table in sorted(tables, key=lambda table: -len(table.cells)):
        cells = []
        for setting, by_title in settings_of(table, ledger, settings).items():
            for shown in by_title.values():
                recipe = table.recipe(shown.cell, **settings)
                network = (kind_of(recipe), setting.data or recipe.data, setting.precision)
                if setting.schedule == "paper" and table.measure == "error" and shown.difference is not None:
                    cells += [shown] if network not in seen else []
                    seen.add(network)
        if cells:
            found.append(Compared(table, tuple(cells)))
    return found


def draw_differences(axis: "Axes", found: list[Compared]) -> None:
    """Draw how far our numbers are from the paper's, over the paper's.

    A line through a point spans the deviation over the seeds.
    """
    axis.axhspan(-1.0, 1.0, color="#777777", alpha=0.12, linewidth=0.0)
    axis.axhline(0.0, color="#777777", linewidth=0.8)
    beyond = []
    for number, one in enumerate(found):
        near = [shown for shown in one.cells if abs(_difference(shown)) <= _FARTHEST]
        axis.errorbar(
            [_paper(shown) for shown in near],
            [_difference(shown) for shown in near],
            [stdev(shown.numbers) if len(shown.numbers) > 1 else 0.0 for shown in near],
            fmt=MARKERS[number % len(MARKERS)],
            color=COLORS[number % len(COLORS)],
            markersize=5,
            elinewidth=1.0,
            label=one.table.title,
        )
        beyond += [
            f"{one.table.title}, {shown.cell.title}: {mean(shown.numbers):.2f}, the paper {_paper(shown):.2f}"
            for shown in one.cells
            if shown not in near
        ]
    axis.set(xlabel="the paper's test error, percent", ylabel="ours minus the paper's, points")
    if beyond:
        axis.set_xlabel("\n".join(["the paper's test error, percent", "", "Not in the picture:", *beyond]))
    axis.grid(alpha=0.25)
    add_legend(axis)


def _paper(shown: Shown) -> float:
    assert isinstance(shown.cell.paper, float)
    return shown.cell.paper


def _difference(shown: Shown) -> float:
    assert shown.difference is not None
    return shown.difference


def picture(tables: Iterable[Table], ledger: Ledger, **settings: Any) -> "Figure":
    """Return the picture of all test errors that can be compared; raise where there are none."""
    found = compared(tables, ledger, **settings)
    if not found:
        raise ValueError(
            f"{ledger.path} has no test error that can be compared with the paper's: it needs finished cells of "
            "these tables under the paper's schedule and on its data"
        )
    figure, ((axis,),) = new_figure(1, 1, 8.0, 4.5)
    draw_differences(axis, found)
    return figure
