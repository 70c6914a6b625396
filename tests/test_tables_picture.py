"""The picture of our numbers against the paper's, and what the page says of it."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import matplotlib
import pytest
from test_cli import call

from dcnet.figures.style import new_figure
from dcnet.tables import TABLES, Ledger, compared, draw_differences, picture

ROOT = Path(__file__).parent.parent
LEDGER = ROOT / "results" / "tables" / "ledger.jsonl"


@pytest.fixture(scope="module")
def ledger():
    return Ledger(LEDGER)


def test_the_page_says_how_close_we_are(ledger):
    found = [shown for one in compared(TABLES.values(), ledger) for shown in one.cells]
    distances = [abs(shown.difference) for shown in found]
    near = sum(distance <= 1.0 for distance in distances)
    words = (
        f"Of the {len(found)} test errors measured so far for which the paper has a number, {near} "
        f"are within a point of it, and half within {median(distances):.1f}"
    )
    assert words in (ROOT / "docs" / "results.md").read_text()


def test_the_picture_of_the_page_is_of_the_ledger(tmp_path):
    done = call("table", "--ledger", str(LEDGER), "--picture", str(tmp_path / "reproduction.svg"))
    assert done.exit_code == 0, done.output
    kept, drawn = ((folder / "reproduction.svg").read_text() for folder in (ROOT / "docs", tmp_path))
    if f"Matplotlib v{matplotlib.__version__}," not in kept:
        pytest.skip(f"another matplotlib than {matplotlib.__version__} drew it")
    assert kept == drawn, "dcnet table --ledger results/tables/ledger.jsonl --picture docs/reproduction.svg"


def test_a_network_in_two_tables_is_one_point(ledger):
    found = compared([TABLES["weighted"], TABLES["resnet32"]], ledger)
    assert [one.table.name for one in found] == ["resnet32"]
    assert "weighted" in {one.table.name for one in compared([TABLES["weighted"]], ledger)}


def test_points_are_where_the_numbers_are(ledger):
    ((axis,),) = new_figure(1, 1, 4.0, 4.0)[1]
    found = compared([TABLES["resnet32"]], ledger)
    draw_differences(axis, found)
    (points,) = [container.lines[0] for container in axis.containers]
    shown = {(x, round(y, 6)) for x, y in points.get_xydata()}
    assert shown == {(one.cell.paper, round(one.numbers[0] - one.cell.paper, 6)) for one in found[0].cells}


def test_a_cell_that_is_far_off_is_named(ledger):
    ((axis,),) = new_figure(1, 1, 4.0, 4.0)[1]
    (one,) = compared([TABLES["resnet32"]], ledger)
    far = replace(one.cells[0], numbers=(90.0,))
    draw_differences(axis, [replace(one, cells=(far, *one.cells[1:]))])
    assert f"ResNet-32 on CIFAR-100, Adam, {far.cell.title}: 90.00, the paper {far.cell.paper:.2f}" in axis.get_xlabel()
    assert max(abs(y) for y in axis.get_ylim()) < 3.0


def test_nothing_to_compare(ledger, tmp_path):
    with pytest.raises(ValueError, match="has no test error that can be compared with the paper's"):
        picture([TABLES["cause"]], ledger)
    done = call("table", "cause", "--ledger", str(LEDGER), "--picture", str(tmp_path / "x.txt"))
    assert done.exit_code == 1
    assert "possible: .png, .svg, .pdf" in done.output
