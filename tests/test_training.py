"""Training: runs on disk, resumption bit for bit, options, and what stops a run."""

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import needs
from safetensors.torch import load_file
from torch import nn

import dcnet
from dcnet.data.folder import ImageFolder
from dcnet.training import (
    Interrupted,
    NonFiniteLoss,
    attack_run,
    evaluate_run,
    open_trained,
    predict_run,
    run_folders,
    save_weights,
    state,
    trainer,
)
from dcnet.training.checkpoint import load_checkpoint, save_checkpoint
from dcnet.training.graph import uses_graphs
from dcnet.training.loss import classification_loss
from dcnet.training.optimizer import make_optimizer
from dcnet.training.ranks import Ranks

SMALL = {"epochs": 2.0, "batch": 64, "recalibrate": 2}  # five steps an epoch, of `few_digits`


@pytest.fixture
def all_digits():
    """Asked for by the tests that depend on how well a network learns."""


@pytest.fixture(autouse=True)
def few_unless_all(request):
    if "all_digits" not in request.fixturenames:
        request.getfixturevalue("few_digits")


def recipe(**options):
    return dcnet.make_recipe(**{**SMALL, **options})


def train(folder, resume=False, **options):
    return dcnet.train(dcnet.Run(folder).recipe if resume else recipe(**options), folder, device="cpu", quiet=True)


def assert_same_run(a, b):
    """Weights, optimizer, counters, metrics: everything but the time it took."""
    (left, left_state), (right, right_state) = (load_checkpoint(run.checkpoint) for run in (a, b))
    assert set(left) == set(right)
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    for each in (left_state, right_state):
        each.pop("seconds")
    assert left_state == right_state
    without_time = [[{k: v for k, v in entry.items() if k != "seconds"} for entry in run.metrics] for run in (a, b)]
    assert without_time[0] == without_time[1]
    if a.result is not None:
        assert a.result["accuracy"] == b.result["accuracy"]


def test_a_run(tmp_path, all_digits):
    run = train(tmp_path / "run", epochs=3.0, batch=128)
    assert run.accuracy > 80.0
    result = run.result
    assert result["epochs"] == 3.0
    assert result["steps"] == 33
    assert result["parameters"] == sum(p.numel() for p in run.model.parameters())
    assert {"loss", "seconds", "images_per_second", "torch", "python", "dcnet", "device", "commit"} <= set(result)
    assert [entry["epoch"] for entry in run.metrics] == [1, 2, 3]
    assert run.metrics[-1]["test_accuracy"] == result["accuracy"]
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "checkpoint.safetensors",
        "metrics.jsonl",
        "recipe.json",
        "result.json",
    ]
    # what evaluation says is what the loaded network does
    test = dcnet.training.open_data(run.recipe, dcnet.training.Ranks(0, 1, torch.device("cpu"))).test
    with torch.no_grad():
        right = (dcnet.load(run.folder)(test.images / 255.0).argmax(1) == test.labels).float().mean()
    assert 100 * float(right) == pytest.approx(result["accuracy"])
    again = train(tmp_path / "run", epochs=3.0, batch=128)  # finished: nothing to do
    assert again.result == result
    assert run_folders(tmp_path) == [run.folder]


