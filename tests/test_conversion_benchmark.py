"""benchmarks/conversion.py, in small: every figure is measured once, and the record is what it says."""

import importlib.util
import json
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "conversion.py"


def script():
    spec = importlib.util.spec_from_file_location("conversion_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(folder):
    options = ["--data", "digits", "--recipe", "demo", "--networks", "cnn9_narrow", "--epochs", "1.5"]
    options += ["--device", "cpu", "--finetune-epochs", "0.1", "--finetune-lr", "1e-4", "--out", str(folder)]
    return [*options, "--operators", "seg+cosine"]


def lines(folder):
    return [json.loads(line) for line in (folder / "conversion.jsonl").read_text().splitlines()]


def test_in_small(tmp_path, monkeypatch, capsys):
    module = script()
    # killed while it trained: the first budget is over after some steps, which are not lost
    seen = []
    step = module._Deadline.step
    monkeypatch.setattr(module._Deadline, "step", lambda self, *a: (seen.append(a[0]), step(self, *a)))
    clock = time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: clock() + (1e6 if len(seen) >= 5 else 0.0))
    module.main([*small(tmp_path), "--budget", "1000"])
    assert "of --budget are over" in capsys.readouterr().out
    assert seen == [1, 2, 3, 4, 5]
    assert len(lines(tmp_path)) == 1
    monkeypatch.setattr(module.time, "monotonic", clock)

    figures = module.main(small(tmp_path)).figures["cnn9_narrow"]
    assert seen[5] == 6
    assert list(figures) == [
        *("plain", "plain, 0.1 epochs on"),
        *(f"seg+cosine, {how}" for how in ("converted", "converted, recalibrated", "calibrated")),
        *(f"seg+cosine, {how}" for how in ("calibrated, recalibrated", "calibrated, 0.1 epochs on", "from scratch")),
    ]
    assert figures["seg+cosine, converted"] < figures["plain"] - 20
    assert figures["seg+cosine, calibrated"] > figures["plain"] - 10
    settings, *found = lines(tmp_path)
    assert settings["settings"]["data"] == "digits"
    assert {line["figure"]: line["accuracy"] for line in found} == figures
    assert all(line["seconds"] >= 0 and line["where"]["torch"] for line in found)
    # what is there is not measured again; a line that was cut off is
    monkeypatch.setattr(module, "evaluate", None)
    record = tmp_path / "conversion.jsonl"
    whole = record.read_text()
    record.write_text(whole[:-20])
    assert module.main(small(tmp_path)).figures == {"cnn9_narrow": figures}
    assert [line["figure"] for line in lines(tmp_path)[1:]] == list(figures)
    capsys.readouterr()
    module.main([*small(tmp_path), "--table"])
    assert f"| seg+cosine | | | {figures['seg+cosine, converted']:.2f} |" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match="was measured with other settings"):
        module.main([*small(tmp_path), "--seed", "1"])


@pytest.mark.slow
def test_a_figure_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    module = script()

    def train(recipe, folder, **options):
        if recipe.magnitude is None and recipe.pretrained is None:
            return finished(recipe, folder, **options)
        raise module.NonFiniteLoss("it is not", 1, 0.1) if recipe.pretrained else RuntimeError("no kernel for this")

    finished = module.train
    monkeypatch.setattr(module, "train", train)
    with pytest.raises(
        SystemExit, match="1 figures failed: cnn9_narrow, seg\\+cosine, from scratch: no kernel for this"
    ):
        module.main(small(tmp_path))
    accuracies = {line["figure"]: line["accuracy"] for line in lines(tmp_path)[1:]}
    assert accuracies["plain, 0.1 epochs on"] is None
    assert accuracies["seg+cosine, calibrated"] > 50
    assert "diverged" in capsys.readouterr().out
    assert "seg+cosine, from scratch" not in accuracies
