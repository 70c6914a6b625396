"""Tables for people: the paper's number, ours as mean ± deviation over seeds, in Markdown and as a page."""

import html
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any

from dcnet.tables.ledger import Ledger, kind_of
from dcnet.tables.table import MEASURES, NOT_CONVERGED, SCHEDULES, Cell, Number, Table


@dataclass(frozen=True)
class Shown:
    """A cell with its measured numbers, one for each seed that converged."""

    cell: Cell
    numbers: tuple[float, ...]
    diverged: int

    @property
    def ours(self) -> str:
        """As text: mean ± deviation and the number of seeds; N/C if none converged; empty if none ran."""
        if not self.numbers:
            return NOT_CONVERGED if self.diverged else ""
        text = f"{mean(self.numbers):.2f}"
        if len(self.numbers) > 1:
            text += f" ± {stdev(self.numbers):.2f} (n = {len(self.numbers)})"
        return text + (f", {self.diverged} N/C" if self.diverged else "")

    @property
    def paper(self) -> str:
        paper = self.cell.paper
        return "–" if paper is None else paper if isinstance(paper, str) else f"{paper:.2f}"

    @property
    def difference(self) -> float | None:
        """Our number minus the paper's, in points."""
        paper: Number = self.cell.paper
        return mean(self.numbers) - paper if self.numbers and isinstance(paper, float | int) else None


@dataclass(frozen=True)
class Setting:
    """What all numbers of one rendered table have in common."""

    schedule: str
    data: str  # empty: that of each cell
    precision: str
    others: str = ""  # recipe fields that all cells were given


def settings_of(table: Table, ledger: Ledger, settings: dict[str, Any]) -> dict[Setting, dict[str, Shown]]:
    """Return the measured cells of a table, separately for each schedule, data set and precision.

    Cells that name their own data sets, such as two columns, stand together.
    """
    settings = {name: value for name, value in settings.items() if name not in ("data", "precision", "seed")}
    found: dict[Setting, dict[str, Shown]] = {}
    own_data = table.data if any("data" in cell.fields for cell in table.cells) else []
    wheres = dict.fromkeys(
        ("" if entry.recipe.data in own_data else entry.recipe.data, entry.recipe.precision) for entry in ledger.entries
    )
    seeds = sorted({entry.recipe.seed for entry in ledger.entries})
    own_length = {"steps", "epochs"} & set(settings)  # then all schedules have the same length
    for schedule in ("",) if own_length else SCHEDULES:
        recipes = {cell: table.recipe(cell, schedule or "paper", **settings) for cell in table.cells}
        for data, precision in wheres:
            shown = {}
            for cell, own in recipes.items():
                where = data or own.data
                setup, attack = (cell.attack[0].name, cell.attack[1]) if cell.attack is not None else (None, None)
                kind = kind_of(own)
                of_seeds = [ledger.counting.get((kind, where, precision, seed), {}) for seed in seeds]
                measured = [entries for entries in of_seeds if setup in entries]
                # attacked or not: a network that has not converged says nothing
                converged = [each for each in measured if not any(entry.diverged for entry in each.values())]
                numbers = tuple(each[setup].number(table.measure, attack) for each in converged)
                # the paper's number is for its own data and recipe
                compared = cell if own.data == where and not settings else replace(cell, paper=None)
                shown[cell.title] = Shown(compared, numbers, len(measured) - len(numbers))
            if any(one.ours for one in shown.values()):
                found[Setting(schedule, data, precision, ", ".join(f"{n}={v}" for n, v in settings.items()))] = shown
    return found


def _about(table: Table, setting: Setting, left_out: bool) -> str:
    share = SCHEDULES.get(setting.schedule, 0.0)  # 0: the length is one of the other settings
    whole = "the paper's schedule" if table.base.startswith("paper") else f"the schedule of {table.base}"
    length = whole if share == 1.0 else f"{share:g} of {whole}" if share else "a schedule of its own"
    words = f"{MEASURES[table.measure].capitalize()} in percent, at the last epoch. "
    data = setting.data or " and ".join(table.data)
    words += f"{', '.join(filter(None, (data, length, setting.precision, setting.others)))}."
    kinds = {name.partition(":")[0] for name in table.data}  # ImageNet's folder may be anywhere
    if setting.data and setting.data.partition(":")[0] not in kinds:
        words += f" The paper's numbers are for {' and '.join(table.data)}, and are not to be compared with these."
    elif share not in (0.0, 1.0):
        words += " The paper's numbers are for the whole schedule, and are not to be compared with these."
    if left_out:
        words += " Rows of which nothing is measured are left out."
    return f"{words} {table.note}".strip()


