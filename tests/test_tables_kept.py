"""Weights and records that `dcnet table` keeps: they replace run folders that are gone, of the same training only."""

import errno
import json
import shutil
from pathlib import Path

import pytest
from test_cli import call
from test_tables import LEARNS

import dcnet
from dcnet.tables import Ledger, ledger, runner, worker
from dcnet.tables.ledger import keep_record
from dcnet.tables.table import Setup
from dcnet.training import Run
from dcnet.util.lock import locked

CELL = "Natural: no attack, TanhConv"
PREDICTED = "Natural: FGSM, predicted labels, TanhConv"
TRANSFERRED = "Natural: FGSM, made on a naturally trained baseline of another seed, TanhConv"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """For the processes that the runner starts; with more, they wait for each other on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A network that a table has trained: ledger, run folder, weights and records."""
    place = tmp_path_factory.mktemp("kept")
    assert table(place, "black-box", CELL).exit_code == 0
    return place


@pytest.fixture
def place(trained, tmp_path):
    """What is left on another machine: no run folders."""
    shutil.copytree(trained, tmp_path / "kept")
    shutil.rmtree(tmp_path / "kept" / "runs")
    return tmp_path / "kept"


def table(place, name, cell, *others, weights=True, records=True):
    arguments = ["--data", "digits", "--device", "cpu", *LEARNS, "--runs", place / "runs"]
    arguments += ["--ledger", place / "ledger.jsonl", "--match", cell, *others]
    arguments += ["--keep-weights", place / "weights"] * weights + ["--keep-records", place / "records"] * records
    return call("table", name, *map(str, arguments))


def lines(place):
    return [json.loads(line) for line in (place / "ledger.jsonl").read_text().splitlines()]


def words(done):
    return " ".join(done.output.split())


def setups(place):
    return [line.get("setup") for line in lines(place)]


def test_attacks_on_kept_weights_need_no_training(place):
    (line,) = lines(place)
    record = {path.name: path.read_text() for path in (place / "records" / line["run"]).iterdir()}
    assert table(place, "white-box", PREDICTED, "--list").output.count("  missing  ") == 1
    done = table(place, "white-box", PREDICTED)
    assert done.exit_code == 0, done.output
    assert "its weights are those in" in done.output
    assert setups(place) == [None, "predicted labels"]
    shutil.rmtree(place / "runs")
    assert table(place, "black-box", TRANSFERRED).exit_code == 0
    assert setups(place) == [None, "predicted labels", None, "from Natural, Baseline"]
    kept = Run(place / "records" / line["run"])
    assert [one["setup"] for one in kept.attacks] == ["predicted labels", "from Natural, Baseline"]
    for name in ("metrics.jsonl", "recipe.json", "result.json"):
        assert (kept.folder / name).read_text() == record[name]


def test_weights_of_another_training_are_not_attacked(place):
    """The network was trained again without --keep-weights: what is kept is not the network that counts."""
    (line,) = lines(place)
    with (place / "ledger.jsonl").open("a") as file:
        file.write(json.dumps({**line, "error": line["error"] - 1.0, "seconds": 2.0}) + "\n")
    listed = table(place, "white-box", PREDICTED, "--list")
    assert listed.output.count("  missing  ") == 2
    assert "not used, since these are not the weights of the network that counts" in words(listed)
    assert table(place, "white-box", PREDICTED).exit_code == 0
    assert setups(place) == [None, None, None, "predicted labels"]


def test_records_of_another_training_are_not_taken(place, tmp_path):
    """Those of an earlier training may have the very attacks that are missing."""
    (line,) = lines(place)
    records = place / "records" / line["run"]
    old = Run(records)
    old.add_attack({"setup": "predicted labels", "transfer": False, "labels": "predicted", "attacks": [], "from": None})
    result = json.loads((records / "result.json").read_text())
    (records / "result.json").write_text(json.dumps({**result, "seconds": 2.0}))
    assert table(place, "white-box", PREDICTED).exit_code == 0
    assert set(lines(place)[1]["attacks"]) == {"fgsm", "bim"}
    assert [len(one["attacks"]) for one in Run(records).attacks] == [2]


def test_a_copy_of_records(place, tmp_path):
    """It loses nothing of the same training, and keeps nothing of an earlier one."""
    assert table(place, "white-box", PREDICTED).exit_code == 0
    records = place / "records" / lines(place)[0]["run"]
    fresh = tmp_path / records.name
    shutil.copytree(place / "runs" / records.name, fresh)
    for name in ("attacks.json", "metrics.jsonl"):
        (fresh / name).unlink()
    keep_record(Run(fresh), place / "records")
    assert [one["setup"] for one in Run(records).attacks] == ["predicted labels"]
    assert Run(records).metrics != []
    Run(fresh).add_attack({**Run(records).attacks[0], "setup": "another"})
    keep_record(Run(fresh), place / "records")
    assert [one["setup"] for one in Run(records).attacks] == ["predicted labels", "another"]
    Run(fresh).finish({**Run(fresh).result, "seconds": 2.0})
    (fresh / "attacks.json").unlink()
    keep_record(Run(fresh), place / "records")
    assert sorted(path.name for path in records.iterdir()) == ["recipe.json", "result.json"]


