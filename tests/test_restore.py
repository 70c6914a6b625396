"""Run folders made of files of weights: what other commands read, and nothing to train on with."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_cli import call

import dcnet
from dcnet.training import InUse, Run, open_run, restore_run, save_weights
from dcnet.training.weights import trained_by
from dcnet.util.lock import locked


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
    with pytest.raises(
        ValueError, match=r"has a run of another recipe than .*magnitude='tanh' there, 'seg' here.*rename"
    ):
        restore_run(other, another.folder)


def test_records_of_another_training_stay(trained, tmp_path):
    """What attacks left of another network of the same recipe says nothing about this one."""
    folder = tmp_path / "run"
    run = open_run(folder, trained.recipe)
    run.finish({**trained.result, "seconds": 1e6})
    run.add_attack({"attacks": [], "transfer": False, "labels": "true"})
    with pytest.raises(ValueError, match=r"has records of another training .* in 1000000\.0 s there, .* here"):
        restore_run(trained.folder.parent / "kept.safetensors", folder)
    assert not run.checkpoint.exists()
    (folder / "result.json").unlink()
    with pytest.raises(ValueError, match=r"has records of another training .*: no result there"):
        restore_run(trained.folder.parent / "kept.safetensors", folder)
    run.finish(trained.result)
    restored = restore_run(trained.folder.parent / "kept.safetensors", folder)
    assert restored.checkpoint.is_file()
    assert len(restored.attacks) == 1


def test_an_unfinished_run(tmp_path):
    """Nobody is told to go on with it, since that is not possible."""
    run = dcnet.train(dcnet.make_recipe("demo", steps=4, recalibrate=1), tmp_path / "run", device="cpu", quiet=True)
    (run.folder / "result.json").unlink()
    save_weights(run, tmp_path / "kept.safetensors")
    restored = restore_run(tmp_path / "kept.safetensors", tmp_path / "restored")
    assert restored.restored
    assert not run.restored
    found = call("evaluate", str(restored.folder), "--device", "cpu")
    assert found.exit_code == 0, found.output
    assert "these are its weights after 4 steps, of 4 steps." in " ".join(found.output.split())
    assert "Go on with" not in found.output
    with pytest.raises(ValueError, match="has no metrics: it was made from a file of weights"):
        dcnet.figures.metrics_of(restored)


def test_a_run_that_trains_is_left_alone(trained, tmp_path):
    """Its process has the lock, before its first checkpoint too."""
    folder = tmp_path / "run"
    open_run(folder, trained.recipe)
    with locked(folder), pytest.raises(InUse, match="is in use by process"):
        restore_run(trained.folder.parent / "kept.safetensors", folder)
    assert sorted(path.name for path in folder.iterdir()) == ["recipe.json"]
    assert restore_run(trained.folder.parent / "kept.safetensors", folder).result == trained.result


def test_it_cannot_go_on(trained, tmp_path):
    run = restore_run(trained.folder.parent / "kept.safetensors", tmp_path / "run")
    found = call("train", "--resume", str(run.folder), "--steps", "5", "--device", "cpu")
    assert found.exit_code == 1
    assert "was made from a file of weights, and has no optimizer to go on with" in found.output
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
    assert "1 record removed" in call("attack", "hub:cnn9-narrow-seg-digits", "--forget", "1").output
    assert "has no records of attacks" in call("attack", "hub:cnn9-narrow-seg-mnist", "--records").output
    assert not Path("runs/cnn9-narrow-seg-mnist").exists()
    transferred = call("attack", "runs/cnn9-narrow-seg-digits", "--from", "hub:cnn9-narrow-seg-digits", *arguments)
    assert transferred.exit_code == 0, transferred.output
    with locked(Path("runs/cnn9-narrow-seg-digits")):
        (Path("runs/cnn9-narrow-seg-digits") / "result.json").unlink()
        busy = call("attack", "hub:cnn9-narrow-seg-digits", *arguments)
    assert busy.exit_code == 1
    assert "is in use by process" in busy.output
    wrong = call("attack", "hub:cnn9-narrow-seg-mnist", "--eps", "much")
    assert wrong.exit_code == 1
    assert not Path("runs/cnn9-narrow-seg-mnist").exists()
    missing = call("attack", "nothing.safetensors", *arguments)
    assert missing.exit_code == 1
    assert "there is no file nothing.safetensors" in missing.output


def test_records_of_other_weights_are_not_those_of_a_file(trained, tmp_path, monkeypatch):
    """A file of the same name and recipe, of another training."""
    monkeypatch.chdir(tmp_path)
    other = trained_by(trained)
    with torch.no_grad():
        next(other.model.parameters()).add_(1.0)
    save_weights(trained, tmp_path / "a" / "net.safetensors")
    save_weights(other, tmp_path / "b" / "net.safetensors")
    arguments = ["--attacks", "fgsm", "--limit", "20", "--no-check", "--device", "cpu"]
    assert call("attack", "a/net.safetensors", *arguments).exit_code == 0
    for flags in (["--records"], ["--forget", "all"]):
        refused = call("attack", "b/net.safetensors", *flags)
        assert refused.exit_code == 1
        assert "runs/net has other weights of the same recipe than b/net.safetensors" in " ".join(
            refused.output.split()
        )
    assert len(Run("runs/net").attacks) == 1


OWN = '''
from dcnet import magnitude

@magnitude
def tripled(n, rho, alpha=1.0):
    """3α·‖x‖/ρ"""
    return 3.0 * alpha * n / rho, 3.0 * alpha / rho, -3.0 * alpha * n / (rho * rho)
'''


def test_records_of_a_file_with_formulas_of_ones_own(tmp_path):
    """In processes of their own, which do not know the formula yet."""

    def dcnet_(*arguments):
        command = [sys.executable, "-m", "dcnet", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)

    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    flags = ["--magnitude", "tripled", "--formulas", "own.py", "--steps", "1", "--device", "cpu", "--run", "run"]
    assert dcnet_("train", *flags).returncode == 0
    exported = dcnet_("export", "run", "--to", "safetensors", "-o", "own.safetensors", "--formulas", "own.py")
    assert exported.returncode == 0, exported.stderr
    listed = dcnet_("attack", "own.safetensors", "--records")
    assert listed.returncode == 0, listed.stderr
    assert "own.safetensors has no records of attacks" in listed.stdout
