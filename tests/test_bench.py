"""The benchmark: what it measures, what it writes, and the table made of it."""

import csv
import importlib
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dcnet
from dcnet.bench import Case, cases, records, render, render_into, run
from dcnet.bench import measure as measuring
from dcnet.bench.cases import Shape, shapes_of
from dcnet.bench.records import COLUMNS, read
from dcnet.bench.straightforward import straightforward_
from dcnet.bench.table import BEGIN, END
from dcnet.cli import app

CPU = torch.device("cpu")
LAYER = Case("layer", "3→4, 3×3/1, 5×5", "forward + backward", 2, "float32", "contiguous", "tanh + cosine", "ours")
NETWORK = Case("network", "cnn9_narrow", "training step", 1, "float32", "channels_last", "", "plain")


def test_straightforward_computes_the_same():
    torch.manual_seed(0)
    ours = dcnet.create_model("resnet32", input_size=8)
    theirs = dcnet.create_model("resnet32", input_size=8)
    theirs.load_state_dict(ours.state_dict())
    straightforward_(theirs)
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(theirs(x), ours(x), rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="step by step"):
        straightforward_(dcnet.create_model("cnn9_narrow", weighting="linear"))


def test_shapes_are_those_of_the_network():
    shapes = shapes_of("cnn9_narrow")
    assert shapes[0] == Shape(32, 32, 3, 1, 32)
    assert Shape(64, 128, 3, 1, 8) in shapes
    assert all(Shape.parse(str(shape)) == shape for shape in shapes)


def test_every_case_has_its_plain_twin(catalogue):
    @dcnet.magnitude
    def users(n):
        """‖x‖/2"""
        return 0.5 * n, 0.5

    for cuda in (True, False):
        for what in ("all", "networks", "layers"):
            wanted = list(cases(cuda, what))
            assert {case.plain for case in wanted} <= set(wanted)
            assert len({case.title for case in wanted}) == len(set(wanted)), "two cases have one line"
    quick = [
        case.operator
        for case in cases(True, "networks", quick=True)
        if case.provider == "ours" and case.mode == "training step"
    ]
    assert {operator for operator in quick if operator.endswith("+ cosine")} == {
        f"{name} + cosine" for name in dcnet.magnitudes()
    }


@pytest.mark.parametrize(
    "case",
    [LAYER, LAYER.plain, Case(**{**vars(LAYER), "mode": "forward", "provider": "straightforward"}), NETWORK],
    ids=lambda c: c.provider,
)
def test_a_measurement(case):
    (measures,) = measuring.measure([case], CPU, 3)
    low, middle, high = measures["milliseconds"]
    assert 0 < low <= middle <= high
    assert "peak MiB" not in measures  # no such thing on a CPU


def test_records_are_kept_and_not_made_twice(tmp_path, monkeypatch):
    path = tmp_path / "new" / "bench.csv"
    lines = []
    rows = run([LAYER.plain, LAYER], path, CPU, 3, lines.append, "abc")
    with path.open(newline="") as file:
        assert list(csv.DictReader(file)) == rows == read(path)
    assert set(rows[0]) == set(COLUMNS)
    assert {row["commit"] for row in rows} == {"abc"}
    again = run([LAYER], path, CPU, 3, lines.append, "abc")
    assert again == rows
    assert lines[-1].endswith("known")

    def fails(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(records, "measure", fails)
    failed = run([LAYER], path, CPU, 3, lines.append, "def")[-1]
    assert failed["note"] == "out of memory"
    assert math.isnan(float(failed["p50"]))


def record(case, metric, value):
    rest = {
        "p20": "0",
        "p50": str(value),
        "p80": "0",
        "repeats": "3",
        "device": "GPU",
        "torch": "2",
        "triton": "",
        "python": "3",
        "commit": "a",
    }
    return {**{key: str(item) for key, item in vars(case).items()}, "metric": metric, **rest, "note": ""}


def test_the_table_has_ratios(tmp_path):
    rows = [
        record(LAYER.plain, "milliseconds", 2.0),
        record(LAYER, "milliseconds", 3.0),
        record(LAYER.plain, "peak MiB", 10.0),
    ]
    rows.append(record(LAYER, "peak MiB", 11.0))
    table = render(rows)
    assert "| tanh + cosine | ours | 3 | 1.50 |  | 1.10 |" in table
    file = tmp_path / "README.md"
    file.write_text("before\n")
    with pytest.raises(ValueError, match="once each"):
        render_into(file, table)
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    render_into(file, table)
    assert file.read_text() == f"before\n{BEGIN}\n{table}\n{END}\nafter\n"


def test_command_line(tmp_path):
    result = CliRunner().invoke(app, ["bench", "--what", "network"])
    assert result.exit_code == 2
    assert "networks" in result.output
    result = CliRunner().invoke(app, ["bench", "--render", "--out", str(tmp_path / "none.csv")])
    assert result.exit_code == 2
    assert "does not exist" in " ".join(result.output.replace("│", " ").split())
    path = tmp_path / "bench.csv"
    run([LAYER.plain, LAYER], path, CPU, 3, lambda _: None, "abc")
    result = CliRunner().invoke(app, ["bench", "--render", "--out", str(path)])
    assert result.exit_code == 0
    assert "| ours |" in result.output
    result = CliRunner().invoke(app, ["bench", "--render", "--out", str(path), "--what", "networks"])
    assert "| ours |" not in result.output
    result = CliRunner().invoke(app, ["bench", "--cpu", "--match", "cnn99"])
    assert result.exit_code == 2
    assert "nothing to measure has 'cnn99' in its line; possible: cnn9_narrow; 64→64, 3×3/1, 32×32;" in " ".join(
        result.output.replace("│", " ").split()
    )
    one = "128→128, 3×3/1, 8×8, forward, batch 16, float32, contiguous, ours tanh + cosine"
    measured = CliRunner().invoke(app, ["bench", "--cpu", "--match", one, "--out", str(tmp_path / "one.csv")])
    assert measured.exit_code == 0, measured.output
    assert {row["operator"] for row in read(tmp_path / "one.csv")} == {"", "tanh + cosine"}
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="expected what, name"):
        read(path)


