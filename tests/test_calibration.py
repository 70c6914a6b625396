"""Evaluations in training: with running averages that fit the weights, and without a trace in what is trained."""

import os
import signal

import pytest
import torch

import dcnet
from dcnet.training import Interrupted, state
from dcnet.training.checkpoint import load_checkpoint

OPERATORS = {
    "plain": (None, "cosine"),
    "sphere": ("sphere", "cosine"),
    "tanh": ("tanh", "cosine"),
    "seg": ("seg", "square_cosine"),
}


def train(folder, name=None, **options):
    return dcnet.train(dcnet.make_recipe(name, **options), folder, device="cpu", quiet=True)


def demo_curve(folder, operator, **options):
    """Accuracies on training and test images, epoch by epoch, of one of the demo's networks."""
    magnitude, angular = OPERATORS[operator]
    run = train(folder, "demo", magnitude=magnitude, angular=angular, **options)
    return [(entry["train_accuracy"], entry["test_accuracy"]) for entry in run.metrics]


def test_a_trained_network_is_not_shown_at_chance(tmp_path):
    """TanhConv in the demo's first steps, where averages of training would leave it at chance: 10 %."""
    for _, test in demo_curve(tmp_path / "run", "tanh", steps=44):
        assert test > 75.0


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_no_curve_of_the_demo_is_at_chance(tmp_path, operator):
    curve = demo_curve(tmp_path / "run", operator)
    assert len(curve) == 8
    for seen, test in curve:  # the mean over an epoch of learning, and what was learned by its end
        assert test > seen - 3.0
        assert test > 30.0


def test_a_short_fine_tune_is_evaluated_properly(tmp_path):
    """From a plain network's weights to another operator in a few steps.

    E{‖x‖} starts at 1, and BatchNorm's averages are the plain network's.
    """
    options = {"norm": "batch", "batch": 64, "lr": 2e-3}
    train(tmp_path / "plain", magnitude=None, epochs=2.0, **options)
    run = train(tmp_path / "tuned", pretrained=str(tmp_path / "plain"), steps=10, **options)
    assert run.accuracy > 60.0


TRACELESS = {
    "batch": {"norm": "batch"},
    "moving average": {"ema": 0.9, "norm": "batch", "accumulate": 2},
    "pgd": {"adversarial": "pgd", "adversarial_steps": 1, "adversarial_share": 0.5, "norm": "batch", "batch": 128},
}


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("options", TRACELESS.values(), ids=TRACELESS)
def test_evaluations_leave_no_trace_in_what_is_trained(tmp_path, options):
    """Weights, averages of training, optimizer and random numbers are the same with and without evaluations.

    That holds too where adversarial images are made on those averages.
    """
    runs = [
        train(tmp_path / str(batches), **{"epochs": 2.0, "batch": 64, "recalibrate": batches} | options)
        for batches in (0, 3)
    ]
    without, with_them = (load_checkpoint(run.checkpoint)[0] for run in runs)
    found = {name for name in with_them if name.startswith("calibrated/")}
    assert found
    assert set(with_them) - found == set(without)
    for name, tensor in without.items():
        assert torch.equal(tensor, with_them[name]), name
    weights = "ema/" if "ema" in options else "model/"
    assert any(not torch.equal(with_them[name], with_them[name.replace("calibrated/", weights)]) for name in found)


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("options", [{}, {"ema": 0.9}], ids=["weights", "moving average"])
def test_the_loaded_network_is_the_evaluated_one(tmp_path, options):
    run = train(tmp_path / "run", "demo", steps=10, **options)
    test = dcnet.training.open_data(run.recipe, dcnet.training.Ranks(0, 1, torch.device("cpu"))).test
    with torch.no_grad():
        right = dcnet.load(run.folder)(test.images / 255.0).argmax(1) == test.labels
    assert 100.0 * float(right.float().mean()) == pytest.approx(run.accuracy)


@pytest.mark.parametrize(
    ("stop", "options"),
    [pytest.param(40, {}, marks=pytest.mark.slow), (44, {"evaluate_every": 0})],
    ids=["within an epoch", "after one without an evaluation"],
)
def test_an_interrupted_network_can_be_used(tmp_path, monkeypatch, stop, options):
    """Also where no evaluation came before the checkpoint."""
    original = state.TrainingState.train_step

    def step(self, images, labels):
        original(self, images, labels)
        if self.step == stop:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(state.TrainingState, "train_step", step)
    with pytest.raises(Interrupted, match=f"stopped at step {stop}"):
        train(tmp_path / "run", "demo", **options)
    test = dcnet.data.load_data("digits").test
    with torch.no_grad():
        right = dcnet.load(tmp_path / "run")(test.images / 255.0).argmax(1) == test.labels
    assert float(right.float().mean()) > 0.75


def test_more_batches_than_an_epoch_has(tmp_path, few_digits):
    run = train(tmp_path / "run", epochs=1.0, batch=160, recalibrate=100)  # two steps
    tensors, _ = load_checkpoint(run.checkpoint)
    assert tensors["calibrated/stages.0.conv.num_batches_tracked"] == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_graph_goes_on_with_the_averages_of_training(tmp_path):
    options = {"epochs": 3.0, "batch": 128, "norm": "batch", "graphs": True, "deterministic": True}
    runs = [
        dcnet.train(
            dcnet.make_recipe(**options, recalibrate=batches), tmp_path / str(batches), device="cuda", quiet=True
        )
        for batches in (0, 3)
    ]
    without, with_them = (load_checkpoint(run.checkpoint)[0] for run in runs)
    for name, tensor in without.items():
        assert torch.equal(tensor, with_them[name]), name
