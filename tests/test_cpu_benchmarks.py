"""The scripts under benchmarks/ that compare layers on a CPU: what they count, and what they run.

The README says what was recorded.
"""

import csv
import importlib
import statistics
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import geometries_cpu
    import in_turns
    import peers_cpu

    yield in_turns, peers_cpu, geometries_cpu
    for module in (in_turns, peers_cpu, geometries_cpu):
        del sys.modules[module.__name__]


def test_memory_is_counted(scripts):
    class Keeps(nn.Module):
        """Keeps three maps for its backward pass, of which one is its output; a fourth is there for a moment."""

        def forward(self, x):
            return (x + 1.0).exp().exp() + 0.0 * (x + 2.0).detach().sum()

    held, peak = scripts[0].held_and_peak(Keeps(), (4, 256, 256))
    assert held == pytest.approx(3.0, abs=0.01)  # two results of exp, and the sum; each 1 MiB
    assert 4.0 <= peak <= 6.1
    held, _ = scripts[0].held_and_peak(nn.Conv2d(4, 8, 3, padding=1, bias=False), (1, 4, 256, 256))
    assert held == pytest.approx(2.0, abs=0.01)  # its output: the input was there


def test_steps_take_turns(scripts):
    order, ticks = [], iter(range(1000))
    steps = {name: (lambda name=name: order.append(name)) for name in ("plain", "ours")}
    times = scripts[0].seconds_in_turns(steps, 3, lambda: float(next(ticks)))
    assert order[4:] == ["plain", "ours"] * 3  # the first two of each are not timed
    assert times == {"plain": [1.0] * 3, "ours": [1.0] * 3}
    assert scripts[0].ratios({"plain": [1.0, 2.0, 4.0], "ours": [2.0, 2.0, 12.0]}, "plain")["ours"] == 2.0


def test_every_geometry_is_one(scripts):
    for geometry in scripts[2].GEOMETRIES:
        layer = nn.Conv2d(geometry.inputs, geometry.outputs, geometry.kernel, **geometry.options, device="meta")
        size = layer(torch.empty(1, geometry.inputs, geometry.size, geometry.size, device="meta")).shape[2]
        assert size == -(-geometry.size // geometry.stride)
    assert "256→256 3×3 at 32², dilation 36, groups 256" in map(str, scripts[2].GEOMETRIES)


def test_the_transcribed_formula(scripts):
    layer = scripts[1].SharpenedCosine(3, 4, 3, 1)
    x = torch.randn(2, 3, 6, 5)
    patches = nn.functional.unfold(x, 3, padding=1)  # (N, 27, positions)
    weight = layer.weight.flatten(1)
    dot = torch.einsum("ki,nip->nkp", weight, patches)
    norms = (weight.norm(dim=1)[:, None] + 0.1) * (patches.norm(dim=1, keepdim=True) + 0.1)
    expected = dot.sign() * (dot.abs() / norms) ** 2
    torch.testing.assert_close(layer(x).flatten(2), expected, rtol=1e-3, atol=1e-4)


def test_a_record_is_written(scripts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        ["geometries_cpu.py", "--only", "resnext", "--batch", "1", "--repeats", "1", "--out", str(tmp_path / "x.csv")],
    )
    scripts[2].main()
    with (tmp_path / "x.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["layer"] == "128→128 3×3 at 56², groups 32"
    assert float(row["time"]) > 0.0
    assert float(row["held memory"]) >= 1.0
    assert "wall clock" in row["how"]
    assert "ResNeXt-50" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["geometries_cpu.py", "--only", "alexnet"])
    with pytest.raises(SystemExit, match=r"no such network; there are DeepLabV3\+"):
        scripts[2].main()


def test_the_readme_says_what_was_recorded():
    with (RESULTS / "peers_cpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    def median(layer, column):
        return f"{statistics.median(float(row[column]) for row in rows if row['layer'].startswith(layer)):.2f}"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for label, column, before, between in (
        ("one 3×3 layer on a CPU: time", "time", " as B-cos", " tanh + cosine"),
        ("… peak memory", "peak memory", "", ""),
        ("… memory held for backward, with the output", "held memory", "", ""),
    ):
        ours = f"{median('dcnet, linear + power', column)}{before}, {median('dcnet, tanh', column)}{between}"
        others = f"{median('bcos', column)} | {median('sharpened', column)}"
        assert f"| {label} | {ours} | – | {others} |" in text


def test_the_onnx_benchmark_says_what_it_needs(monkeypatch, capsys):
    """Whatever is installed: the packages are imported when they are needed."""
    for package in ("timm", "onnx", "onnxscript", "onnxruntime"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    try:
        onnx_cpu = importlib.import_module("onnx_cpu")
        missing = "error: timm is not installed; needed are: pip install timm onnx onnxscript onnxruntime"
        for arguments, code in ((["--help"], 0), ([], missing)):
            monkeypatch.setattr(sys, "argv", ["onnx_cpu.py", *arguments])
            with pytest.raises(SystemExit) as end:
                onnx_cpu.main()
            assert end.value.code == code
        assert "--cpu-time" in capsys.readouterr().out
    finally:
        for module in ("onnx_cpu", "in_turns"):
            sys.modules.pop(module, None)


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import demo_cpu

    monkeypatch.setattr(demo_cpu.time, "sleep", lambda seconds: None)
    yield demo_cpu
    del sys.modules["demo_cpu"], sys.modules["in_turns"]


def test_a_training_of_the_demo(demo, few_digits):
    seconds, others = demo.train("sphere + cosine", 1)
    assert seconds > 0.0
    assert others >= -0.1  # the clocks tick a hundred times a second


def test_disturbed_trainings_of_the_demo_are_repeated(demo, monkeypatch, capsys, tmp_path):
    path, found = tmp_path / "times.csv", iter([(0.5, 0.0)] * 5 + [(9.0, 0.9)] + [(2.0, 0.0)] + [(3.0, 0.0)] * 4)
    monkeypatch.setattr(demo, "train", lambda name, steps: next(found))
    monkeypatch.setattr(sys, "argv", ["demo_cpu.py", "--turns", "1", "--csv", str(path)])
    demo.main()
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["network"] for row in rows] == list(demo.NETWORKS)
    assert [(float(row["seconds"]), float(row["ratio"])) for row in rows] == [(2.0, 1.0)] + [(3.0, 1.5)] * 4
    assert "tanh + cosine" in capsys.readouterr().out
    monkeypatch.setattr(demo, "train", lambda name, steps: (1.0, 1.0))
    with pytest.raises(SystemExit, match="quiet machine"):
        demo.main()


def test_trainings_of_the_demo_beside_busy_processes(demo, monkeypatch, tmp_path):
    """They are not repeated, and the processes end with them."""
    path, started = tmp_path / "times.csv", []
    popen = demo.subprocess.Popen
    monkeypatch.setattr(demo.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    found = iter([1.0] * 5 + [2.0, 3.0, 3.0, 3.0, 3.0] + [4.0, 4.0, 4.0, 4.0, 4.0])
    monkeypatch.setattr(demo, "train", lambda name, steps: (next(found), 1.0))
    arguments = ["--turns", "2", "--busy", "2", "--steps", "7", "--csv", str(path)]
    monkeypatch.setattr(sys, "argv", ["demo_cpu.py", *arguments])
    demo.main()
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["ratio"], row["ratio of sums"]) for row in rows] == [("1.0", "1.0")] + [("1.25", "1.167")] * 4
    assert [(row["busy"], row["steps"]) for row in rows] == [("2", "7")] * 5
    assert [process.poll() is not None for process in started[:2]] == [True, True]