def test_another_recipe_is_refused(tmp_path):
    train(tmp_path / "run", epochs=1.0)
    with pytest.raises(
        ValueError, match=r"holds another recipe's run: lr=0.001 there, 0.1 here\. Choose another folder"
    ):
        train(tmp_path / "run", epochs=1.0, lr=0.1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file; a run needs a folder"):
        train(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        dcnet.Run(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "batch", "projection": 3, "orthogonality": 1e-5, "augment": "crop", "pad": 1},
        {
            "optimizer": "sgd",
            "lr": 0.05,
            "schedule": "plateau",
            "patience": 1,
            "threshold": 0.99,  # an error that falls by less is a plateau
            "ema": 0.9,
            "angular": "sigmoid:k=learned",
            "channels_last": True,
        },
    ],
    ids=["adam, projection", "sgd, plateau, average"],
)
def test_resumption_is_bit_for_bit(tmp_path, monkeypatch, options):
    """Interrupted in the middle of an epoch, and after a checkpoint that was followed by more steps."""
    options = {**options, "epochs": 3.0, "save_every": 2}
    whole = train(tmp_path / "whole", **options)
    if options.get("schedule") == "plateau":
        assert [entry["lr"] for entry in whole.metrics] == pytest.approx([0.05, 0.05, 0.005])
    original = state.TrainingState.train_step
    for stops in ([3, 9], [5], [14]):  # in the middle, at the end of an epoch, one before the last
        folder = tmp_path / f"stopped {stops}"
        for stop in stops:

            def step(self, images, labels, stop=stop):
                if self.step == stop - 1:
                    os.kill(os.getpid(), signal.SIGINT)  # heeded when the step is done
                original(self, images, labels)

            monkeypatch.setattr(state.TrainingState, "train_step", step)
            with pytest.raises(
                Interrupted,
                match=f"stopped at step {stop} of 15. Go on with: dcnet train --resume .*stopped.* --device cpu",
            ):
                train(folder, **options)
        monkeypatch.setattr(state.TrainingState, "train_step", original)
        assert_same_run(train(folder, resume=True), whole)


def test_interrupted_in_an_evaluation(tmp_path, monkeypatch):
    """The epoch is finished first."""
    handler = signal.getsignal(signal.SIGINT)
    options = {"epochs": 2.0, "schedule": "plateau", "patience": 1}
    whole = train(tmp_path / "whole", **options)
    original = trainer.evaluate

    def evaluate(*arguments):
        if not (tmp_path / "run" / "metrics.jsonl").read_text():
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    with pytest.raises(Interrupted, match="stopped at step 5 of 10"):
        train(tmp_path / "run", **options)
    monkeypatch.setattr(trainer, "evaluate", original)
    assert_same_run(train(tmp_path / "run", resume=True), whole)
    assert signal.getsignal(signal.SIGINT) is handler


def test_in_the_background(tmp_path, monkeypatch):
    """SIGINT stays ignored where a script has started the run with &; SIGTERM stops it, with a checkpoint."""
    original = state.TrainingState.train_step

    def step(self, images, labels):
        os.kill(os.getpid(), {2: signal.SIGINT, 4: signal.SIGTERM}.get(self.step + 1, 0))
        original(self, images, labels)

    monkeypatch.setattr(state.TrainingState, "train_step", step)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(Interrupted, match="stopped at step 4 of 10"):
            train(tmp_path / "run")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert load_checkpoint(tmp_path / "run" / "checkpoint.safetensors")[1]["step"] == 4


def test_twice_is_at_once(tmp_path, monkeypatch):
    def step(self, images, labels):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        raise AssertionError("went on")

    monkeypatch.setattr(state.TrainingState, "train_step", step)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run")


def test_a_checkpoint_knows_its_recipe(tmp_path):
    run = train(tmp_path / "run", epochs=1.0)
    (run.folder / "result.json").unlink()
    (run.folder / "recipe.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoint.safetensors is of another recipe"):
        train(tmp_path / "run", epochs=1.0, lr=0.5)


def test_a_crash_without_a_word(tmp_path, monkeypatch):
    """Nothing is saved at the crash: the run goes on from the last checkpoint, and forgets the epochs after it."""
    whole = train(tmp_path / "whole", epochs=3.0)
    original = trainer.TrainingState.save

    def save(self, run):
        if self.step == 10:
            raise OSError("no space left on device")
        original(self, run)

    monkeypatch.setattr(state.TrainingState, "save_is_due", lambda self: True)
    monkeypatch.setattr(state.TrainingState, "save", save)
    with pytest.raises(OSError, match="no space left"):
        train(tmp_path / "run", epochs=3.0)
    monkeypatch.setattr(state.TrainingState, "save", original)
    assert len(dcnet.Run(tmp_path / "run").metrics) == 2  # the second epoch was written down, its weights were not
    assert_same_run(train(tmp_path / "run", resume=True), whole)


KILLED = {"batch": 64, "epochs": 1.0, "save_every": 4, "recalibrate": 2}


