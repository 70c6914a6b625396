"""The paper's tables: what their cells train, the runner that fills them, the ledger, and the pages."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_cli import call

import dcnet
from dcnet.layers import decoupled_layers
from dcnet.tables import (
    SCHEDULES,
    TABLES,
    Entry,
    Ledger,
    Runner,
    costs,
    find_table,
    in_order,
    markdown,
    page,
    plan,
    runner,
    usual_device,
)
from dcnet.tables.ledger import cell_of
from dcnet.training import build_model, change
from dcnet.util.lock import locked

ROOT = Path(__file__).parent.parent
# A table that takes seconds on a CPU: three cells of the real one, on the digits.
QUICK = ["--data", "digits", "--set", "model=cnn9_narrow", "--set", "norm=batch", "--set", "steps=8", "--device", "cpu"]
# enough for networks of the robustness tables to count as converged on the digits
LEARNING = {"epochs": 1.0, "batch": 64, "norm": "batch", "augment": "none", "recalibrate": 5}
LEARNS = [part for field, value in LEARNING.items() for part in ("--set", f"{field}={value}")]
THREE = ["--match", "Baseline, Cosine", "--match", "TanhConv, Cosine, ReLU"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    # for the processes that the runner starts; two pytest workers share two cores
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run_table(folder, *arguments):
    return call("table", "cnn9", *QUICK, "--runs", str(folder), *arguments)


# -- what the cells are ------------------------------------------------------------------------------------------------


def test_counts():
    """As many cells as the paper has numbers, and those that we add without one."""
    papers = {name: sum(cell.paper is not None for cell in table.cells) for name, table in TABLES.items()}
    assert papers == {
        "weighted": 6,
        "weighted-cnn9": 0,
        "cnn9-no-batchnorm": 10,
        "cnn9": 30,
        "resnet32": 22,
        "resnet32-sgd": 22,
    } | {
        "state-of-the-art": 8,
        "white-box": 24,
        "black-box": 40,
        "imagenet": 12,
        "cause": 0,
        "best": 0,
    }
    assert [cell.title for cell in TABLES["cnn9-no-batchnorm"].cells if cell.paper == "N/C"] == [
        "LinearConv, Sq. cosine",
        "SegConv, Sq. cosine",
    ]


@pytest.mark.skipif(not (ROOT.parent / "shared" / "paper.tex").is_file(), reason="the paper's source is not here")
def test_numbers_are_the_papers():
    """Every row of numbers stands in the paper's source as it stands here."""
    text = (ROOT.parent / "shared" / "paper.tex").read_text()
    text = re.sub(r"\\textbf\{([^}]*)\}", r"\1", text).replace("*", "")
    lines = [
        [part.strip().rstrip("\\").strip() for part in line.split("&")] for line in text.splitlines() if "&" in line
    ]
    rows = [[part for part in line if re.fullmatch(r"[\d.]+|N/C", part)] for line in lines]
    for name in ("cnn9", "cnn9-no-batchnorm", "resnet32", "resnet32-sgd", "imagenet", "white-box", "black-box"):
        table = TABLES[name]
        for row in table.rows:
            papers = {cell.column: cell.paper for cell in table.cells if cell.row == row}
            here = [papers[column] for column in table.columns if papers.get(column) is not None]
            assert not here or any(
                [value if value == "N/C" else float(value) for value in line] == here for line in rows
            ), (name, row, here)


@pytest.mark.parametrize("name", [name for name in TABLES if name != "imagenet"])
def test_every_cell_can_be_built(name, monkeypatch):
    monkeypatch.setattr(
        torch.nn.init, "kaiming_normal_", lambda *_, **__: None
    )  # what takes the time, and is not asked about here
    table = TABLES[name]
    cells = [(cell_of(recipe), cell.attack) for cell in table.cells for recipe in [table.recipe(cell)]]
    assert len(set(cells)) == len(cells), "two cells are the same"
    for cell in table.cells:
        recipe = table.recipe(cell)
        model = build_model(recipe, {"num_classes": 10, "in_channels": 3, "input_size": 8})
        decoupled = [layer for layer in decoupled_layers(model).values() if layer.constrained]
        assert bool(decoupled) == (not cell.title.startswith("Baseline") and cell.column != "Baseline")
        if not decoupled:
            assert recipe.orthogonality == 0.0
            assert recipe.projection == 0 or recipe.plain_kernels == "projected"


def test_schedules_shrink_alike():
    for name in ("cnn9", "cause"):
        table = TABLES[name]
        whole = table.recipe(table.cells[0])
        for schedule, share in SCHEDULES.items():
            recipe = table.recipe(table.cells[0], schedule)
            assert recipe.milestones == whole.milestones
            assert (recipe.steps or recipe.epochs) == pytest.approx(share * (whole.steps or whole.epochs), abs=0.5)


# -- the runner --------------------------------------------------------------------------------------------------------