def test_errors_have_one_line(tmp_path, monkeypatch):
    """And are found before anything is measured; records that are there stay as they are."""
    monkeypatch.setattr(records, "measure", lambda *_: pytest.fail("measured"))
    other, bytes_, file, good = (tmp_path / name for name in ("mine.py", "bytes", "file", "good.csv"))
    other.write_text("print('a, b')\nx, y, z = 1, 2, 3\n")
    bytes_.write_bytes(b"\xff\xfe")
    file.touch()
    header = ",".join(COLUMNS)
    good.write_text(f"{header}\n")
    short, wrong = tmp_path / "short.csv", tmp_path / "wrong.csv"
    short.write_text(f"{header}\na,b\n")
    wrong.write_text(f"{header}\n{','.join(COLUMNS)}\n")
    before = {path: path.read_bytes() for path in (other, bytes_, short, wrong)}
    for arguments, message in [
        (["--cpu", "-o", tmp_path], f"{tmp_path} is a folder; possible: a file"),
        (["--cpu", "-o", file / "bench.csv"], f"nothing can be written into {file / 'bench.csv'}: Not a directory"),
        (["--cpu", "-o", other], f"{other} has the columns print('a,  b'); expected what, name"),
        (["--render", "-o", other], f"{other} has the columns"),
        (["--render", "-o", tmp_path], f"{tmp_path}: Is a directory"),
        (["--render", "-o", bytes_], f"{bytes_} is not a CSV file of records"),
        (["--render", "-o", short], f"{short}, line 2, is not what `dcnet bench` writes"),
        (["--render", "-o", wrong], f"{wrong}, line 2, is not what `dcnet bench` writes"),
        (["--render", "-o", good, "--into", other], f"{other} must have the lines {BEGIN} and {END} once each"),
        (["--cpu", "-o", good, "--into", tmp_path / "none.md"], f"{tmp_path / 'none.md'} does not exist; possible:"),
        (["--cpu", "--what", "models", "--operator", "foo"], "operator 'foo' must be MAGNITUDE + ANGULAR"),
        (["--cpu", "--what", "models", "--model", "timm:resnet18@a"], "the size after @ must be a whole number"),
    ]:
        result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
        assert result.exit_code == 1, (arguments, result.output)
        assert result.stderr.startswith("error: ")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in before} == before


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    flags = ["--what", "models", "--cpu", "-o", str(tmp_path / "new" / "models.csv")]
    result = CliRunner().invoke(app, ["bench", *flags])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: timm's networks need timm: pip install timm")


def test_an_empty_file_gets_a_header(tmp_path):
    path = tmp_path / "bench.csv"
    path.touch()
    rows = run([LAYER], path, CPU, 3, lambda _: None, "abc")
    assert read(path) == rows


def test_the_page_has_the_records_table():
    """Made by `dcnet bench --out benchmarks/results/h200.csv --render --into benchmarks/h200.md`."""
    folder = Path(__file__).parent.parent / "benchmarks"
    table = render(read(folder / "results" / "h200.csv"))
    assert table in (folder / "h200.md").read_text()
    step = "| resnet32, training step | 512, bfloat16, channels_last | tanh + cosine | straightforward |"
    *_, time, _, memory, _ = next(line for line in table.splitlines() if line.startswith(step)).split("|")
    said = f"take {float(time):.1f} times the plain network's time and {float(memory):.1f} times its memory"
    assert said in (folder.parent / "README.md").read_text()


def small_network(num_classes=10):
    """What a user's own module has: convolutions, BatchNorm, an activation."""
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, num_classes))