def start(folder, *arguments):
    """Start `dcnet train` in a process of its own, in the folder; a run that has begun goes on."""
    fields = [word for name, value in arguments for word in (f"--{name.replace('_', '-')}", str(value))]
    given = ["--resume", str(folder)] if (folder / "recipe.json").exists() else [*fields, "--run", str(folder)]
    return subprocess.Popen(
        [sys.executable, "-m", "dcnet", "train", *given, "--device", "cpu"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def written(path):
    """When the file was written last, 0 before."""
    return path.stat().st_mtime_ns if path.exists() else 0


def test_killed_and_resumed(tmp_path, all_digits):
    """Killed at two moments between checkpoints, the run ends as one that was left alone, here in this process."""
    whole = dcnet.train(dcnet.make_recipe(**KILLED), tmp_path / "whole", device="cpu", quiet=True)
    folder = tmp_path / "killed"
    for extra in (0.02, 0.1):
        before = written(folder / "checkpoint.safetensors")
        process = start(folder, *KILLED.items())
        while written(folder / "checkpoint.safetensors") == before and process.poll() is None:
            time.sleep(0.005)
        time.sleep(extra)
        assert process.poll() is None, "it ended before it was killed"
        kill(process)
    assert_same_run(train(folder, resume=True), whole)


@pytest.mark.slow
def test_killed_twenty_times(tmp_path, all_digits):
    """The same at random moments, before the first checkpoint and while files are written too."""
    random.seed(20)
    options = KILLED | {"epochs": 40.0, "save_every": 7}
    whole = dcnet.train(dcnet.make_recipe(**options), tmp_path / "whole", device="cpu", quiet=True)
    folder = tmp_path / "killed"
    for _ in range(20):
        process = start(folder, *options.items())
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(random.uniform(2.0, 5.0))
        assert process.poll() is None, "it ended before it was killed"
        kill(process)
    assert_same_run(train(folder, resume=True), whole)


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, {"a": torch.ones(3)}, {"step": 1})

    def fail(*_):
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="power cut"):
        save_checkpoint(path, {"a": torch.zeros(3)}, {"step": 2})
    tensors, state = load_checkpoint(path)
    assert tensors["a"].tolist() == [1.0, 1.0, 1.0]
    assert state == {"step": 1}
    assert load_file(path)["a"].tolist() == [1.0, 1.0, 1.0]  # anybody can read it
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"checkpoint.safetensors cannot be read"):
        load_checkpoint(path)


def losses(run):
    return [entry["train_loss"] for entry in run.metrics]


def test_accumulation_is_the_same_step(tmp_path):
    """Without statistics of the batch, parts of a batch add up to it."""
    options = {"magnitude": "sphere", "epochs": 1.0}
    whole, parts = train(tmp_path / "whole", **options), train(tmp_path / "parts", **options, accumulate=4)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)


def test_options_change_something(tmp_path, all_digits):
    """Every option that is to change the result does, and repeating one does not."""
    common = {"steps": 2}  # the first step of Adam does not see how long a gradient is
    reference = train(tmp_path / "reference", **common)
    assert losses(train(tmp_path / "same", **common)) == losses(reference)
    for number, options in enumerate(
        [
            {"seed": 1},
            {"label_smoothing": 0.1},
            {"clip": 0.01},
            {"projection": 1},
            {"weighted_gradients": True},
            {"orthogonality": 1.0},
            {"weight_decay": 0.5},
            {"augment": "crop", "pad": 1},
            {"precision": "bf16"},
            {"schedule": "onecycle"},
            {"head": "normalized"},
            {"weighting": "linear"},
            {"radius": "0.5"},
            {"optimizer": "sgd"},
        ]
    ):
        other = train(tmp_path / str(number), **common, **options)
        assert other.metrics[0]["test_loss"] != reference.metrics[0]["test_loss"], options
        assert all(math.isfinite(loss) for loss in losses(other))


ADVERSARIAL = {"epochs": 3.0, "batch": 64, "adversarial_eps": 0.1, "adversarial_steps": 2, "adversarial_step": 0.07}


def left_by_fgsm(run):
    """The accuracy that FGSM leaves of a run's network."""
    test = dcnet.data.load_data("digits").test
    return dcnet.robustness.evaluate(run.model, test.images / 255.0, test.labels, "fgsm", eps=0.1)["attacks"][0][
        "accuracy"
    ]