def test_a_table_from_end_to_end(tmp_path):
    """Two cells, then the third; the ledger, the weights, the list and the pages."""
    first = run_table(
        tmp_path, "--match", "Baseline, Cosine", "--jobs", "2", "--keep-weights", str(tmp_path / "weights")
    )
    assert first.exit_code == 0, first.output
    assert first.output.count("seed 0:") == 2
    listed = run_table(tmp_path, *THREE, "--list")
    assert listed.output.count("  done ") == 2
    assert listed.output.count("  missing ") == 1
    assert "min" in listed.output  # what the third will cost, judged by the two
    second = run_table(tmp_path, *THREE, "--keep-records", str(tmp_path / "records"))
    assert second.output.count("seed 0:") == 1, second.output  # only what is missing
    records = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    titles = ["cnn9: Baseline, Cosine, no ReLU", "cnn9: Baseline, Cosine, ReLU", "cnn9: TanhConv, Cosine, ReLU"]
    assert sorted(record["cell"].split(", digits")[0] for record in records) == sorted(titles)
    assert {"recipe", "seed", "error", "top5_error", "seconds", "torch", "commit", "device"} <= set(records[0])
    for record in records:
        run = dcnet.Run(tmp_path / record["run"])  # a cell is a run folder
        assert run.accuracy == pytest.approx(100.0 - record["error"], abs=1e-3)
        assert json.loads(run.recipe.to_json()) == record["recipe"]
        weights = tmp_path / "weights" / f"{record['run']}.safetensors"
        if weights.is_file():
            kept, loaded = dcnet.load(weights).state_dict(), run.model.state_dict()
            assert all(bool((kept[name] == tensor).all()) for name, tensor in loaded.items())
    learned = [record for record in records if record["error"] <= 80.0 and "Baseline" in record["cell"]]
    assert len(list((tmp_path / "weights").glob("*"))) == len(learned) > 0
    (kept,) = (tmp_path / "records").iterdir()
    assert sorted(path.name for path in kept.iterdir()) == ["metrics.jsonl", "recipe.json", "result.json"]
    assert dcnet.Run(kept).metrics[-1] == dcnet.Run(tmp_path / kept.name).metrics[-1]
    assert all("learned" not in entry for entry in dcnet.Run(kept).metrics[:-1])
    rendering = ["table", "--render", str(tmp_path / "pages"), "--runs", str(tmp_path)]
    assert "has no cell of these tables yet" in call(*rendering).output  # with another network these are other cells
    rendered = call(*rendering, "--set", "model=cnn9_narrow", "--set", "norm=batch", "--set", "steps=8")
    assert rendered.exit_code == 0, rendered.output
    text = (tmp_path / "pages" / "tables.md").read_text()
    assert text.count("digits, a schedule of its own, float32, model=cnn9_narrow, norm=batch, steps=8.") == 1
    assert text.count("The paper's numbers are for cifar100, and are not to be compared with these.") == 1
    best = min(record["error"] for record in records)
    assert (
        f"| {best:.2f} |" if best <= 80.0 else "| N/C |"
    ) in text  # without the paper's number, which is for other data
    assert (tmp_path / "pages" / "tables.html").is_file()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_runner_loses_nothing(tmp_path, sent):
    """Stopped while two cells train: the next call goes on, and every cell is in the ledger once.

    A kill takes all processes with it. Other signals reach the runner alone, which stops those that it has started.
    """
    cells = ["--match", "Baseline, Cosine"]
    arguments = [*QUICK, *cells, "--jobs", "2", "--runs", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "dcnet", "table", "cnn9", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/recipe.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    (os.killpg if sent == signal.SIGKILL else os.kill)(process.pid, sent)
    said = process.communicate(timeout=120)[1]
    if sent != signal.SIGKILL:
        assert process.returncode == 130
        assert said == "stopped; the same command goes on\n"
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # nothing of it runs anymore
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"cell": "half a li')  # as a kill in the middle of writing leaves it
    result = run_table(tmp_path, *cells)
    assert result.exit_code == 0, result.output
    entered = [json.loads(line)["cell"] for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert len(entered) == len(set(entered)) == 2


@pytest.fixture
def quick_plan(tmp_path):
    def make(**settings):
        ledger = Ledger(tmp_path / "ledger.jsonl")
        small = {"data": "digits", "model": "cnn9_narrow", "norm": "batch", "batch": 256, **settings}
        return ledger, plan(
            find_table("cnn9"), ledger, tmp_path / "runs", "smoke", [0], ["TanhConv, Cosine, ReLU"], **small
        ).missing

    return make


def test_a_budget_is_kept(quick_plan, monkeypatch):
    """A cell that would take hours is stopped, with a checkpoint, and goes on the next time."""
    ledger, (task,) = quick_plan(steps=10**6)
    log = task.folder / "train.log"

    def monotonic():
        """The clock of a runner for which, once the cell trains, an hour is over."""
        return time.monotonic() + 3600.0 * (log.is_file() and "1000000 steps" in log.read_text())

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    said = []
    failed = Runner(ledger, said.append, {"data_root": "data", "device": "cpu"}).run([task], 1, 3600.0)
    assert failed == []
    assert said == ["time is up; running cells stop and go on the next time: 1; not begun: 0"]
    assert (task.folder / "checkpoint.safetensors").is_file()
    assert ledger.entries == []
    assert "Go on with" in (task.folder / "train.log").read_text()


def test_a_budget_begins_with_the_call(quick_plan, monkeypatch):
    """Not after the data is found and weights are restored."""
    ledger, (task,) = quick_plan(steps=2)
    found = []
    monkeypatch.setattr(runner, "find_all_data", lambda tasks, options: found.append(tasks))
    clock = SimpleNamespace(monotonic=lambda: 3600.0 * len(found), sleep=time.sleep)
    monkeypatch.setattr(runner, "time", clock)
    said = []
    assert Runner(ledger, said.append, {"data_root": "data", "device": "cpu"}).run([task], 1, 3600.0) == []
    assert said == ["time is up; running cells stop and go on the next time: 0; not begun: 1"]


def test_a_cell_that_ends_while_it_is_stopped_is_entered(quick_plan, monkeypatch):
    ledger, (task,) = quick_plan(steps=2)

    def monotonic():
        """The clock of a runner for which, once the cell has its result, an hour is over."""
        return time.monotonic() + 3600.0 * (task.folder / "result.json").is_file()

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=monotonic, sleep=lambda _: None))
    Runner(ledger, print, {"data_root": "data", "device": "cpu"}).run([task], 1, 3600.0)
    assert [entry.recipe for entry in ledger.entries] == [task.recipe]


