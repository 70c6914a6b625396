"""Run folders: one process at a time, a folder for each recipe, runs that start again or go on to another length."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch

import dcnet
from dcnet.training.checkpoint import load_checkpoint
from dcnet.training.folder import Place
from dcnet.training.recipe import change
from dcnet.util import lock
from dcnet.util.files import append_line, remove_partial, write_atomically
from dcnet.util.lock import InUse, locked

# With a child, such as a worker that loads images, which outlives it.
HOLDER = """
import os, sys, time
from pathlib import Path
from dcnet.util.lock import locked
with locked(Path(sys.argv[1])):
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


def recipe(**options):
    return dcnet.make_recipe(**{"epochs": 1.0, "batch": 256, "magnitude": None, **options})


def train(folder=None, **options):
    own = {name: options.pop(name) for name in ("overwrite", "extend") if name in options}
    return dcnet.train(recipe(**options), folder, device="cpu", quiet=True, **own)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path/run."""
    (tmp_path / "run").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()  # ends its child


def test_a_lock_names_the_other_process_and_ends_with_it(tmp_path, holder):
    folder = tmp_path / "run"
    with pytest.raises(InUse, match=rf"run is in use by process {holder.pid} on {socket.gethostname()}, since 20"):
        train(folder)
    assert [path.name for path in folder.iterdir()] == [".lock"]  # nothing was written
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (folder / ".lock").is_file()  # which nobody could remove
    (folder / ".checkpoint.safetensors.0123456789ab.part").write_text("half a checkpoint")
    train(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint.safetensors",
        "metrics.jsonl",
        "recipe.json",
        "result.json",
    ]


def test_a_lock_in_one_process(tmp_path):
    with locked(tmp_path):
        with pytest.raises(InUse, match=f"process {os.getpid()} on"), locked(tmp_path):
            pass
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / ".lock").exists()
    with locked(tmp_path):
        pass


def test_a_lock_that_is_released_while_it_is_opened(tmp_path, monkeypatch):
    """The one who had it removes the file: what was opened is not what others will open."""
    original, calls = lock._lock, []

    def late(handle):
        calls.append(handle)
        if len(calls) == 1:
            (tmp_path / ".lock").unlink()
        original(handle)

    monkeypatch.setattr(lock, "_lock", late)
    with locked(tmp_path):
        assert len(calls) == 2
        assert (tmp_path / ".lock").is_file()


def test_no_locks_on_this_file_system(tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("dcnet.util.lock.fcntl.lockf", lockf)
    with pytest.warns(UserWarning, match="has no locks"), locked(tmp_path):
        pass


def test_temporary_files_have_names_of_their_own(tmp_path, monkeypatch):
    path, names = tmp_path / "a[1]", []
    original = os.replace

    def replace(source, target):
        names.append(source.name)
        original(source, target)

    monkeypatch.setattr(os, "replace", replace)
    for data in (b"1", b"2"):
        write_atomically(path, data)
    assert path.read_bytes() == b"2"
    assert len(set(names)) == 2
    (tmp_path / names[0]).write_text("left by a kill")
    (tmp_path / ".other.0123456789ab.part").write_text("of another file")
    remove_partial(path)
    assert sorted(left.name for left in tmp_path.iterdir()) == [".other.0123456789ab.part", "a[1]"]
    os.umask(mask := os.umask(0))
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask  # as any file, not as a temporary one


def test_links_and_devices_stay_what_they_are(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomically(tmp_path / "link", b"1")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"1"
    (tmp_path / "null").symlink_to(os.devnull)
    write_atomically(tmp_path / "null", b"1")
    assert (tmp_path / "null").is_symlink()


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda path: write_atomically(path, b"1"), lambda path: append_line(path, "1")):
        with pytest.raises(OSError, match=r"No space left on device: '.*/metrics\.jsonl'") as caught:
            write(tmp_path / "metrics.jsonl")
        assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(OSError, match=r"No space left on device: '.*checkpoint\.safetensors'|'.*/recipe\.json'"):
        train(tmp_path / "run")


def test_each_recipe_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = train(steps=1), train(steps=1, lr=0.1)
    assert str(first.folder) == "runs/digits-cnn9_narrow-plain-seed0"
    assert second.folder.name.startswith(f"{first.folder.name}-")
    assert len(second.folder.name) == len(first.folder.name) + 7
    assert [run.recipe.lr for run in (first, second)] == [1e-3, 0.1]
    # again: the same folders
    assert train(steps=1, lr=0.1).folder == second.folder
    assert train(steps=1).folder == first.folder
    assert train(steps=1, lr=0.2).folder not in (first.folder, second.folder)
    # one that cannot be read is another's
    (first.folder / "recipe.json").write_text("{")
    assert train(steps=1).folder.name.startswith(f"{first.folder.name}-")
    # what another process has just taken is another's too
    with ExitStack() as held, locked(first.folder):
        (first.folder / "recipe.json").unlink()
        place = Place(recipe(steps=1, lr=0.3), None, held)
        assert place.find() == (first.folder, False)
        assert place.enter(first.folder).name.startswith(f"{first.folder.name}-")


def test_overwrite(tmp_path):
    folder = tmp_path / "run"
    train(folder, steps=1)
    with pytest.raises(
        ValueError, match=r"lr=0.001 there, 0.1 here. Choose another folder, or overwrite that run: --overwrite"
    ):
        train(folder, steps=1, lr=0.1)
    for name in ("attacks.json", "inspection.json", "diverged.json", "notes.txt"):
        (folder / name).write_text("[]")
    (folder / "tensorboard").mkdir()
    with pytest.raises(ValueError, match="unknown model"):  # what cannot be trained overwrites nothing
        train(folder, model="cnn", overwrite=True)
    assert (folder / "result.json").is_file()
    run = train(folder, steps=2, lr=0.1, overwrite=True)
    assert (run.recipe.lr, run.result["steps"]) == (0.1, 2)
    files = ["checkpoint.safetensors", "metrics.jsonl", "notes.txt", "recipe.json", "result.json"]
    assert sorted(path.name for path in folder.iterdir()) == files
    before = (folder / "result.json").stat().st_mtime_ns
    train(folder, steps=2, lr=0.1, overwrite=True)  # a finished one too
    assert (folder / "result.json").stat().st_mtime_ns > before


@pytest.mark.parametrize("schedule", ["constant", "plateau"])
def test_an_extended_run_is_a_longer_one(tmp_path, schedule):
    options = {"schedule": schedule, "patience": 1, "optimizer": "sgd", "lr": 0.05}
    long = train(tmp_path / "long", epochs=3.0, **options)
    train(tmp_path / "run", epochs=1.0, **options)
    (tmp_path / "run" / "attacks.json").write_text("[]")
    with pytest.raises(
        ValueError, match=r"epochs=1.0 there, 3.0 here.*dcnet train --resume .*run --epochs 3 \(in Python extend=True\)"
    ):
        train(tmp_path / "run", epochs=3.0, **options)
    run = train(tmp_path / "run", epochs=3.0, extend=True, **options)
    assert run.recipe == long.recipe
    (here, _), (there, _) = load_checkpoint(run.checkpoint), load_checkpoint(long.checkpoint)
    assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())
    assert [entry["test_loss"] for entry in run.metrics] == [entry["test_loss"] for entry in long.metrics]
    assert not (run.folder / "attacks.json").exists()  # those were of other weights
    assert (run.folder / "attacks-of-step-5.json").is_file()
    with pytest.raises(ValueError, match=r"has done 15 steps already; it cannot end after 10. Possible: 15 or more"):
        train(tmp_path / "run", epochs=2.0, extend=True, **options)
    with pytest.raises(ValueError, match=r"lr=0.05 there, 0.1 here"):
        train(tmp_path / "run", epochs=4.0, extend=True, **(options | {"lr": 0.1}))


def test_a_schedule_that_depends_on_the_length(tmp_path):
    train(tmp_path / "run", epochs=1.0, schedule="onecycle")
    with pytest.raises(
        ValueError, match=r"cannot go on to 10 steps: with schedule='onecycle' the learning rates depend on the length"
    ):
        train(tmp_path / "run", epochs=2.0, schedule="onecycle", extend=True)
    assert dcnet.Run(tmp_path / "run").result["steps"] == 5  # as it was
    # a recipe changed by hand is not believed either
    longer = change(dcnet.Run(tmp_path / "run").recipe, epochs=2.0)
    (tmp_path / "run" / "recipe.json").write_text(longer.to_json())
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(ValueError, match="cannot go on to 10 steps"):
        dcnet.train(longer, tmp_path / "run", device="cpu", quiet=True)


def test_a_kill_while_a_run_is_extended(tmp_path, monkeypatch):
    """The recipe has the new length, the checkpoint has the old one."""
    train(tmp_path / "run", epochs=1.0)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dcnet.training.trainer._train", killed)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "run", epochs=2.0, extend=True)
    assert dcnet.Run(tmp_path / "run").result is None
    assert train(tmp_path / "run", epochs=2.0).result["steps"] == 10


def test_a_finished_run_says_so(tmp_path, capsys):
    for _ in range(2):
        run = dcnet.train(recipe(steps=1), tmp_path / "run", device="cpu")
    shown = capsys.readouterr().out
    assert f"run is finished: 0.2 epochs, accuracy {run.accuracy:.2f}%. Nothing is left to do" in shown
    assert f"dcnet train --resume {tmp_path / 'run'} --epochs N" in shown
    again = f"dcnet train --recipe {tmp_path / 'run' / 'recipe.json'} --run {tmp_path / 'run'} --overwrite"
    assert again in shown
    run.checkpoint.unlink()
    dcnet.train(recipe(steps=1), tmp_path / "run", device="cpu")
    assert "--epochs N" not in capsys.readouterr().out


def test_a_record_without_weights_is_not_trained_again(tmp_path):
    """As those under results/: to go on from nothing would overwrite what is known of the run."""
    run = train(tmp_path / "run", epochs=1.0)
    (run.folder / "attacks.json").write_text("[]")
    run.checkpoint.unlink()
    before = {path.name: path.read_bytes() for path in run.folder.iterdir() if path.name != ".lock"}
    with pytest.raises(ValueError, match=r"is finished, but its weights \(checkpoint.safetensors\) are not there"):
        train(tmp_path / "run", epochs=2.0, extend=True)
    assert {path.name: path.read_bytes() for path in run.folder.iterdir() if path.name != ".lock"} == before
    with pytest.raises(FileNotFoundError, match="is a finished run, but its weights"):
        run.model  # noqa: B018
    assert train(tmp_path / "run", epochs=2.0, overwrite=True).result["steps"] == 10


def test_no_hint_to_a_length_that_is_over(tmp_path):
    train(tmp_path / "run", epochs=2.0)
    with pytest.raises(ValueError, match=r"epochs=2.0 there, 1.0 here") as error:
        train(tmp_path / "run", epochs=1.0)
    assert "--resume" not in str(error.value)


def test_a_checkpoint_of_another_network(tmp_path):
    """One reason, and not the names of all tensors."""
    run = train(tmp_path / "run", steps=1)
    other = change(run.recipe, model="cnn9")
    (run.folder / "recipe.json").write_text(other.to_json())
    with pytest.raises(ValueError, match=r"does not fit .*recipe.json: for one, size mismatch for") as error:
        dcnet.Run(run.folder).model  # noqa: B018
    assert len(str(error.value)) < 500


def test_attacks_on_an_unfinished_run(tmp_path):
    """They are not those of the network at the end."""
    run = train(tmp_path / "run", epochs=1.0)
    (run.folder / "result.json").unlink()
    (run.folder / "attacks.json").write_text("[]")
    train(tmp_path / "run", epochs=1.0)
    assert run.attacks == []
    assert not (run.folder / "attacks.json").exists()
    assert (run.folder / "attacks-of-step-5.json").read_text() == "[]"