def _rows(table: Table, setting: Setting, shown: dict[str, Shown]) -> dict[str, list[Shown | None]]:
    """Return the rows: under the paper's schedule all, otherwise those of which something is measured."""
    rows = {row: [shown.get(Cell(row, column, {}).title) for column in table.columns] for row in table.rows}
    return {
        row: cells
        for row, cells in rows.items()
        if setting.schedule == "paper" or any(one is not None and one.ours for one in cells)
    }


def markdown(table: Table, ledger: Ledger, **settings: Any) -> str:
    """Return the table under every schedule, data set and precision it was measured with.

    settings: other fields of all cells.
    """
    lines = []
    for setting, shown in settings_of(table, ledger, settings).items():
        rows = _rows(table, setting, shown)
        there = [one for cells in rows.values() for one in cells if one is not None]
        compared = any(one.cell.paper is not None for one in there)
        words = " In brackets: the paper’s." if compared else ""
        if any(NOT_CONVERGED in text for one in there for text in (one.ours, one.paper)):
            words += f" {NOT_CONVERGED}: not converged."
        lines += [
            f"**{table.title}.** {_about(table, setting, len(rows) < len(table.rows))}{words}",
            "",
            "| | " + " | ".join(table.columns) + " |",
            "|---" * (1 + len(table.columns)) + "|",
        ]
        for row, cells in rows.items():
            lines.append(
                f"| {row} | "
                + " | ".join(
                    "" if one is None else f"{one.ours or '?'}{f' ({one.paper})' if compared else ''}" for one in cells
                )
                + " |"
            )
        lines.append("")
    return "\n".join(lines).strip()


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
body { color: #1a1a1a; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0 2rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid #ccc; padding: .35rem .6rem; text-align: right; }
th:first-child { text-align: left; }
td small { display: block; color: #444; }
.scroll { overflow-x: auto; }
@media (prefers-color-scheme: dark) {
  body { color: #eee; background: #16181b; } th, td { border-color: #444; } td small { color: #bbb; }
}
"""


def _color(difference: float | None, higher_is_better: bool) -> str:
    """Return the background of a cell: blue where ours beats the paper's, orange where not, full at three points."""
    if difference is None:
        return ""
    strength = min(1.0, abs(difference) / 3.0) * 0.55
    better = difference >= 0 if higher_is_better else difference <= 0
    return f"background: rgba({'38, 110, 200' if better else '226, 120, 20'}, {strength:.2f})"


def page(tables: Iterable[Table], ledger: Ledger, **settings: Any) -> str:
    """Return everything that was measured as one HTML page."""
    parts = []
    for table in tables:
        for setting, shown in settings_of(table, ledger, settings).items():
            head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
            body = []
            rows = _rows(table, setting, shown)
            about = _about(table, setting, len(rows) < len(table.rows))
            for row, cells in rows.items():
                body.append(
                    f"<tr><th>{html.escape(row)}</th>"
                    f"{''.join(_html_cell(one, table.measure == 'accuracy') for one in cells)}</tr>"
                )
            parts.append(
                f"<h2>{html.escape(table.title)}</h2>\n<p>{html.escape(about)}</p>\n"
                f'<div class="scroll"><table><tr><th></th>{head}</tr>\n' + "\n".join(body) + "</table></div>"
            )
    legend = (
        "<p>Blue: ours is better than the paper's; orange: worse; full color at three points. "
        f"A question mark: not measured yet. {NOT_CONVERGED}: not converged.</p>"
    )
    title = "The paper's tables, measured"
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style>\n<h1>{title}</h1>\n{legend}\n"
        + "\n".join(parts)
        + "\n</html>\n"
    )


def _html_cell(shown: Shown | None, higher_is_better: bool) -> str:
    if shown is None:
        return "<td></td>"
    color = _color(shown.difference, higher_is_better)
    style = f' style="{color}"' if color else ""
    paper = "" if shown.cell.paper is None else f"<small>paper {html.escape(shown.paper)}</small>"
    return f"<td{style}>{html.escape(shown.ours or '?')}{paper}</td>"