def test_attacks_on_a_network_whose_loss_is_not_finite(tmp_path):
    """They are done with it: nothing has failed."""
    arguments = ["--data", "digits", "--device", "cpu", "--runs", str(tmp_path)]
    arguments += [word for field in ("lr=1e30", "optimizer=sgd", "norm=none", "steps=20") for word in ("--set", field)]
    done = call("table", "white-box", *arguments, "--match", "Natural: FGSM, predicted labels, Baseline")
    assert done.exit_code == 0, done.output
    assert "not finite at epoch" in done.output
    assert "not done" not in done.output


def test_divergence_is_recorded_with_its_epoch(quick_plan):
    ledger, tasks = quick_plan(lr=1e30, optimizer="sgd", projection=0, steps=20)
    said = []
    assert Runner(ledger, said.append, {"data_root": "data", "device": "cpu"}).run(tasks, 1, 600.0) == []
    (entry,) = Ledger(ledger.path).entries
    assert entry.diverged
    assert entry.record["error"] is None
    assert 0.0 < entry.record["epoch"] <= 4.0
    assert "not finite" in entry.record["why"]
    assert "counts as N/C" in said[0]
    assert ledger.find(tasks[0].recipe) is not None  # not tried again


def test_a_cell_that_fails_is_named_and_others_go_on(quick_plan):
    ledger, (task,) = quick_plan(steps=2)
    _, broken = quick_plan(steps=2, batch=10**6)
    said = []
    broken = [replace(one, folder=task.folder.parent / "broken", title="broken") for one in broken]
    assert Runner(ledger, said.append, {"device": "cpu"}).run([*broken, task], 1, 600.0) == ["broken"]
    assert "failed with exit status 1" in said[0]
    assert "batch=1000000 is larger than the 1442 training images" in said[0]
    assert len(ledger.entries) == 1


def test_a_cell_that_another_process_trains(quick_plan, monkeypatch):
    """As one does whose runner was killed, and which writes into the same log."""
    ledger, (task,) = quick_plan(steps=2)
    task.folder.mkdir(parents=True)
    dcnet.training.open_run(task.folder, task.recipe)
    log = task.folder / "train.log"

    def sleep(seconds):
        time.sleep(seconds)
        if "in use" in log.read_text():
            log.write_text(log.read_text() + "epoch 3: train loss 1.0\n")

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    said = []
    with locked(task.folder):
        assert Runner(ledger, said.append, {"data_root": "data", "device": "cpu"}).run([task], 1, 600.0) != []
    assert f"is in use by process {os.getpid()} on" in said[0]


def test_a_cell_that_could_not_begin_is_computed_as_it_is_asked_for_now(quick_plan):
    """Its error says what to do, such as graphs=False, and its run folder has the recipe that failed."""
    ledger, (task,) = quick_plan(steps=2)
    for settings, failed in (({"graphs": True}, [task.title]), ({"graphs": False}, [])):
        asked = replace(task, recipe=replace(task.recipe, **settings))
        assert Runner(ledger, print, {"data_root": "data", "device": "cpu"}).run([asked], 1, 600.0) == failed
    assert [entry.recipe.graphs for entry in ledger.entries] == [False]


def test_recipes_for_a_gpu_are_rehearsed_on_a_cpu(tmp_path):
    """fast-cifar and best-cifar ask for CUDA graphs, which is how a cell is computed, not what."""
    arguments = ["--data", "digits", "--device", "cpu", "--runs", str(tmp_path), "--set", "precision=float32"]
    arguments += ["--set", "batch=64", "--match", "LinearConv, cosine, projected"]
    done = call("table", "cause", *arguments)
    assert done.exit_code == 0, done.output
    (entry,) = Ledger(tmp_path / "ledger.jsonl").entries
    assert entry.recipe.graphs is None