@pytest.fixture(scope="module")
def natural(tmp_path_factory):
    torch.manual_seed(0)
    return left_by_fgsm(train(tmp_path_factory.mktemp("natural") / "run", **ADVERSARIAL))


@pytest.mark.parametrize("kind", ["fgsm", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("pgd", "trades"))])
def test_adversarial_training(tmp_path, kind, natural, all_digits):
    """It makes the network harder to fool than natural training does, and moves no statistics on the way."""
    hardened = train(tmp_path / kind, **ADVERSARIAL, adversarial=kind)
    assert left_by_fgsm(hardened) > natural + 5.0
    tensors, _ = load_checkpoint(hardened.checkpoint)
    assert tensors["model/stages.0.conv.num_batches_tracked"] == hardened.result["steps"]  # one forward a step counts


def test_adversarial_training_resumes(tmp_path, monkeypatch):
    options = {"adversarial": "pgd", "adversarial_steps": 2, "epochs": 2.0, "adversarial_share": 0.5}
    whole = train(tmp_path / "whole", **options)
    original = state.TrainingState.train_step

    def step(self, images, labels):
        if self.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        original(self, images, labels)

    monkeypatch.setattr(state.TrainingState, "train_step", step)
    with pytest.raises(Interrupted):
        train(tmp_path / "run", **options)
    monkeypatch.setattr(state.TrainingState, "train_step", original)
    assert_same_run(train(tmp_path / "run", resume=True), whole)


def test_moving_average_is_what_is_evaluated(tmp_path):
    run = train(tmp_path / "run", ema=0.99, epochs=1.0)
    tensors, _ = load_checkpoint(run.checkpoint)
    name = "stages.0.conv.weight"
    assert not torch.equal(tensors[f"ema/{name}"], tensors[f"model/{name}"])
    assert torch.equal(run.model.state_dict()[name], tensors[f"ema/{name}"])


def test_what_decays():
    """SPEC: ℓ2 on BatchNorm, shortcuts and classifier; on the plain twin's convolutions too."""

    def decaying(**options):
        options = dcnet.make_recipe("paper-cifar", model="resnet32", **options)
        model = dcnet.training.build_model(options, {"num_classes": 10, "in_channels": 3, "input_size": 32})
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = make_optimizer(model, options, torch.device("cpu")).param_groups
        assert sum(len(group["params"]) for group in groups) == len(names)
        return {names[p] for group in groups if group["weight_decay"] > 0.0 for p in group["params"]}

    decoupled = decaying()
    assert "root.norm.weight" in decoupled
    assert "units.5.shortcut.conv.weight" in decoupled
    assert "head.weight" in decoupled
    assert not [name for name in decoupled if "raw_" in name or ("conv" in name and "shortcut" not in name)]
    assert "units.0.first.conv.weight" in decaying(magnitude=None)
    twin = decaying(magnitude=None, decay_kernels=False)
    assert "units.0.first.conv.weight" not in twin
    assert "units.5.shortcut.conv.weight" in twin
    assert "units.5.shortcut.conv.weight" not in decaying(decay_shortcuts=False)
    assert "units.5.shortcut.norm.weight" in decaying(decay_shortcuts=False)
    all_kernels = decaying(decay_unweighted=True)
    assert "units.0.first.conv.weight" in all_kernels
    assert not [name for name in all_kernels if "raw_" in name]
    with pytest.raises(ValueError, match="decay_unweighted=True is for unweighted decoupled kernels"):
        decaying(magnitude=None, decay_unweighted=True)


@pytest.mark.parametrize("loss", ["cross-entropy", "floored"])
def test_mixed_labels(loss):
    """Shares of classes count as the labels they are shares of."""
    recipe = dcnet.make_recipe(loss=loss, label_smoothing=0.1)
    logits, labels, others = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([3, 2, 2, 0, 1, 1])
    one_hot = torch.nn.functional.one_hot
    mixed = 0.7 * one_hot(labels, 4).float() + 0.3 * one_hot(others, 4).float()
    expected = 0.7 * classification_loss(logits, labels, recipe) + 0.3 * classification_loss(logits, others, recipe)
    torch.testing.assert_close(classification_loss(logits, mixed, recipe), expected)


