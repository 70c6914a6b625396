"""Training with two gloo processes, against one."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from helpers import in_two_processes

import dcnet
from dcnet.training import state
from dcnet.training.checkpoint import load_checkpoint
from dcnet.util.lock import InUse, locked

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch is built without gloo"
)


def curve(run):
    return [entry[name] for entry in run.metrics for name in ("train_loss", "test_loss")]


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"accumulate": 2, "projection": 3, "orthogonality": 1e-4}],
    ids=["plainly", "in parts"],
)
def test_two_processes_are_one(tmp_path, options):
    """torchrun, with norm=None and E{‖x‖} over both: the curve of one process, to rounding."""
    # SGD at a low rate: rounding errors grow with the steps (kinks, 1/‖x‖ of nearly empty patches), and Adam divides
    # gradients by their own size
    options = {
        "steps": 13,  # an epoch has eleven
        "batch": 128,
        "optimizer": "sgd",
        "lr": 0.005,
        "norm": "none",
        "sync": True,
        "augment": "crop",
        "pad": 1,
        **options,
    }
    if "accumulate" in options:  # parts have means of their own
        options |= {"magnitude": "sphere", "sync": False}
    recipe = dcnet.make_recipe(**options)
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [
        "-m",
        "--",
        "dcnet",
        "train",
        "--recipe",
        str(tmp_path / "recipe.json"),
        "--device",
        "cpu",
        "--run",
        str(tmp_path / "two"),
    ]
    done = subprocess.run(
        [*command, *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 1:") == 1  # only the first prints
    two, one = dcnet.Run(tmp_path / "two"), dcnet.train(recipe, tmp_path / "one", device="cpu", quiet=True)
    assert curve(two) == pytest.approx(curve(one), rel=1e-5)
    assert two.result["devices"] == 2
    for name, tensor in one.model.state_dict().items():
        torch.testing.assert_close(two.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)


def worker(rank, port, results):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    original = state.TrainingState.save
    seen = []

    def save(self, run):
        original(self, run)
        seen.append({name: buffer.clone() for name, buffer in self.ema.model.named_buffers() if "running" in name})
        agreed = {name: buffer.clone() for name, buffer in self.model.named_buffers() if "running" in name}
        seen[-1].update({f"model {name}": buffer for name, buffer in agreed.items()})
        seen[-1].update({f"calibrated {name}": buffer for name, buffer in self.calibrated.items()})

    state.TrainingState.save = save
    folder = os.environ["TEST_FOLDER"]
    try:
        dcnet.train(dcnet.make_recipe(epochs=1.0), os.environ["TEST_LOCKED"], device="cpu", quiet=True)
    except InUse as error:
        results[f"locked out {rank}"] = str(error)
    run = dcnet.train(dcnet.make_recipe(epochs=2.0, batch=256, norm="batch", ema=0.9), folder, device="cpu", quiet=True)
    results[rank] = (seen, run.result["test_images"], [entry["test_accuracy"] for entry in run.metrics])


def test_averages_agree_after_every_epoch(tmp_path, monkeypatch):
    """And before that, both ranks are kept out of a folder that another process has."""
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path / "run"))
    monkeypatch.setenv("TEST_LOCKED", str(tmp_path / "locked"))
    (tmp_path / "locked").mkdir()
    with locked(tmp_path / "locked"):
        results = in_two_processes(worker)
    assert f"in use by process {os.getpid()} on" in results["locked out 0"]
    assert results["locked out 0"] == results["locked out 1"]
    (first, images, _), (second, _, _) = results[0], results[1]
    assert len(first) == len(second) == 2
    for a, b in zip(first, second, strict=True):
        assert a
        for name in a:
            assert torch.equal(a[name], b[name]), name
    assert images == 355
    run = dcnet.Run(tmp_path / "run")
    saved, loaded = load_checkpoint(run.checkpoint)[0], run.model.state_dict()
    for name, buffer in first[-1].items():
        kind, _, key = name.rpartition(" ")
        assert torch.equal(loaded[key] if kind == "calibrated" else saved[f"{kind or 'ema'}/{key}"], buffer), name
    assert any(name.startswith("calibrated ") for name in first[-1])
    # the loaded network classifies as both together did: every test image once
    test = dcnet.data.load_data("digits").test
    with torch.no_grad():
        right = (run.model(test.images / 255.0).argmax(1) == test.labels).float().mean()
    assert run.accuracy == pytest.approx(100 * float(right))


def test_what_cannot_be_divided(tmp_path, monkeypatch):
    monkeypatch.setattr("dcnet.training.trainer.joined", _three)
    with pytest.raises(ValueError, match="batch=128 cannot be divided among 3 processes"):
        dcnet.train(dcnet.make_recipe(epochs=1.0), tmp_path / "run", device="cpu", quiet=True)


class _Alone(dcnet.training.Ranks):
    def from_first(self, decide):
        return decide()


class _three:
    def __init__(self, device):
        pass

    def __enter__(self):
        return _Alone(0, 3, torch.device("cpu"))

    def __exit__(self, *_):
        pass
