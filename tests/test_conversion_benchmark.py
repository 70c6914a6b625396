"""benchmarks/conversion.py, in small: every figure is measured once, and the record is what it says."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "conversion.py"


def script():
    spec = importlib.util.spec_from_file_location("conversion_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_in_small(tmp_path, monkeypatch, capsys):
    small = ["--data", "digits", "--recipe", "demo", "--networks", "cnn9_narrow", "--epochs", "1.5", "--device", "cpu"]
    small += ["--finetune-epochs", "0.1", "--finetune-lr", "1e-4", "--out", str(tmp_path)]
    module = script()
    record = module.main([*small, "--operators", "seg+cosine"])
    figures = record["networks"]["cnn9_narrow"]
    assert set(figures) == {
        *("plain", "plain, 0.1 epochs on"),
        *(f"seg+cosine, {how}" for how in ("converted", "converted, recalibrated", "calibrated")),
        *(f"seg+cosine, {how}" for how in ("calibrated, recalibrated", "calibrated, 0.1 epochs on", "from scratch")),
    }
    assert figures["seg+cosine, converted"] < figures["plain"] - 20
    assert figures["seg+cosine, calibrated"] > figures["plain"] - 10
    assert json.loads((tmp_path / "conversion.json").read_text()) == record
    # what is there is not measured again
    monkeypatch.setattr(module, "train", None)
    monkeypatch.setattr(module, "evaluate", None)
    assert module.main([*small, "--operators", "seg+cosine"])["networks"] == record["networks"]
    with pytest.raises(SystemExit, match="was measured with other settings"):
        module.main([*small, "--seed", "1"])