def test_cutmix_trains(tmp_path):
    options = {"augment": "crop+flip+cutmix", "pad": 1, "steps": 25, "batch": 64, "accumulate": 2}
    run = dcnet.train(dcnet.make_recipe(**options), tmp_path / "run", device="cpu", quiet=True)
    assert math.isfinite(run.result["loss"])
    with pytest.raises(ValueError, match="mixes labels, which adversarial='fgsm' has no use for"):
        dcnet.make_recipe(augment="crop+flip+cutmix", adversarial="fgsm")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": "sgd", "lr": 0.05, "ema": 0.9, "clip": 1.0}, {"magnitude": None}],
    ids=["adam", "sgd", "plain"],
)
def test_a_graph_is_its_steps(tmp_path, options):
    """Recorded steps do what the others do; projection and schedule too."""
    options = {
        "norm": "batch",
        "projection": 4,
        "orthogonality": 1e-4,
        "schedule": "onecycle",
        "epochs": 6.0,
        **options,
    }
    runs = [
        dcnet.train(
            recipe(**options, graphs=graphs, deterministic=True), tmp_path / str(graphs), device="cuda", quiet=True
        )
        for graphs in (False, True)
    ]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-3)
    assert runs[0].metrics[-1]["lr"] == runs[1].metrics[-1]["lr"]


def test_metrics_cut_off_anywhere(tmp_path):
    """A kill while a line is written leaves the lines before it."""
    run = dcnet.train(recipe(epochs=2.0), tmp_path / "run", quiet=True)
    path = run.folder / "metrics.jsonl"
    whole, entries = path.read_bytes(), run.metrics
    assert len(entries) == 2
    assert "learned" in entries[0]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert run.metrics == entries[: whole[:length].count(b"\n")]


def test_penultimate_activation(tmp_path):
    options = {"magnitude": None, "steps": 1}
    features = [
        dcnet.train(recipe(penultimate_activation=on, **options), tmp_path / str(on), quiet=True).model.features(
            torch.rand(8, 1, 8, 8)
        )
        for on in (True, False)
    ]
    assert features[0].min() >= 0 > features[1].min()
    with pytest.raises(ValueError, match="resnet32 has no penultimate layer"):
        dcnet.train(recipe(penultimate_activation=True, model="resnet32"), tmp_path / "none", quiet=True)


def test_a_checkpoint_from_before_a_field_was_added(tmp_path):
    """Goes on, with the field's default."""
    whole = dcnet.train(recipe(steps=4), tmp_path / "whole", quiet=True)
    tensors, state = load_checkpoint(whole.checkpoint)
    del state["recipe"]["penultimate_activation"]
    save_checkpoint(whole.checkpoint, tensors, state)
    (whole.folder / "result.json").unlink()
    assert dcnet.train(recipe(steps=4), tmp_path / "whole", quiet=True).result["steps"] == 4


def test_pretrained_start(tmp_path):
    """Plain to decoupled, decoupled to another operator; the same structure."""
    plain = train(tmp_path / "plain", magnitude=None, epochs=1.0)
    begun = recipe(pretrained=str(plain.folder), steps=1, lr=1e-12)
    run = dcnet.train(begun, tmp_path / "decoupled", device="cpu", quiet=True)
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], tensor)
    other = dcnet.train(
        recipe(pretrained=str(run.folder), steps=1, lr=1e-12, magnitude="sphere"),
        tmp_path / "sphere",
        device="cpu",
        quiet=True,
    )
    torch.testing.assert_close(other.model.state_dict()["head.weight"], run.model.state_dict()["head.weight"])
    # once begun, a run does not need the other any more
    (run.folder / "recipe.json").rename(tmp_path / "elsewhere")
    (other.folder / "result.json").unlink()
    assert train(other.folder, resume=True).accuracy == other.result["accuracy"]
    with pytest.raises(
        ValueError,
        match=r"pretrained=.* does not fit the recipe's network; for one: size mismatch for stages.0.conv.weight",
    ):
        train(tmp_path / "other", pretrained=str(plain.folder), model="cnn9")


