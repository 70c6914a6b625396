"""The tables of docs/robustness.md are those of the records, and the script that makes them knows its runs."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dcnet.training import Run, change, make_recipe

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def scripts():
    sys.path.insert(0, str(ROOT / "experiments"))
    yield
    sys.path.remove(str(ROOT / "experiments"))


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("robustness")


@pytest.fixture(scope="module")
def tables():
    return importlib.import_module("robustness_tables")


def test_the_page_has_the_records_tables(tables):
    text = (ROOT / "docs" / "robustness.md").read_text()
    between = text[text.index(tables.BEGIN) + len(tables.BEGIN) : text.index(tables.END)].strip()
    assert between == tables.rendered(ROOT / "results" / "robustness")


def test_tables_have_ours_and_the_papers(tables, tmp_path):
    for name, clean, left in (("natural-plain", 90.0, 12.34), ("fgsm-tanh", 80.0, 56.78)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text("{}")
        attacks = [{"attack": attack, "accuracy": left} for attack in ("fgsm", "bim", "pgd:iterations=50:restarts=5")]
        result = {"clean": clean, "attacks": attacks, "transfer": False, "labels": "true"}
        black = {
            "clean": clean,
            "attacks": [{"attack": "fgsm", "accuracy": 70.0}, {"attack": "bim", "accuracy": 60.0}],
            "transfer": True,
        }
        (tmp_path / name / "attacks.json").write_text(
            json.dumps([result, {**black, "from": "runs/natural-source", "labels": "true"}])
        )
    lines = tables.rendered(tmp_path).splitlines()
    assert "| natural, FGSM | 12.34 (18.82) | – (43.64) | – (50.47) | – (52.60) |" in lines
    assert "| FGSM-trained, none | – (83.70) | – (87.41) | – (87.47) | 80.00 (87.54) |" in lines
    assert "| FGSM-trained, PGD-50×5 | – | – | – | 56.78 |" in lines
    assert "| natural, BIM | 60.00 (36.22) | – (43.10) | – (27.48) | – (29.06) |" in lines
    assert "| natural | true | 90.0 / 12.3 / 12.3 | – | – | – |" in lines


def test_jobs_are_the_recorded_ones(script):
    """Every record was made with the recipe that the script would train by today."""
    jobs = dict(script.jobs(script.VARIANTS))
    folders = [path.parent for path in (ROOT / "results" / "robustness").glob("*/result.json")]
    assert folders
    for folder in folders:
        flags = [*jobs[folder.name], *script.FAST]
        given = {}
        while flags:
            name = flags.pop(0).removeprefix("--").replace("-", "_")
            given[name] = flags.pop(0) if flags and not flags[0].startswith("--") else True
        given = {name: {"none": None}.get(value, value) for name, value in given.items()}
        for name in ("seed", "evaluate_every"):
            given[name] = int(given.get(name, 0))
        for name in ("epochs", "adversarial_share"):
            if name in given:
                given[name] = float(given[name])
        assert Run(folder).recipe == change(make_recipe("paper-adversarial"), **given), folder.name


def command(name, code, log):
    return name, [sys.executable, "-c", code], log


def test_a_failed_job_is_said(script, tmp_path, capsys):
    queues = [
        [command(name, f"raise SystemExit({status})", tmp_path / "log")] for name, status in (("good", 0), ("bad", 3))
    ]
    assert script.run_all(queues, parallel=2, seconds=60) == ["bad"]
    assert "bad: exit status 3" in capsys.readouterr().out


def test_a_slow_call_holds_up_its_own_queue_alone(script, tmp_path, capsys):
    slow = [
        command("slow", "import time; time.sleep(60)", tmp_path / "log"),
        command("behind it", "", tmp_path / "log"),
    ]
    others = [command("first", "", tmp_path / "log"), command("second", "", tmp_path / "log")]
    assert script.run_all([slow, others, []], parallel=2, seconds=4) == []
    said = capsys.readouterr().out
    assert "first: done\nsecond: done\n" in said
    assert "stopped: slow; not begun: behind it" in said


def test_kept_records_name_no_folder_of_the_machine(script, tmp_path):
    folder = tmp_path / "runs" / "natural-tanh"
    folder.mkdir(parents=True)
    for name in ("result.json", "recipe.json"):
        (folder / name).write_text("{}")
    black = {"from": "/somewhere/else/natural-source", "transfer": True, "labels": "true", "attacks": []}
    (folder / "attacks.json").write_text(json.dumps([black, {**black, "from": None, "transfer": False}]))
    script.keep(SimpleNamespace(runs=tmp_path / "runs", into=tmp_path / "kept", variants=[""]))
    kept = json.loads((tmp_path / "kept" / "natural-tanh" / "attacks.json").read_text())
    assert [result["from"] for result in kept] == ["natural-source", None]


def test_a_page_that_is_not_there(tables, tmp_path):
    with pytest.raises(SystemExit, match=r"none\.md does not exist; it must have the lines"):
        tables.main(["--into", str(tmp_path / "none.md")])