def test_records_are_complete_whichever_call_kept_them(place):
    """The second call attacks without --keep-records, in a run folder that the first one has not seen."""
    assert table(place, "white-box", PREDICTED).exit_code == 0
    shutil.rmtree(place / "runs")
    assert table(place, "black-box", TRANSFERRED, records=False).exit_code == 0
    assert table(place, "white-box", "Natural: FGSM, predicted labels, E of the batch, TanhConv").exit_code == 0
    name = lines(place)[0]["run"]
    wanted = ["predicted labels", "from Natural, Baseline", "predicted labels and E of the batch"]
    assert [one["setup"] for one in Run(place / "records" / name).attacks] == wanted


def test_a_run_folder_without_weights(place, trained):
    """Those that were kept are used; without them the error says what is missing."""
    name = lines(place)[0]["run"]
    shutil.copytree(trained / "runs" / name, place / "runs" / name)
    (place / "runs" / name / "checkpoint.safetensors").unlink()
    refused = table(place, "white-box", PREDICTED, weights=False)
    assert refused.exit_code == 1
    assert "holds this cell without the weights (checkpoint.safetensors) that attacks need" in words(refused)
    assert setups(place) == [None]
    assert table(place, "white-box", PREDICTED).exit_code == 0
    assert setups(place) == [None, "predicted labels"]


def test_a_run_folder_with_another_training(place, trained):
    """Neither its weights nor its attacks are those of the network that counts, and no line is lost."""
    (line,) = lines(place)
    folder = place / "runs" / line["run"]
    shutil.copytree(trained / "runs" / line["run"], folder)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "seconds": 2.0}))
    refused = table(place, "white-box", PREDICTED, weights=False)
    assert refused.exit_code == 1
    assert "holds another training of this cell than the one that counts" in words(refused)
    assert lines(place) == [line]
    # records of another training's attacks, without its weights
    (folder / "checkpoint.safetensors").unlink()
    attacks = [{"attack": name, "accuracy": -1.0, "attacked": 1, "seconds": 1.0} for name in ("fgsm", "bim")]
    Run(folder).add_attack(
        {"setup": "predicted labels", "transfer": False, "from": None, "labels": "predicted", "attacks": attacks}
        | {"clean": -1.0, "images": 1, "eps": 0.1}
    )
    refused = table(place, "white-box", PREDICTED)
    assert refused.exit_code == 1
    assert "has records of another training" in words(refused)
    assert lines(place) == [line]


def test_a_folder_of_records_has_no_weights_to_keep(place, trained):
    """Its cells are entered into a new ledger all the same."""
    shutil.copytree(trained / "runs", place / "runs")
    (place / "runs" / lines(place)[0]["run"] / "checkpoint.safetensors").unlink()
    (place / "ledger.jsonl").unlink()
    done = table(place, "black-box", CELL)
    assert done.exit_code == 0, done.output
    assert setups(place) == [None]


@pytest.mark.parametrize("copy", ["save_weights", "keep_record"])
def test_a_cell_is_entered_after_its_copies(place, trained, monkeypatch, copy):
    """On a full disk, say: a cell that is in the ledger is done, and its copies would be missing for good."""
    (line,) = lines(place)
    shutil.copytree(trained / "runs", place / "runs")
    for name in ("weights", "records"):
        shutil.rmtree(place / name)
    (place / "ledger.jsonl").unlink()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "here")

    with monkeypatch.context() as patch:
        patch.setattr(runner, copy, full)
        assert "error: here: No space left on device" in words(table(place, "black-box", CELL))
    assert not (place / "ledger.jsonl").is_file()
    assert table(place, "black-box", CELL).exit_code == 0
    assert lines(place) == [line]
    assert (place / "weights" / f"{line['run']}.safetensors").is_file()
    assert (place / "records" / line["run"] / "result.json").is_file()


def test_a_copy_of_records_that_was_cut_off(place, trained, tmp_path, monkeypatch):
    """What is left there of an earlier training is not taken for this one's the next time."""
    name = lines(place)[0]["run"]
    records, fresh = Run(place / "records" / name), Run(trained / "runs" / name)
    records.add_attack({"setup": "predicted labels", "transfer": False, "labels": "predicted", "attacks": []})
    records.finish({**records.result, "seconds": 2.0})
    written = ledger.write_atomically

    def cut_off(path, data):
        if path.name == "metrics.jsonl":
            raise KeyboardInterrupt
        written(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "write_atomically", cut_off)
        with pytest.raises(KeyboardInterrupt):
            keep_record(fresh, place / "records")
    keep_record(fresh, place / "records")
    assert records.attacks == []
    assert (records.result, records.metrics[-1]) == (fresh.result, fresh.metrics[-1])