def test_non_finite_loss(tmp_path, monkeypatch):
    with pytest.raises(
        NonFiniteLoss, match=r"the loss is not finite at step \d+ \(epoch \d+, batch \d+, learning rate 1e\+30\): .*"
    ):
        train(tmp_path / "run", magnitude=None, lr=1e30, optimizer="sgd")
    # the layer that was first
    original = nn.MaxPool2d.forward
    calls = []

    def forward(self, x):
        calls.append(1)
        y = original(self, x)
        return y * math.inf if len(calls) > 3 * 7 else y  # three poolings a step

    monkeypatch.setattr(nn.MaxPool2d, "forward", forward)
    words = r"at step 8 \(epoch 2, batch 3, learning rate 0.001\): "
    words += r"the output of layer 'stages.3' \(MaxPool2d\) is the first"
    with pytest.raises(NonFiniteLoss, match=words):
        train(tmp_path / "other", evaluate_every=0, magnitude=None)
    # a GPU is not asked at every step: nothing must be saved before it is
    monkeypatch.setattr(nn.MaxPool2d, "forward", original)
    calls.clear()
    train(tmp_path / "warm", magnitude=None, steps=1)
    monkeypatch.setattr(nn.MaxPool2d, "forward", forward)
    calls.clear()
    looks = []
    real = trainer._stop_if_not_finite
    monkeypatch.setattr(
        trainer,
        "_stop_if_not_finite",
        lambda *a: looks.append(a[0].step) or (real(*a) if a[0].step % 9 == 0 else None),
    )
    with pytest.raises(NonFiniteLoss, match=r"at step 8 "):  # an epoch has 10 steps, and ends with a look of its own
        train(tmp_path / "late", evaluate_every=0, magnitude=None, save_every=9, batch=32)
    assert looks[-1] == 9
    assert not (tmp_path / "late" / "checkpoint.safetensors").exists()
    tensors, state = load_checkpoint(tmp_path / "other" / "checkpoint.safetensors")
    assert state["step"] == 5
    assert all(tensor.isfinite().all() for tensor in tensors.values() if tensor.is_floating_point())


def test_a_batch_with_a_pixel_that_is_not_finite(tmp_path, monkeypatch):
    """It is named, and stops the run before the weights take part in it."""
    original = dcnet.data.Resident.train_batches

    def train_batches(self, epoch, first, *arguments):
        for number, (images, labels) in enumerate(original(self, epoch, first, *arguments), first):
            if (epoch, number) == (1, 2):
                images[[4, 7], 0, 3, 3] = math.nan
            yield images, labels

    monkeypatch.setattr(dcnet.data.Resident, "train_batches", train_batches)
    words = r"at step 8 \(epoch 2, batch 3, learning rate 0.001\): "
    words += "the images of that batch are not finite: number 5 and 1 more of 64"
    with pytest.raises(NonFiniteLoss, match=words):
        train(tmp_path / "run")


