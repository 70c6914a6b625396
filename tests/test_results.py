"""What results/ says is what its records say."""

import json
import re
from pathlib import Path

import pytest

from dcnet.tables import TABLES, Ledger, markdown
from dcnet.training import Run

RESULTS = Path(__file__).parent.parent / "results"
FOLDERS = sorted(path.parent for path in RESULTS.rglob("result.json"))
CELLS = RESULTS / "tables"  # whose page is made of the ledger


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(RESULTS)))
def test_a_record_is_whole(folder):
    run = Run(folder)
    assert run.metrics[-1]["test_accuracy"] == run.accuracy
    assert run.metrics[-1]["step"] == run.result["steps"]
    assert run.recipe.data == run.result["data"]


def test_numbers_of_the_page():
    """Every line with a link to a record has its accuracy, or its error, in percent."""
    seen = set()
    for line in (RESULTS / "README.md").read_text().splitlines():
        for link in re.findall(r"\]\(((?!tables)[\w/-]+)\)", line):
            accuracy = json.loads((RESULTS / link / "result.json").read_text())["accuracy"]
            assert f"{accuracy:.2f}%" in line or f"{100 - accuracy:.2f}%" in line, line
            seen.add(RESULTS / link)
    assert seen == {folder for folder in FOLDERS if CELLS not in folder.parents}


def test_the_ledger_is_of_the_records():
    """Every line has its record with the same recipe and error, and every record its line."""
    entries = Ledger(CELLS / "ledger.jsonl").entries
    assert {entry.record["run"] for entry in entries} == {folder.name for folder in (CELLS / "runs").iterdir()}
    for entry in entries:
        run = Run(CELLS / "runs" / entry.record["run"])
        assert run.recipe == entry.recipe
        assert run.result is None or round(100.0 - run.accuracy, 4) == entry.record["error"]


@pytest.mark.parametrize("path", ["results/tables/tables.md", "docs/results.md"])
def test_pages_of_tables_are_of_the_ledger(path):
    text = (RESULTS.parent / path).read_text()
    ledger = Ledger(CELLS / "ledger.jsonl")
    shown = [name for name, table in TABLES.items() if markdown(table, ledger)]
    assert shown
    for name in shown:
        assert markdown(TABLES[name], ledger) in text, (
            f"{name}: dcnet table --ledger results/tables/ledger.jsonl --render results/tables --into docs/results.md"
        )