def test_a_training_that_replaces_another_is_entered(place, monkeypatch):
    """Its runner was killed before it could: an hour's training would have to be removed, and done again."""

    def killed(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "here")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "entry_of_training", killed)
        assert table(place, "white-box", PREDICTED, weights=False).exit_code == 1
    assert setups(place) == [None]
    folder = place / "runs" / lines(place)[0]["run"]
    trained = (folder / "checkpoint.safetensors").stat().st_mtime_ns
    done = table(place, "white-box", PREDICTED, weights=False)
    assert done.exit_code == 0, done.output
    assert setups(place) == [None, None, "predicted labels"]
    assert (folder / "checkpoint.safetensors").stat().st_mtime_ns == trained
    # once it is entered, the note says nothing about a training after it
    book = Ledger(place / "ledger.jsonl")
    assert not book.replaced_in(folder, Run(folder).recipe)


def test_attacks_that_have_lost_some_of_their_own(place, monkeypatch):
    """`dcnet attack --replace` moves an attack into a record of its own: the set-up is attacked again."""
    assert table(place, "white-box", PREDICTED).exit_code == 0
    for folder in (place / "runs" / lines(place)[0]["run"], place / "records" / lines(place)[0]["run"]):
        (record,) = Run(folder).attacks
        Run(folder).write_attacks([{**record, "attacks": record["attacks"][:1]}])
    (place / "ledger.jsonl").write_text(json.dumps(lines(place)[0]) + "\n")
    assert table(place, "white-box", PREDICTED, "--list").output.count("  missing  ") == 1
    assert table(place, "white-box", PREDICTED).exit_code == 0
    assert set(lines(place)[1]["attacks"]) == {"fgsm", "bim"}


def test_a_long_attack_goes_on_where_it_was_stopped(place, monkeypatch):
    """AutoAttack takes longer than a budget may be; its parts together are what is found at once."""
    (file,) = (place / "weights").iterdir()
    run = dcnet.training.restore_run(file, place / "runs" / file.stem)
    setup = Setup("AutoAttack", "auto")
    attacked, most = [], 2

    def attack_run(run, attacks, *, first, **others):
        if len(attacked) == most:
            raise KeyboardInterrupt
        attacked.append(first)
        return dcnet.training.attack_run(run, "fgsm", 0.05, first=first, **others)

    monkeypatch.setattr(worker, "attack_run", attack_run)
    monkeypatch.setattr(worker, "_PART", 10)
    with pytest.raises(KeyboardInterrupt):
        worker._attack(run, setup, None, 35, {"device": "cpu"})
    most = 9
    worker._attack(run, setup, None, 35, {"device": "cpu"})
    assert attacked == [0, 10, 20, 30]
    assert not (run.folder / worker.BEGUN).is_file()
    (found,) = run.attacks
    whole = dcnet.training.attack_run(run, "fgsm", 0.05, limit=35, cumulative=False, device="cpu")
    wanted = {name: value for name, value in whole["attacks"][0].items() if name != "seconds"}
    assert {name: found["attacks"][0][name] for name in wanted} == wanted
    assert (found["images"], found["clean"], found["setup"]) == (35, whole["clean"], "AutoAttack")


@pytest.mark.parametrize("other", [{"result": {"seconds": 2.0}}, {"images": 34}])
def test_parts_of_another_attack_are_not_taken(place, monkeypatch, other):
    """The network was trained again, say, and attacked before that."""
    (file,) = (place / "weights").iterdir()
    run = dcnet.training.restore_run(file, place / "runs" / file.stem)
    setup = Setup("AutoAttack", "auto")
    part = {"images": 10, "clean": 90.0, "attacks": [{"attack": "auto", "attacked": 9, "accuracy": 10.0, "seconds": 1}]}

    def attack(first, limit):
        return part | {"images": limit}

    def stop(first, limit):
        if first == 10:
            raise KeyboardInterrupt
        return attack(first, limit) | {"clean": 0.0}

    monkeypatch.setattr(worker, "_PART", 10)
    images = other.get("images", 35)
    with pytest.raises(KeyboardInterrupt):
        worker._in_parts(run, setup, images, stop)
    if "result" in other:
        run.finish(run.result | other["result"])
    assert worker._in_parts(run, setup, 35, attack)["clean"] > 80.0


