"""Run folders made of files of weights: what other commands read, and nothing to train on with."""

import pytest
import torch
from test_cli import call

import dcnet
from dcnet.training import Run, restore_run, save_weights
from dcnet.training.weights import trained_by


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with moving averages of its weights, and the file of these."""
    folder = tmp_path_factory.mktemp("restore")
    recipe = dcnet.make_recipe("demo", steps=3, recalibrate=1, ema=0.5, magnitude="seg")
    run = dcnet.train(recipe, folder / "run", device="cpu", quiet=True)
    save_weights(run, folder / "kept.safetensors")
    return run


def test_it_computes_what_was_trained(trained, tmp_path):
    run = restore_run(trained.folder.parent / "kept.safetensors", tmp_path / "run")
    assert run.recipe == trained.recipe
    assert run.result == trained.result
    assert run.classes == trained.classes
    assert run.metrics == []
    there, here = trained.model.state_dict(), run.model.state_dict()
    assert set(there) == set(here)
    assert all(torch.equal(there[name], here[name]) for name in there)
    again = restore_run(trained.folder.parent / "kept.safetensors", tmp_path / "run")
    assert again.folder == run.folder


def test_a_rounded_file_is_of_the_run_it_was_made_from(trained, tmp_path):
    """Files may have their weights in bfloat16, the run has them in float32."""
    rounded = tmp_path / "rounded.safetensors"
    save_weights(trained, rounded, bf16=True)
    run = restore_run(trained.folder.parent / "kept.safetensors", tmp_path / "run")
    assert restore_run(rounded, run.folder).folder == run.folder
    restored = restore_run(rounded, tmp_path / "other")
    assert restore_run(rounded, restored.folder).folder == restored.folder
    with pytest.raises(ValueError, match="has other weights of the same recipe"):
        restore_run(trained.folder.parent / "kept.safetensors", restored.folder)


def test_other_weights_stay(trained, tmp_path):
    """A run of the same recipe is neither overwritten nor taken for that of the file."""
    other = tmp_path / "other.safetensors"
    model = trained.model
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    run = restore_run(trained.folder.parent / "kept.safetensors", tmp_path / "run")
    save_weights(trained_by(run)._replace(model=model), other)
    with pytest.raises(ValueError, match=r"has other weights of the same recipe than .*other\.safetensors"):
        restore_run(other, tmp_path / "run")
    another = dcnet.train(dcnet.make_recipe("demo", steps=1, recalibrate=1), tmp_path / "another", quiet=True)
    with pytest.raises(ValueError, match="holds another recipe's run"):
        restore_run(other, another.folder)


def test_it_cannot_go_on(trained, tmp_path):
    run = restore_run(trained.folder.parent / "kept.safetensors", tmp_path / "run")
    found = call("train", "--resume", str(run.folder), "--steps", "5", "--device", "cpu")
    assert found.exit_code == 1
    assert "was made of a file of weights, and has no optimizer to go on with" in found.output
    assert Run(run.folder).result == trained.result


def test_attacks_on_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--attacks", "fgsm", "--limit", "20", "--no-check", "--device", "cpu"]
    for count in (1, 2):
        found = call("attack", "hub:cnn9-narrow-seg-digits", *arguments, "--separate")
        assert found.exit_code == 0, found.output
        assert "its run folder is runs/cnn9-narrow-seg-digits" in found.output
        assert len(Run("runs/cnn9-narrow-seg-digits").attacks) == count
    listed = call("attack", "hub:cnn9-narrow-seg-digits", "--records")
    assert "2: " in listed.output
    transferred = call("attack", "runs/cnn9-narrow-seg-digits", "--from", "hub:cnn9-narrow-seg-digits", *arguments)
    assert transferred.exit_code == 0, transferred.output
    missing = call("attack", "nothing.safetensors", *arguments)
    assert missing.exit_code == 1
    assert "there is no file nothing.safetensors" in missing.output