def test_models_of_others(tmp_path, monkeypatch):
    """A user's own model, plain, converted and fused, and converted only."""
    dcnet.trust_model(f"{__name__}:small_network")
    path = tmp_path / "models.csv"
    flags = ["--what", "models", "--model", f"{__name__}:small_network@16", "--batch", "2", "--repeats", "3", "--cpu"]
    result = CliRunner().invoke(app, ["bench", *flags, "--out", str(path)])
    assert result.exit_code == 0, result.output
    assert {row["provider"] for row in read(path)} == {"plain", "ours", "ours unfused"}
    assert {row["name"] for row in read(path)} == {f"{__name__}:small_network@16"}
    wrong = CliRunner().invoke(app, ["bench", "--model", "timm:resnet18"])
    assert wrong.exit_code == 2
    assert "--what models" in " ".join(wrong.output.split())


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x if x.sum().item() < 1e9 else -x))).flatten(1)


def test_a_model_that_cannot_be_traced_is_fused(monkeypatch):
    """An image is at hand to run it on."""
    name, made = f"{__name__}:Untraceable", []
    dcnet.trust_model(name)
    monkeypatch.setattr("dcnet.bench.measure._provided", lambda network, *_: made.append(network) or network)
    for case in dcnet.bench.model_cases([f"{name}@16"], 2, "tanh + cosine", False):
        measuring.network_run(case, torch.device("cpu"))()
    assert [getattr(model.conv, "fusion", None) is not None for model in made] == [False, True, False]


def test_the_readmes_networks(monkeypatch):
    """Made by `python benchmarks/networks.py benchmarks/results/h200_models.jsonl PAGE`, with --all for h200.md."""
    root = Path(__file__).parent.parent
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    networks = importlib.import_module("networks")
    lines = (root / "benchmarks" / "results" / "h200_models.jsonl").read_text().splitlines()
    for page, chosen in (("README.md", networks.IN_README), ("benchmarks/h200.md", networks.NETWORKS)):
        table = networks.table(lines, chosen)
        assert len(table.splitlines()) == 2 + len(chosen)
        text = (root / page).read_text(encoding="utf-8")
        assert text.split(networks.BEGIN)[1].split(networks.END)[0].strip() == table
    times = [
        float(row.split(" | ")[2].split()[0]) for row in networks.table(lines, networks.IN_README).splitlines()[2:]
    ]
    said = f"{min(times):.2f} to {max(times):.2f} times as long as that of the plain network on a GPU"
    assert said in (root / "README.md").read_text(encoding="utf-8")
    assert len(networks.IN_README) == 10
    assert set(networks.IN_README) < set(networks.NETWORKS)
    for network in networks.NETWORKS:  # what is measured is what a row says
        for kind, operator in (("plain", ""), ("decoupled", "tanh + cosine")):
            case = network.case(kind)
            assert case.how == ("compiled" if "torch.compile" in network.mode else "")
            assert case.mode == ("inference" if "inference" in network.mode else "training step")
            assert (case.operator, case.batch) == (operator, network.batch)
    # of a row, the records of its last commit
    row = dict(zip(("model", "batch", "mode"), networks.NETWORKS[0], strict=True)) | {"host_code": "C++"}
    newer = [
        json.dumps(row | {"round": n, "kind": kind, "commit": "new", "ms": ms, "MB": 8})
        for n, plain, ours in ((0, 10, 11), (1, 20, 24))
        for kind, ms in (("plain", plain), ("decoupled", ours))
    ]
    assert f"| {networks.NETWORKS[0].title} | 15.0 (10.0–20.0) | 1.15 (1.10–1.20) | 1.00 |" in networks.table(
        [*lines, *newer]
    )


def test_networks_are_measured_in_turn(monkeypatch, tmp_path, capsys):
    """benchmarks/networks_gpu.py, in small: one network in this process, and processes that fail or are slow."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    script, network = importlib.import_module("networks_gpu"), importlib.import_module("networks").Network
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small, lines = network("cnn9_narrow", 2), []
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    flags = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    try:
        script.measure(small, 2, 1, lines.append)
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = flags
    assert lines.pop(0) == "ready"
    records = [json.loads(line) for line in lines]
    assert [(r["kind"], r["round"]) for r in records] == [(k, n) for n in (0, 1) for k in ("plain", "decoupled")]
    assert all(r["ms"] > 0 and (r["model"], r["batch"], r["mode"]) == tuple(small) for r in records)

    programs = {
        "works": f"print('ready', flush=True); input(); print({lines[0]!r})",
        "fails": "raise SystemExit(3)",
        "fails later": "print('ready', flush=True); input(); raise SystemExit(3)",
        "slow": "import time; time.sleep(60)",
    }

    def start(_, title, *arguments, **environment):
        command = [sys.executable, "-c", programs[title.split(",")[0]]]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(script, "_start", start)
    out = tmp_path / "records.jsonl"
    assert script.measure_together([network("works", 1)], out, [], 1)
    assert not script.measure_together([network(name, 1) for name in programs], out, [], 0.05)
    assert not script.measure_together([network("fails later", 1)], out, [], 1)
    assert [json.loads(line) for line in out.read_text().splitlines()] == [records[0]] * 2
    assert "slow, 1: failed, or not ready in 0.05 minutes" in capsys.readouterr().err