@pytest.mark.parametrize("data", ["mnist", "imagefolder:nowhere", "digit"])
def test_missing_data_is_missed_once(quick_plan, tmp_path, data):
    """Before the first cell, not by every cell."""
    ledger, tasks = quick_plan(steps=2, data=data)
    with pytest.raises((FileNotFoundError, ValueError), match=r"mnist|nowhere does not exist|Did you mean 'digits'"):
        Runner(ledger, print, {"data_root": tmp_path / "none", "device": "cpu"}).run(tasks, 1, 600.0)
    assert not any(task.folder.exists() for task in tasks)


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "--",
        "dcnet",
        "table",
        "cnn9",
    ]
    done = subprocess.run(
        [*command, *QUICK, *THREE, "--runs", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    entries = Ledger(tmp_path / "ledger.jsonl").entries
    assert len(entries) == 3
    assert {entry.record["devices"] for entry in entries} == {2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cnn8"], "unknown table 'cnn8'. Did you mean 'cnn9'"),
        ([], "Usage"),
        (["cnn9", "--schedule", "papers"], "unknown schedule 'papers'. Did you mean 'paper'"),
        (["cnn9", "--seeds", "a"], "seeds='a' must be whole numbers"),
        (["cnn9", "--data", "digts", "--list"], "unknown data set 'digts'. Did you mean 'digits'?"),
        (["cnn9", "--budget", "soon"], "budget='soon' must be a duration"),
        (["cnn9", "--match", "HyperConv"], "no cell of the table cnn9 has 'HyperConv'"),
        (["cnn9", "cause", "--match", "HyperConv"], "no cell of the tables cnn9, cause has 'HyperConv'"),
        (["cnn9", "--set", "precison=bf16"], "Did you mean 'precision'"),
        (["cnn9", "--set", "seed=3"], "all cells would have this seed; possible: --seeds 3"),
        (["--render", "nowhere", "--runs", "nothing"], "has no cell of these tables yet"),
    ],
)
def test_mistakes(arguments, message):
    result = call("table", *arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


def test_a_field_with_the_name_of_an_option(tmp_path):
    """Recipes have a schedule too: that of the learning rate."""
    arguments = ["cnn9", *QUICK, "--set", "schedule=constant", "--match", "Baseline, Cosine, ReLU"]
    done = call("table", *arguments, "--runs", str(tmp_path))
    assert done.exit_code == 0, done.output
    (entry,) = Ledger(tmp_path / "ledger.jsonl").entries
    assert entry.recipe.schedule == "constant"
    assert call("table", *arguments, "--runs", str(tmp_path), "--list").output.count("  done ") == 1
    settings = [part for part in QUICK[2:-2] if part != "--set"]
    flags = [word for setting in (*settings, "schedule=constant") for word in ("--set", setting)]
    rendered = call("table", "cnn9", "--runs", str(tmp_path), "--render", str(tmp_path / "pages"), *flags)
    assert rendered.exit_code == 0, rendered.output
    assert "schedule=constant" in (tmp_path / "pages" / "tables.md").read_text()


def test_a_match_need_not_be_in_every_table(tmp_path):
    assert not any("projected" in cell.title.lower() for cell in TABLES["cnn9-no-batchnorm"].cells)
    both = ["cnn9-no-batchnorm", "cause"]
    listed = call("table", *both, "--match", "projected", "--runs", str(tmp_path), "--list")
    assert listed.exit_code == 0, listed.output
    rows = {name: line.split("│")[2:4] for name in both for line in listed.output.splitlines() if f"│ {name}:" in line}
    wanted = sum("projected" in cell.title.lower() for cell in TABLES["cause"].cells)
    assert [int(cell) for cell in rows["cnn9-no-batchnorm"]] == [0, 0]
    assert [int(cell) for cell in rows["cause"]] == [0, wanted]
    assert wanted > 0


def test_matches_find_the_names_that_a_list_shows(tmp_path):
    arguments = ["best", "--seeds", "0,1", "--runs", str(tmp_path), "--list"]

    def missing(*matches):
        listed = call("table", *arguments, *(word for match in matches for word in ("--match", match)))
        assert listed.exit_code == 0, listed.output
        return [line.removeprefix("  missing  ") for line in listed.output.splitlines() if "  missing  " in line]

    titles = missing()
    assert len(titles) == len(set(titles)) == 2 * len(TABLES["best"].cells)
    for title in titles:
        assert missing(title) == [title]
    of_segconv = [title for title in titles if "SegConv" in title]
    assert missing("SegConv") == of_segconv
    assert sorted(missing("!segconv")) == sorted(set(titles) - set(of_segconv))
    assert missing("cifar10,", "!seed 1", "!Conv, cosine", "!ReLU") == [
        title for title in titles if "Baseline, CIFAR-10, " in title and "seed 0" in title
    ]
    nothing = call("table", *arguments, "--match", "!HyperConv")
    assert nothing.exit_code != 0
    assert "has 'HyperConv' in its name; the nearest of 10 names:" in " ".join(nothing.output.split())
    assert nothing.output.count(";") == 5  # five names, not all


def test_autoattack_is_asked_for_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    arguments = ["white-box", "--data", "digits", *LEARNS, "--device", "cpu", "--runs", str(tmp_path / "runs")]
    arguments += ["--match", "Natural: AutoAttack, Baseline", "--match", "Natural: no attack, Baseline"]
    refused = call("table", *arguments)
    assert refused.exit_code == 1
    words = "AutoAttack is not installed: pip install 'dcnet[attacks]', or leave such cells out: --match '!AutoAttack'"
    assert words in " ".join(refused.output.split())
    assert not list(tmp_path.rglob("recipe.json"))
    done = call("table", *arguments, "--match", "!AutoAttack")
    assert done.exit_code == 0, done.output
    (entry,) = Ledger(tmp_path / "runs" / "ledger.jsonl").entries
    assert entry.record["error"] < 90.0


def test_an_attacked_table(tmp_path):
    """Networks are trained first, the source of images too; attacks follow, and each number stands in its row."""
    arguments = [
        "--data",
        "digits",
        *LEARNS,
        "--device",
        "cpu",
        "--runs",
        str(tmp_path),
    ]
    cells = ["--match", "Natural: FGSM, made on a naturally trained baseline of another seed, TanhConv"]
    done = call("table", "black-box", *arguments, *cells)
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [record.get("setup") for record in records] == [None, None, "from Natural, Baseline"]
    attacked = records[2]
    assert attacked["recipe"]["magnitude"] == "tanh"
    settings = "augment-none-batch-64-epochs-1-0-norm-batch-recalibrate-5"
    source = f"robustness-natural-baseline-digits-smoke-float32-{settings}-seed-1"
    assert (attacked["from"], attacked["images"], attacked["jobs"]) == (source, 32, 1)
    assert set(attacked["attacks"]) == {"fgsm", "bim"}
    accuracy = 100.0 - records[0]["error"]  # which is what the table has, and the line beside the paper's number
    assert f"accuracy on the test images {accuracy:.2f}%" in done.output
    (kept,) = dcnet.Run(tmp_path / attacked["run"]).attacks
    assert kept["transfer"]
    assert kept["attacks"][0]["accuracy"] == attacked["attacks"]["fgsm"]
    text = markdown(TABLES["black-box"], Ledger(tmp_path / "ledger.jsonl"), **LEARNING)
    row = next(line for line in text.splitlines() if line.startswith("| Natural: FGSM, made on a naturally"))
    assert f"| {attacked['attacks']['fgsm']:.2f} |" in row
    again = call("table", "black-box", *arguments, *cells)
    assert again.output.strip() == ""  # nothing is missing
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text("".join(line + "\n" for line in ledger.read_text().splitlines()[:2]))
    assert call("table", "black-box", *arguments, *cells).exit_code == 0
    records = [json.loads(line) for line in ledger.read_text().splitlines()]
    # the attack again, but no training: its networks are there
    assert [record.get("setup") for record in records] == [None, None, "from Natural, Baseline"]
    clean = call("table", "black-box", *arguments, "--match", "Natural: no attack, TanhConv", "--list")
    assert "done     Natural: no attack, TanhConv, seed 0" in clean.output
    white = call("table", "white-box", *arguments, "--match", "Natural: FGSM, predicted labels, TanhConv", "--list")
    assert white.output.count("  missing  ") == 1  # the attack: the other table has trained the network


def test_attacks_on_a_network_that_was_trained_again_do_not_count():
    """Its weights were lost, say: the numbers of one network must not stand beside those of another."""
    ledger = Ledger(ROOT / "results" / "tables" / "ledger.jsonl")
    attack = next(
        entry
        for entry in ledger.entries
        if ledger.find(entry.recipe, "white box") is entry
        and "fgsm-trained-baseline-cifar10-paper-bf16-seed-2" in entry.record["run"]
    )
    trained = ledger.find(attack.recipe)
    assert trained is not None
    shown = markdown(TABLES["white-box"], ledger)
    ledger._count(trained)  # the same training, entered by another runner too
    assert markdown(TABLES["white-box"], ledger) == shown
    trained = replace(trained, record={**trained.record, "seconds": 1.0})
    ledger._count(trained)
    assert ledger.find(attack.recipe) is trained
    assert ledger.find(attack.recipe, "white box") is None
    assert markdown(TABLES["white-box"], ledger) != shown
    ledger._count(attack)
    assert ledger.find(attack.recipe, "white box") is attack
    # that did not converge: what an attack leaves of it is not averaged with the others
    chance = replace(trained, record={**trained.record, "error": 90.0})
    for entry in (chance, attack):
        ledger._count(entry)
    lines = markdown(TABLES["white-box"], ledger).splitlines()
    assert "N/C: not converged." in lines[0]
    row = next(line for line in lines if line.startswith("| FGSM-trained: PGD"))
    assert row.split("|")[2].split("(")[0].strip().endswith(", 2 N/C")  # seed 0 has not converged either


def test_tables_of_the_same_networks_train_them_once(tmp_path):
    tables = [TABLES["white-box"], TABLES["black-box"]]
    plans = [plan(table, Ledger(tmp_path / "none"), tmp_path, "paper", [0, 1]) for table in tables]
    tasks = in_order(task for one in plans for task in one.missing)
    recipes = [cell_of(task.recipe) for task in tasks if task.setup is None]
    assert len(recipes) == len(set(recipes)) == 2 * 16 + 2  # and the baselines of seed 2, that images are made on
    attacked = {task.folder for task in tasks if task.setup is not None}
    assert attacked <= {task.folder for task in tasks if task.setup is None}


def test_tables_that_share_a_cell_train_it_once(tmp_path):
    tables = [TABLES["weighted"], TABLES["resnet32"]]
    plans = [plan(table, Ledger(tmp_path / "none"), tmp_path, "paper", [0]) for table in tables]
    tasks = in_order(task for one in plans for task in one.missing)
    assert len(tasks) == len({cell_of(task.recipe) for task in tasks}) == 6 + 24 - 1
    assert [task for task in tasks if task in plans[0].missing] == plans[0].missing


def test_long_attacks_come_last(tmp_path):
    """AutoAttack takes minutes, the others seconds; a network is attacked by one process at a time."""
    missing = plan(TABLES["white-box"], Ledger(tmp_path / "none"), tmp_path, "paper", [0]).missing
    setups = [task.setup.name for task in missing if task.setup is not None]
    assert set(setups) == {"white box", "AutoAttack", "predicted labels", "predicted labels and E of the batch"}
    assert setups[setups.index("AutoAttack") :] == ["AutoAttack"] * 16


def test_costs_are_those_of_one_device():
    """One cell of the ledger was attacked on a CPU, in 20 minutes; on a GPU that takes a minute."""
    ledger = Ledger(ROOT / "results" / "tables" / "ledger.jsonl")
    assert usual_device(ledger) == "NVIDIA H200"
    assert len({entry.record["device"] for entry in ledger.entries}) > 1
    whole = plan(TABLES["white-box"], Ledger(Path("none")), Path("runs"), "paper", [0], precision="bf16")
    expected = costs([whole], ledger)
    half = next(task for task in whole.missing if task.setup is not None and "half-clean" in task.title)
    assert half.setup.name == "white box"
    assert 1.0 < expected[half.title] < 120.0


def test_images_made_on_a_network_that_has_not_converged_say_nothing(tmp_path, monkeypatch):
    """Such attacks are left out, whether it was trained now or before; nothing has failed."""
    monkeypatch.setattr(Entry, "diverged", property(lambda entry: entry.setup is None and entry.recipe.seed == 1))
    cell = ["--match", "Natural: FGSM, made on a naturally trained baseline of another seed, TanhConv"]
    arguments = ["--data", "digits", *LEARNS, "--device", "cpu", "--runs", str(tmp_path), "--schedule", "short", *cell]
    done = call("table", "black-box", *arguments)
    assert done.exit_code == 0, done.output
    assert done.output.count("left out, since robustness-natural-baseline-digits-short") == 1
    assert [entry.setup for entry in Ledger(tmp_path / "ledger.jsonl").entries] == [None, None]
    again = call("table", "black-box", *arguments)
    assert (again.exit_code, again.output.strip()) == (0, "")


def test_attacks_on_a_network_that_has_just_not_converged(tmp_path, monkeypatch):
    """Its entry stands for them, as it does the next time."""
    monkeypatch.setattr(Entry, "diverged", property(lambda entry: entry.setup is None))
    arguments = ["--data", "digits", *LEARNS, "--device", "cpu", "--runs", str(tmp_path), "--schedule", "short"]
    done = call("table", "white-box", *arguments, "--match", "Natural: FGSM, predicted labels, TanhConv")
    assert done.exit_code == 0, done.output
    assert [entry.setup for entry in Ledger(tmp_path / "ledger.jsonl").entries] == [None]


def test_attacks_come_before_other_networks(tmp_path):
    """So that what a stopped runner leaves is whole: weights may be lost until the next time."""
    arguments = ["--data", "digits", "--device", "cpu", "--runs", str(tmp_path)]
    matches = ["Natural: FGSM, predicted labels, SphereConv", "Natural: FGSM, predicted labels, TanhConv"]
    done = call("table", "white-box", *arguments, *(part for match in matches for part in ("--match", match)))
    assert done.exit_code == 0, done.output
    entries = Ledger(tmp_path / "ledger.jsonl").entries
    assert [(entry.recipe.magnitude, entry.setup) for entry in entries] == [
        (magnitude, setup) for magnitude in ("sphere", "tanh") for setup in (None, "predicted labels")
    ]


def test_an_attack_on_the_last_network(tmp_path):
    """Its own training ends while nothing else is ready: the attack follows, on a few images."""
    arguments = ["--data", "digits", "--device", "cpu", "--runs", str(tmp_path)]
    done = call("table", "white-box", *arguments, "--match", "Natural: FGSM, predicted labels, TanhConv")
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [record.get("setup") for record in records] == [None, "predicted labels"]
    assert records[1]["images"] == 32


# -- ledger and pages --------------------------------------------------------------------------------------------------


def write(path, *lines, table=TABLES["cnn9"]):
    """A ledger of cells of the real table: (row and column, seed, error, fields)."""
    with path.open("w") as file:
        for title, seed, error, schedule, fields in lines:
            cell = next(cell for cell in table.cells if cell.title == title)
            recipe = change(table.recipe(cell, schedule, seed), **fields)
            record = {
                "cell": title,
                "run": "x",
                "error": error,
                "top5_error": error,
                "epoch": 3.5,
                "classes": 100,
                "seconds": 60.0,
                "recipe": asdict(recipe),
            }
            file.write(json.dumps(record) + "\n")
    return Ledger(path)


def test_pages_show_mean_deviation_and_what_did_not_converge(tmp_path):
    seg, tanh = "SegConv, Sq. cosine, no ReLU", "TanhConv, Cosine, ReLU"
    lines = [
        (seg, seed, error, "paper", {"precision": "bf16", "graphs": True})
        for seed, error in ((0, 24.0), (1, 25.0), (2, 26.0))
    ]
    lines += [
        (tanh, 0, None, "paper", {"precision": "bf16"}),
        ("MixConv, Cosine, ReLU", 0, 98.9, "paper", {"precision": "bf16"}),
    ]
    lines += [(tanh, 0, 31.5, "short", {"precision": "bf16"}), (tanh, 0, 26.57, "paper", {"precision": "tf32"})]
    lines += [
        ("SphereConv, Cosine, ReLU", 0, 1.0, "paper", {"precision": "bf16", "lr": 0.5})
    ]  # another recipe's: no cell
    text = markdown(TABLES["cnn9"], write(tmp_path / "ledger.jsonl", *lines))
    parts = text.split("**Plain CNN-9")[1:]
    assert len(parts) == 3  # schedules and precisions are never mixed
    paper, other, short = parts
    assert "| SegConv | ? (33.57) | 25.00 ± 1.00 (n = 3) (24.29) | ? (24.96) | ? (25.04) |" in paper
    assert "| TanhConv | ? (32.27) | ? (25.27) | N/C (25.15) | ? (26.94) |" in paper
    assert "| MixConv | ? (33.46) | ? (24.93) | N/C (25.27) | ? (25.77) |" in paper
    assert "| Baseline | ? (58.24) |  | ? (26.01) |  |" in paper
    assert "1.00 (26.00)" not in text
    assert "tf32" in other
    assert "26.57 (25.15)" in other
    assert "0.2 of the paper's schedule" in short
    assert "31.50 (25.15)" in short
    assert len(short.splitlines()) == 5  # about the table, blank, head, rule, one row
    assert "Rows of which nothing is measured are left out." in short
    assert "left out" not in paper
    html = page(TABLES.values(), Ledger(tmp_path / "ledger.jsonl"))
    blue, orange = (f"background: rgba({color}" for color in ("38, 110, 200", "226, 120, 20"))
    assert html.count(blue) == 0
    assert html.count(orange) == 3  # 25.00 against 24.29, 26.57 and 31.5 against 25.15
    assert "25.00 ± 1.00 (n = 3)<small>paper 24.29</small>" in html


def test_columns_that_are_data_sets_stand_in_one_table(tmp_path):
    settings = {"precision": "bf16"}
    lines = [("Baseline, CIFAR-10", 0, 3.5, "paper", settings), ("Baseline, CIFAR-100", 0, 17.5, "paper", settings)]
    lines += [("Baseline, CIFAR-10", 0, 20.5, "smoke", {**settings, "data": "digits"})]
    ledger = write(tmp_path / "ledger.jsonl", *lines, table=TABLES["best"])
    whole, digits = markdown(TABLES["best"], ledger).split("**Today's recipe")[1:]
    assert "cifar10 and cifar100, the schedule of best-cifar, bf16" in whole
    assert "| Baseline | 3.50 | 17.50 |" in whole
    assert (
        "digits, 0.0005 of the schedule of best-cifar, bf16. The paper's numbers are for cifar10 and cifar100" in digits
    )
    assert "| Baseline | 20.50 | 20.50 |" in digits  # the same network
    listed = call("table", "best", "--list", "--ledger", str(ledger.path), "--set", "precision=bf16").output
    assert "best: 2 cells are done with --schedule smoke --data digits" in listed
    listed = call(
        "table", "best", "--list", "--ledger", str(ledger.path), "--data", "digits", "--set", "precision=bf16"
    )
    assert "best: 2 cells are done with --schedule paper, without --data" in listed.output


def test_tables_go_between_their_marks(tmp_path):
    ledger = write(tmp_path / "ledger.jsonl", ("TanhConv, Cosine, ReLU", 0, 26.5, "paper", {}))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- dcnet table cnn9: begin -->\nold\n<!-- dcnet table cnn9: end -->\nafter\n")
    result = call("table", "--into", str(page), "--ledger", str(ledger.path))
    assert result.exit_code == 0, result.output
    assert "26.50 (25.15)" in page.read_text()
    assert "old" not in page.read_text()
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")


def test_a_damaged_ledger_is_named(tmp_path):
    (tmp_path / "ledger.jsonl").write_text('{"cell": 3}\n')
    with pytest.raises(ValueError, match=r"ledger.jsonl, line 1, is not what `dcnet table` writes"):
        Ledger(tmp_path / "ledger.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"cell": "a", "recipe": {}, "seconds": 1.0}', "it lacks classes, error, top5_error"),
        (b'{"cell": "a", "recipe": {}, "seconds": 1.0, "setup": "white box"}', "it lacks attacks"),
        (b"\xff\xfe", "can't decode byte 0xff"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, message):
    lines = (ROOT / "results" / "tables" / "ledger.jsonl").read_bytes().splitlines(keepends=True)[:2]
    (tmp_path / "ledger.jsonl").write_bytes(b"".join([*lines, line + b"\n"]))
    listed = call("table", "cnn9", "--list", "--ledger", str(tmp_path / "ledger.jsonl"), "--device", "cpu")
    assert listed.exit_code == 1
    assert "ledger.jsonl, line 3, is not what `dcnet table` writes: " in listed.output
    assert message in listed.output


def test_a_ledger_is_utf8_everywhere(tmp_path):
    """Names of cells have ℓ in them, which not every system's own encoding has."""
    code = (
        "import sys; from pathlib import Path; from dcnet.tables import Ledger; from dcnet.tables.ledger import Entry\n"
        "there, here = Ledger(Path(sys.argv[1])), Ledger(Path(sys.argv[2]))\n"
        "entry = next(entry for entry in there.entries if '\\u2113' in entry.cell)\n"
        "here.add(Entry(entry.cell + '\\udcff', entry.recipe, {**entry.record, 'cell': entry.cell + '\\udcff'}))\n"
    )
    book = ROOT / "results" / "tables" / "ledger.jsonl"
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    subprocess.run([sys.executable, "-c", code, book, tmp_path / "new"], env=os.environ | ascii_only, check=True)
    (entry,) = Ledger(tmp_path / "new").entries
    assert "ℓ2" in entry.cell
    assert entry.cell.endswith("\udcff")  # a byte of a file's name


def test_a_last_line_without_an_end_is_read(tmp_path):
    """Editors leave it so; a line that a kill has cut off does not parse."""
    whole = (ROOT / "results" / "tables" / "ledger.jsonl").read_bytes().splitlines()[:2]
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"\n".join(whole))
    ledger = Ledger(path)
    assert len(ledger.entries) == 2
    ledger.add(ledger.entries[0])
    assert path.read_bytes() == b"".join(line + b"\n" for line in (*whole, whole[0]))
    path.write_bytes(b"\n".join(whole)[:-1])
    ledger = Ledger(path)
    assert len(ledger.entries) == 1
    ledger.add(ledger.entries[0])
    assert path.read_bytes() == 2 * (whole[0] + b"\n")


def test_what_cannot_be_written_is_found_before_a_cell_is_trained(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for arguments, message in [
        (["--ledger", tmp_path / "folder"], f"{tmp_path / 'folder'} is a folder; possible: a file"),
        (["--keep-weights", tmp_path / "file"], f"{tmp_path / 'file'} is a file; possible: a folder"),
        (["--keep-records", tmp_path / "file"], f"{tmp_path / 'file'} is a file; possible: a folder"),
        (["--keep-weights", tmp_path / "file" / "w"], f"nothing can be written into {tmp_path / 'file' / 'w'}"),
    ]:
        done = run_table(tmp_path / "runs", *map(str, arguments), *THREE)
        assert done.exit_code == 1
        assert f"error: {message}" in done.output
        assert not (tmp_path / "runs").exists()


def test_cells_in_another_arithmetic_are_named():
    """A machine without a GPU plans float32; the cells that a GPU has measured are not passed over in silence."""
    ledger = str(Path(__file__).parent.parent / "results" / "tables" / "ledger.jsonl")
    listed = call("table", "cnn9", "--list", "--ledger", ledger, "--device", "cpu").output
    assert re.search(r"cnn9: \d+ cells are done with --set precision=bf16", listed)
    assert (
        "are done with"
        not in call("table", "cnn9", "--list", "--ledger", ledger, "--device", "cpu", "--set", "precision=bf16").output
    )


def test_a_ledger_that_is_none(tmp_path):
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    with pytest.raises(ValueError, match=r"list.jsonl, line 1, is not what `dcnet table` writes: a cell is an object"):
        Ledger(tmp_path / "list.jsonl")
