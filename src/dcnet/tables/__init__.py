"""The paper's tables: each cell as a recipe, a runner that fills them, a ledger of what was found, and pages of it."""

from dcnet.tables.ledger import Entry, Ledger
from dcnet.tables.paper import TABLES, find_table
from dcnet.tables.picture import compared, draw_differences, picture
from dcnet.tables.plan import Plan, Task, check_matches, costs, in_order, plan, usual_device
from dcnet.tables.render import markdown, page, settings_of
from dcnet.tables.runner import WORTH_STARTING, Runner, under_torchrun
from dcnet.tables.table import SCHEDULES, Cell, Table

__all__ = [
    "SCHEDULES",
    "TABLES",
    "WORTH_STARTING",
    "Cell",
    "Entry",
    "Ledger",
    "Plan",
    "Runner",
    "Table",
    "Task",
    "check_matches",
    "compared",
    "costs",
    "draw_differences",
    "find_table",
    "in_order",
    "markdown",
    "page",
    "picture",
    "plan",
    "settings_of",
    "under_torchrun",
    "usual_device",
]