def test_a_network_is_attacked_by_one_process(place):
    """That of a runner that was killed goes on."""
    (file,) = (place / "weights").iterdir()
    run = dcnet.training.restore_run(file, place / "runs" / file.stem)
    what = {
        "attack": {"setup": {"name": "AutoAttack", "attacks": "auto"}, "source": None, "images": None},
        "options": {},
    }
    with locked(run.folder):
        assert worker.main(str(run.folder), json.dumps(what)) == runner.IN_USE


def test_attacks_that_are_left_of_a_run_that_is_gone(place):
    """They are not entered before the network is trained again."""
    (line,) = lines(place)
    folder = place / "runs" / line["run"]
    folder.mkdir(parents=True)
    shutil.copy(place / "records" / line["run"] / "recipe.json", folder)
    attacks = [{"attack": name, "accuracy": -1.0, "attacked": 1, "seconds": 1.0} for name in ("fgsm", "bim")]
    Run(folder).add_attack(
        {"setup": "predicted labels", "transfer": False, "from": None, "labels": "predicted", "attacks": attacks}
        | {"clean": -1.0, "images": 1, "eps": 0.1}
    )
    (place / "ledger.jsonl").unlink()
    done = table(place, "white-box", PREDICTED, weights=False)
    assert done.exit_code == 0, done.output
    assert setups(place) == [None, "predicted labels"]
    found = lines(place)[1]["attacks"]
    assert set(found) == {"fgsm", "bim"}
    assert min(found.values()) >= 0.0


def test_attacks_on_a_network_that_has_not_converged(place):
    """There is nothing to attack, and it is not entered a second time."""
    (line,) = lines(place)
    (place / "ledger.jsonl").write_text(json.dumps({**line, "error": 90.0}) + "\n")
    for _ in range(2):
        assert table(place, "white-box", PREDICTED, weights=False).exit_code == 0
    assert setups(place) == [None]
    listed = table(place, "white-box", PREDICTED, "--list").output
    assert "done     Natural: FGSM, predicted labels, TanhConv, seed 0: N/C" in listed


def test_without_ledger_and_records(place):
    """The weights say what was trained, and with which result; how it converged is lost."""
    before = lines(place)
    (place / "ledger.jsonl").unlink()
    done = table(place, "white-box", PREDICTED, records=False)
    assert done.exit_code == 0, done.output
    assert setups(place) == [None, "predicted labels"]
    assert "train_error" not in lines(place)[0]
    assert lines(place)[0]["error"] == before[0]["error"]


def test_a_cell_that_was_computed_otherwise(place):
    """How often a run is saved or evaluated does not change what it is."""
    done = table(place, "white-box", PREDICTED, "--set", "save_every=7")
    assert done.exit_code == 0, done.output
    assert setups(place) == [None, "predicted labels"]


def test_other_settings_have_folders_of_their_own(trained, place):
    """Else a run of other settings would be entered again and again, and taken for the cell."""
    other = table(place, "black-box", CELL, "--set", "batch=32")
    assert other.exit_code == 0, other.output
    batches = [entry.recipe.batch for entry in Ledger(place / "ledger.jsonl").entries]
    assert batches == [64, 32]
    names = [line["run"] for line in lines(place)]
    assert names[0] != names[1]
    for flags in (["batch=32", "momentum=0.8"], ["momentum=0.8", "batch=32"]):  # in any order
        listed = table(place, "black-box", CELL, "--list", *(word for flag in flags for word in ("--set", flag)))
        assert "batch=32, epochs=1.0, momentum=0.8" in words(listed)
    # a folder with another cell's run, put there by hand
    shutil.rmtree(place / "runs" / names[1])
    (place / "runs" / names[1]).parent.mkdir(exist_ok=True)
    shutil.copytree(trained / "runs" / names[0], place / "runs" / names[1])
    (place / "ledger.jsonl").unlink()
    refused = table(place, "black-box", CELL, "--set", "batch=32")
    assert refused.exit_code == 1
    assert "holds the run of another cell: batch=64 there, 32 here" in " ".join(refused.output.split())
    assert not (place / "ledger.jsonl").exists()


def test_a_damaged_file_of_weights_ends_it_before_anything_is_trained(place):
    (file,) = (place / "weights").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    done = table(place, "white-box", PREDICTED)
    assert done.exit_code == 1
    assert f"{file.name} cannot be read" in " ".join(done.output.split()).replace(" ", " ")
    assert not (place / "runs").exists()


def test_a_restored_run_that_was_cut_off_is_completed(place):
    (file,) = (place / "weights").iterdir()
    run = dcnet.training.restore_run(file, place / "runs" / file.stem)
    (run.folder / "result.json").unlink()
    done = table(place, "white-box", PREDICTED)
    assert done.exit_code == 0, done.output
    assert setups(place) == [None, "predicted labels"]
    assert Path(run.folder / "result.json").is_file()
