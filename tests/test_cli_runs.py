"""The commands about runs: odd names, encodings, going on, starting again, lists, comparison, prediction, help."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dcnet
from dcnet.cli import app
from dcnet.data import NAMES, load_data
from dcnet.training import RECIPES

ODD = [
    "a[red]b[/none]",
    "[",
    os.fsdecode(b"byte \xff"),
    os.fsdecode(b"byte \xfe"),
    "日本 😀",
    "two\nlines \x1b[31m",
    ":smile: $x$ <b>",
]


def call(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})


def words(result):
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    dcnet.train(dcnet.make_recipe(steps=30, batch=64, magnitude=None, lr=3e-3), folder, device="cpu", quiet=True)
    return folder


@pytest.fixture
def odd(trained, tmp_path):
    """Runs with odd names."""
    for name in ODD:
        shutil.copytree(trained, tmp_path / "runs" / name)
    return tmp_path / "runs"


def test_odd_names_are_shown(odd, monkeypatch):
    monkeypatch.chdir(odd.parent)
    shown = call("runs")
    assert shown.exit_code == 0
    for name in ("a[red]b[/none]", "runs/[ ", "byte �", "日本 😀", "two�lines �[31m", ":smile: $x$ <b>"):
        assert name in shown.output
    assert shown.output.count("digits, cnn9_narrow") == len(ODD)
    for name in ODD:
        result = call("evaluate", odd / name, "--device", "cpu")
        assert result.exit_code == 0, result.output
    assert "a[red]b[/none]" in call("evaluate", "runs/a[red]b[/none]", "--device", "cpu").output
    entries = json.loads(call("runs", "--json").stdout)
    assert len(entries) == len(ODD)
    missing = call("evaluate", odd / "none[red]")
    assert "none[red] is not a run folder" in missing.output


def test_odd_names_in_figures_and_pages(odd, tmp_path):
    folders = [odd / name for name in ODD]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call("figure", "convergence", *folders, "-o", tmp_path / "x.png").exit_code == 0
        result = call("report", *folders, "-o", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("byte �") > 2
    assert "byte � (2)" in page  # two names that look the same
    assert "\x1b" not in page


def test_one_odd_result_does_not_hide_the_others(trained, tmp_path):
    for name, text in (("good", None), ("null", '{"accuracy": null}'), ("bytes", b"\xff\xfe"), ("deep", "[" * 100_000)):
        shutil.copytree(trained, tmp_path / name)
        if text is not None:
            result = json.loads((trained / "result.json").read_text())
            data = json.dumps(result | json.loads(text)) if name == "null" else text
            (tmp_path / name / "result.json").write_bytes(data if isinstance(data, bytes) else data.encode())
    shown = words(call("runs", tmp_path))
    assert shown.count("digits, cnn9_narrow") == 1
    assert shown.count("cannot be read") == 3


@pytest.mark.parametrize("columns", [None, "60", "40"])
def test_narrow_lists_of_runs(trained, tmp_path, monkeypatch, columns):
    """Paths and words stay whole; columns that do not fit are named, or all are there where no width was asked for."""
    monkeypatch.chdir(tmp_path)
    name = "runs/a-name-that-has-many-words-in-it" if columns is None else "runs/a-name-of-one-word"
    shutil.copytree(trained, name)
    result = CliRunner().invoke(app, ["runs"], env={"COLUMNS": columns, "NO_COLOR": "1"})
    assert f"│ {name} │" in result.stdout
    found = set(re.findall(r"[\w/.%-]{2,}", result.stdout))
    assert found <= {*f"run data model test accuracy {name} digits cnn9_narrow plain".split()} | {
        *re.findall(r"[\w/.%-]+", result.stdout if columns is None else f"{dcnet.Run(name).accuracy:.2f}% operator")
    }
    if columns is None:
        assert {"parameters", "epochs", "loss", "seconds"} <= found
        assert result.stderr == ""
    else:
        assert max(map(len, result.stdout.splitlines())) <= max(int(columns), len(name) + 20)
        assert "parameters; epochs; loss; seconds. dcnet runs --json shows all" in result.stderr


def test_other_encodings(odd):
    """Redirected, where the encoding has no θ and no box."""
    command = """
