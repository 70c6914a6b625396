"""What results/ says is what its records say."""

import json
import re
from pathlib import Path

import pytest

from dcnet.training import Run

RESULTS = Path(__file__).parent.parent / "results"
FOLDERS = sorted(path.parent for path in RESULTS.rglob("result.json"))


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
        for link in re.findall(r"\]\(([\w/-]+)\)", line):
            accuracy = json.loads((RESULTS / link / "result.json").read_text())["accuracy"]
            assert f"{accuracy:.2f}%" in line or f"{100 - accuracy:.2f}%" in line, line
            seen.add(RESULTS / link)
    assert seen == set(FOLDERS)