def test_what_is_no_recipe(tmp_path, monkeypatch):
    monkeypatch.setitem(dcnet.training.RECIPES, "brief", {"steps": 1, "batch": 8, "magnitude": None})
    assert dcnet.train("brief", tmp_path / "run", device="cpu", quiet=True).recipe.steps == 1  # by name
    with pytest.raises(ValueError, match=r"unknown recipe 'dmeo'. Did you mean 'demo'"):
        dcnet.train("dmeo")
    with pytest.raises(
        TypeError,
        match=r"recipe must be a dcnet.Recipe, or the name of one, got {'lr': 1}; possible: 'demo', dcnet.make_recipe",
    ):
        dcnet.train({"lr": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "cifar11"}, "unknown data set 'cifar11'"),
        ({"model": "resnet23"}, "unknown model 'resnet23'"),
        ({"magnitude": "tahn"}, "unknown magnitude 'tahn'"),
        ({"batch": 400}, "batch=400 is larger than the 320 training images"),
        ({"batch": 10, "accumulate": 4}, "batch=10 cannot be divided among 1 processes × accumulate=4"),
        ({"radius": "big"}, "radius='big'; possible: learned, or a number"),
        ({"batch": 4, "accumulate": 4, "norm": "batch"}, "in parts of one image"),
        ({"image_size": 32}, "image_size=32 is for image folders"),
        ({"data": "imagefolder:nowhere"}, "image folder nowhere does not exist"),
        ({"pretrained": "nowhere"}, "nowhere is not a run folder"),
        (
            {"graphs": True, "compile": True},
            "graphs=True does not go here: the device is cpu, and CUDA graphs need a GPU; compile=True has",
        ),
        ({"augment": "crop", "pad": 8}, "pad=8 does not go with images of 8×8"),
    ],
)
def test_what_cannot_be_trained_leaves_nothing_behind(tmp_path, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_tensorboard(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(ImportError, match=r"TensorBoard is not installed: pip install 'dcnet\[tensorboard\]'"):
            dcnet.train(recipe(steps=1), tmp_path / "run", device="cpu", tensorboard=True)
        assert not (tmp_path / "run").exists()
    written = []

    class Writer:
        def __init__(self, folder):
            assert folder == str(tmp_path / "stub" / "tensorboard")

        def add_scalar(self, name, value, step):
            written.append((name, float(value), step))

        def close(self):
            written.append("closed")

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
        run = dcnet.train(recipe(steps=2, magnitude="tanh"), tmp_path / "stub", device="cpu", tensorboard=True)
    last = run.metrics[-1]
    assert ("test_accuracy", last["test_accuracy"], 2) in written
    assert ("radius/stages.0.conv", last["learned"]["radius"]["stages.0.conv"][2], 2) in written
    assert written[-1] == "closed"
    needs("tensorboard")
    dcnet.train(recipe(steps=1), tmp_path / "run", device="cpu", tensorboard=True)
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_odd_image_folders(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="image folders need Pillow")
    for part in ("train", "val"):
        for name in ("dark", "light"):
            (tmp_path / part / name / "z.jpg").mkdir(parents=True)  # a folder, whatever its name
            image.new("RGB", (20, 20)).save(tmp_path / part / name / "0.png")
            (tmp_path / part / name / "._0.png").write_text("some program's own")
        (tmp_path / part / ".ipynb_checkpoints").mkdir()
    found = ImageFolder(tmp_path, torch.device("cpu"), size=8, workers=1)
    assert found.classes == ("dark", "light")
    assert found.train_length == found.test_length == 2
    (tmp_path / "val" / "dark" / "0.png").write_bytes(b"cut off")
    with pytest.raises(OSError, match=r"^\S*0\.png cannot be read as an image: [^\n]*$"):
        list(found.test_batches(2))
    (tmp_path / "train" / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no images of the class 'empty'"):
        ImageFolder(tmp_path, torch.device("cpu"))


def test_image_folder(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image", reason="image folders need Pillow")
    for part, count in (("train", 12), ("val", 4)):
        for shade, name in enumerate(("dark", "light")):
            for i in range(count):
                path = tmp_path / "images" / part / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                image.new("RGB", (40, 36), (60 + 120 * shade + i,) * 3).save(path)
    options = {"data": f"imagefolder:{tmp_path / 'images'}", "image_size": 16, "batch": 8, "epochs": 6.0}
    run = train(tmp_path / "run", **options)
    assert run.accuracy == 100.0
    assert run.result["test_images"] == 8
    # names of the day of training, whatever the folders are called later
    assert run.classes == ("dark", "light")
    # attacks take test images of both classes, whatever the order of the files
    found = attack_run(run, "fgsm", limit=3, check_images=2, check_queries=2, device="cpu")
    assert (found["images"], found["clean"], found["check-up"]["images"]) == (3, 100.0, 2)
    assert attack_run(run, "fgsm", device="cpu")["images"] == 8
    monkeypatch.setattr("dcnet.training.attack._FITS", 4 * 3 * 16 * 16 * 8 - 1)
    with pytest.raises(ValueError, match=r"images has 8 test images, 0.0 GiB at 16×16, .*: limit=1000 \(--limit"):
        attack_run(run, "fgsm", device="cpu")
    assert attack_run(run, "fgsm", limit=8, device="cpu")["images"] == 8
    save_weights(run, tmp_path / "weights.safetensors")
    for part in ("train", "val"):
        (tmp_path / "images" / part / "dark").rename(tmp_path / "images" / part / "shady")
    for trained in (run, open_trained(tmp_path / "weights.safetensors")):
        shot = tmp_path / "images" / "val" / "shady" / "0.png"
        assert predict_run(trained, [shot], device="cpu")[0].top[0][0] == "dark"
        with pytest.raises(ValueError, match=r"trained on other classes than .*: 'dark' there, 'light' here"):
            evaluate_run(trained, device="cpu")
    (run.folder / "result.json").unlink()
    with pytest.raises(
        ValueError, match=r"is not what it was: 24 training images of dark, light then, 24 .* of light, shady now"
    ):
        train(tmp_path / "run", **options)
    for part in ("train", "val"):
        (tmp_path / "images" / part / "shady").rename(tmp_path / "images" / part / "dark")
    assert evaluate_run(run, device="cpu").accuracy == 100.0
    image.new("RGB", (40, 36)).save(tmp_path / "images" / "train" / "dark" / "more.png")
    with pytest.raises(ValueError, match="24 training images of dark, light then, 25"):
        train(tmp_path / "run", **options)


def test_metrics_cut_off_by_a_kill(tmp_path):
    run = train(tmp_path / "run", epochs=1.0)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(run.metrics[0])[:20])
    assert len(run.metrics) == 1


def test_global_settings_are_restored(tmp_path):
    torch.manual_seed(5)
    before = (
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.rand(1).item(),
    )
    torch.manual_seed(5)
    train(tmp_path / "run", epochs=1.0, deterministic=True, precision="tf32")
    after = (
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.rand(1).item(),
    )
    assert before == after


def test_example_runs():
    example = Path(__file__).parent.parent / "examples" / "plain_loop.py"
    assert len(example.read_text().splitlines()) <= 40
    output = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True).stdout
    assert float(output.split()[-1].rstrip("%")) > 80.0


class Noted(dcnet.Callback):
    """Keeps what the user is told."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def on(device, world=1):
    return Ranks(0, world, torch.device(device))


@pytest.mark.parametrize(
    ("options", "ranks", "expected", "said"),
    [
        ({}, on("cpu"), False, ""),
        ({}, on("cuda"), True, "from step 12 on, steps are repeated as a CUDA graph"),
        ({"graphs": True}, on("cuda"), True, ""),
        ({"graphs": False}, on("cuda"), False, ""),
        ({"compile": True}, on("cuda"), False, "not repeated as a CUDA graph: compile=True has ways of its own"),
        ({}, on("cuda", 2), False, "not repeated as a CUDA graph: 2 processes train together"),
        ({"precision": "fp16"}, on("cuda"), False, "precision='fp16' decides on the host"),
    ],
)
def test_graphs_where_they_can_be(options, ranks, expected, said):
    found, text = uses_graphs(recipe(**options), ranks)
    assert found is expected
    assert said in text
    assert bool(text) == bool(said)


def test_a_step_that_cannot_be_recorded(tmp_path, monkeypatch):
    """Is taken without a graph, and the user is told why; projections are still counted."""

    def fails(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    noted, options = Noted(), {"epochs": 4.0, "projection": 3, "norm": "batch"}
    with monkeypatch.context() as patch:
        patch.setattr("dcnet.training.state.uses_graphs", lambda recipe, ranks: (True, "as a graph"))
        patch.setattr("dcnet.training.state.make_optimizer", lambda *rest: make_optimizer(*rest[:3]))
        patch.setattr("dcnet.training.state.Repeated", fails)
        run = dcnet.train(recipe(**options), tmp_path / "run", device="cpu", quiet=True, callbacks=[noted])
    assert noted.notes == [
        "as a graph",
        "steps are not repeated as a CUDA graph: operation not permitted when stream is capturing",
    ]
    same = dcnet.train(recipe(**options), tmp_path / "same", device="cpu", quiet=True)
    assert losses(run) == losses(same)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_network_that_waits_for_the_device(tmp_path, monkeypatch):
    """Cannot be recorded: training goes on without a graph."""
    build = dcnet.models.create_model

    def waits(*rest, **options):
        model = build(*rest, **options)
        model.register_forward_hook(lambda module, inputs, result: result * float(result.sum().item() == 7.0) + result)
        return model

    monkeypatch.setattr("dcnet.training.run.create_model", waits)
    noted = Noted()
    run = dcnet.train(recipe(epochs=3.0), tmp_path / "run", device="cuda", quiet=True, callbacks=[noted])
    assert [text for text in noted.notes if "are not repeated as a CUDA graph" in text]
    assert run.result