import sys
from dcnet.cli import main
for arguments in (["runs", sys.argv[1]], ["operators"], ["evaluate", sys.argv[1] + "/θ"]):
    sys.argv = ["dcnet", *arguments]
    try:
        main()
    except SystemExit as end:
        print(end.code)
"""
    environment = os.environ | {"PYTHONIOENCODING": "cp1252", "COLUMNS": "150"}
    done = subprocess.run([sys.executable, "-c", command, str(odd)], env=environment, capture_output=True)
    assert [line for line in done.stdout.decode("cp1252").splitlines() if line.isdigit()] == ["0", "0", "1"], (
        done.stderr
    )
    assert b"byte ?" in done.stdout
    assert b"sign(cos ?)" in done.stdout
    assert b"? is not a run folder" in done.stderr


def test_bytes_that_are_no_text_in_a_recipe(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="image folders need Pillow")
    folder = tmp_path / os.fsdecode(b"images \xff")
    for part in ("train", "val"):
        for name in ("dark", "light"):
            (folder / part / name).mkdir(parents=True)
            image.new("RGB", (12, 12)).save(folder / part / name / "0.png")
    recipe = dcnet.make_recipe(data=f"imagefolder:{folder}", image_size=8, batch=2, steps=1)
    run = dcnet.train(recipe, tmp_path / "run", device="cpu", quiet=True)
    assert run.recipe == recipe
    assert run.result["data"] == recipe.data
    assert call("runs", tmp_path).exit_code == 0


def test_a_class_without_test_images_has_no_accuracy(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="image folders need Pillow")
    for part in ("train", "val"):
        for name in ("dark", "light"):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            image.new("RGB", (12, 12)).save(tmp_path / "images" / part / name / "0.png")
    recipe = dcnet.make_recipe(data=f"imagefolder:{tmp_path / 'images'}", image_size=8, batch=2, steps=1)
    dcnet.train(recipe, tmp_path / "run", device="cpu", quiet=True)
    shutil.rmtree(tmp_path / "images" / "val" / "light")
    with pytest.warns(UserWarning, match=r"no images of 1 of the 2 classes that train has \('light'\)"):
        shown = call("evaluate", tmp_path / "run", "--device", "cpu")
    assert shown.exit_code == 0, shown.output
    (row,) = [line for line in shown.output.splitlines() if "light" in line]
    assert "%" not in row


def test_iterating(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--magnitude", "none", "--batch", "256", "--device", "cpu"]
    assert call("train", *flags, "--epochs", "1").exit_code == 0
    assert call("train", *flags, "--epochs", "1", "--lr", "0.01").exit_code == 0
    first, second = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert re.fullmatch(re.escape(first) + "-[0-9a-f]{6}", second)
    again = call("train", *flags, "--epochs", "1")
    assert "is finished: 1 epoch," in words(again)
    longer = call("train", "--resume", f"runs/{first}", "--epochs", "2", "--device", "cpu")
    assert longer.exit_code == 0, longer.output
    assert dcnet.Run(f"runs/{first}").result["epochs"] == 2
    (tmp_path / "runs" / first / "result.json").unlink()
    unfinished = words(call("evaluate", f"runs/{first}", "--device", "cpu"))
    assert (
        f"runs/{first} is unfinished: these are its weights after 10 steps, of 2 epochs. Go on with: dcnet train "
        "--resume" in unfinished
    )
    assert "unfinished" not in words(call("evaluate", f"runs/{second}", "--device", "cpu"))
    assert call("train", *flags, "--epochs", "1", "--overwrite").exit_code == 0
    assert dcnet.Run(f"runs/{first}").result["epochs"] == 1
    for arguments in (["train", "--run", "", *flags], ["evaluate", ""], ["runs", " "]):
        assert "it is empty; possible: the path of a folder" in words(call(*arguments))
    with_lock = call("train", *flags, "--epochs", "1", "--run", tmp_path / "one")
    assert with_lock.exit_code == 0
    (tmp_path / "one" / "result.json").unlink()
    with dcnet.util.lock.locked(tmp_path / "one"):
        refused = call("train", "--resume", tmp_path / "one")
    assert refused.exit_code == 1
    assert f"is in use by process {os.getpid()}" in refused.output


def test_sorting_and_comparing(trained, tmp_path):
    for name, accuracy in (("a", 50.0), ("b", 70.0), ("c", None)):
        shutil.copytree(trained, tmp_path / name)
        path = tmp_path / name / "result.json"
        if accuracy is None:
            path.unlink()
        else:
            path.write_text(json.dumps(json.loads(path.read_text()) | {"accuracy": accuracy, "loss": 100 - accuracy}))
    recipe = json.loads((tmp_path / "b" / "recipe.json").read_text())
    (tmp_path / "b" / "recipe.json").write_text(json.dumps(recipe | {"lr": 0.25}))
    os.utime(tmp_path / "a" / "metrics.jsonl", (2e9, 2e9))

    def order(what):
        return [
            Path(entry["run"]).name for entry in json.loads(call("runs", tmp_path, "--json", "--sort", what).stdout)
        ]

    assert order("accuracy") == ["b", "a", "c"]
    assert order("loss") == ["b", "a", "c"]
    assert order("name") == ["a", "b", "c"]
    assert order("date")[0] == "a"
    wrong = call("runs", tmp_path, "--sort", "acuracy")
    assert wrong.exit_code == 1
    assert "Did you mean 'accuracy'" in wrong.output
    compared = words(call("runs", "--compare", tmp_path / "a", tmp_path / "b"))
    assert re.search(r"lr │ 0\.003 │ 0\.25 ", compared)
    assert "│ batch │" not in compared
    assert re.search(r"accuracy │ 50 │ 70 │ \+20 ", compared)
    both = json.loads(call("runs", "--compare", tmp_path / "a", tmp_path / "c", "--json").stdout)
    assert both["recipe"] == {}
    assert both["result"]["accuracy"] == [50.0, None]
    shown = words(call("runs", "--compare", tmp_path / "a", tmp_path / "c"))
    assert "The recipes are the same." in shown
    assert "c is unfinished" in shown
    assert "is not a run folder" in call("runs", "--compare", tmp_path / "a", tmp_path / "none").output


def test_lists(tmp_path, monkeypatch):
    for command, names in (
        ("models", dcnet.list_models()),
        ("recipes", RECIPES),
        ("data", [*NAMES, "imagefolder:PATH"]),
        ("operators", [*dcnet.magnitudes(), *dcnet.angulars()]),
    ):
        shown = call(command)
        assert shown.exit_code == 0, shown.output
        for name in names:
            assert re.search(rf"│ {re.escape(name)} ", shown.output), name
    assert "[64]×3, [128]×3, [256]×3, 512-d" in call("models").output
    assert f"not under {tmp_path}: dcnet train --data cifar10 --data-root {tmp_path} --download" in words(
        call("data", "--data-root", tmp_path)
    )
    monkeypatch.chdir(tmp_path)
    assert "not under data: dcnet train --data cifar10 --download" in words(call("data"))
    assert "sphere" not in call("operators", "--kind", "angular").output
    assert "unknown kind 'both'; possible: all, magnitude, angular" in call("operators", "--kind", "both").output


def test_help():
    for command in (
        "train",
        "evaluate",
        "predict",
        "runs",
        "attack",
        "figure",
        "report",
        "explore",
        "bench",
        "table",
        "models",
        "operators",
    ):
        long, short = call(command, "--help"), call(command, "-h")
        assert long.exit_code == 0
        assert long.output == short.output
        assert "bool" not in long.output
    top = call("-h").output
    assert "--install-completion" in top
    assert "bool" not in top


def test_completion():
    """What a shell asks for after TAB."""
    environment = os.environ | {
        "_DCNET_COMPLETE": "complete_bash",
        "COMP_WORDS": "dcnet train --recipe paper-c",
        "COMP_CWORD": "3",
    }
    command = "import sys; sys.argv = ['dcnet']; from dcnet.cli import app; app(prog_name='dcnet')"
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["paper-cifar", "paper-cifar-sgd"], done.stderr


def test_predict(trained, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="predict needs Pillow")
    test = load_data("digits").test
    paths = []
    for number in range(3):
        paths.append(tmp_path / f"{number}.png")
        image.fromarray(test.images[number, 0].numpy()).save(paths[-1])
    with torch.no_grad():
        chances = dcnet.load(trained)(test.images[:3] / 255.0).softmax(1)
    entries = json.loads(call("predict", trained, *paths, "--json", "--top", "2", "--device", "cpu").stdout)
    assert [entry["prediction"] for entry in entries] == [str(int(i)) for i in chances.argmax(1)]
    assert [entry["top"][0]["probability"] for entry in entries] == pytest.approx(chances.amax(1).tolist(), abs=1e-5)
    assert all(len(entry["top"]) == 2 and entry["converted"] == "" for entry in entries)
    # another size, in color: converted, and said so
    large = image.fromarray(test.images[0, 0].numpy()).resize((40, 32), image.Resampling.NEAREST).convert("RGB")
    large.save(tmp_path / "large.png")
    shown = call("predict", trained, paths[0], tmp_path / "large.png", "--device", "cpu")
    assert shown.exit_code == 0, shown.output
    assert "RGB to gray; resized from 40×32 to 8×8" in words(shown)
    assert "as it is" in shown.output
    # what cannot be read does not hide the rest
    (tmp_path / "cut.png").write_bytes(paths[0].read_bytes()[:20])
    partly = call(
        "predict", trained, paths[0], tmp_path / "cut.png", tmp_path / "none.png", tmp_path, "--device", "cpu"
    )
    assert partly.exit_code == 1
    assert "0.png" in partly.output
    assert "cut.png cannot be read as an image" in partly.output
    assert "none.png cannot be read as an image: it does not exist" in words(partly)
    assert "cannot be read as an image: it is a folder" in words(partly)


def test_predict_for_an_image_folder(tmp_path):
    """The same middle of the image as in evaluation; classes by name, also where the folder has gone."""
    image = pytest.importorskip("PIL.Image", reason="predict needs Pillow")
    for part in ("train", "val"):
        for shade, name in ((60, "dark"), (200, "light")):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            pixels = np.random.default_rng(shade).integers(0, 40, (20, 30, 3)) + shade
            image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "images" / part / name / "0.png")
    recipe = dcnet.make_recipe(data=f"imagefolder:{tmp_path / 'images'}", image_size=8, batch=2, steps=1)
    run = dcnet.train(recipe, tmp_path / "run", device="cpu", quiet=True)
    path = tmp_path / "light.png"
    shutil.copy(tmp_path / "images" / "val" / "light" / "0.png", path)
    entry = json.loads(call("predict", run.folder, path, "--json", "--device", "cpu").stdout)[0]
    data = dcnet.training.open_data(recipe, dcnet.training.Ranks(0, 1, torch.device("cpu")))
    with torch.no_grad():
        expected = run.model(next(iter(data.test_batches(2)))[0]).softmax(1)[1]
    found = {one["class"]: one["probability"] for one in entry["top"]}
    assert [found["dark"], found["light"]] == pytest.approx(expected.tolist(), abs=1e-4)
    shutil.rmtree(tmp_path / "images")
    shown = call("predict", run.folder, path, "--device", "cpu")
    assert shown.exit_code == 0
    assert f"│ {entry['prediction']} │" in words(shown)
