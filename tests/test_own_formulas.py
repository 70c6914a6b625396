"""A user's formulas belong to the run that was trained with them; nothing in a run folder is executed unasked."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from own_formulas import register_own
from typer.testing import CliRunner

import dcnet
from dcnet.cli import app
from dcnet.formulas.catalogue import CATALOGUES
from dcnet.training.own_formulas import MissingFormula

MINE = '''
import dcnet
from dcnet import learnable as learn, m

START = 0.5

@dcnet.angular
def tests_blend(c, a: learn(start=START, floor=0.01) = 0.3):
    """a·cos θ + (1 − a)·sign(cos θ)·cos²θ"""
    square = c * m.abs(c)  # why
    return a * c + (1.0 - a) * square, a + (1.0 - a) * 2.0 * m.abs(c), c - square
'''


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200", "NO_COLOR": "1"})


def forget():
    CATALOGUES["angular"].pop("tests_blend", None)


@pytest.fixture
def run(tmp_path, catalogue):
    """A run trained with a formula that nobody knows any more; its file beside it."""
    (tmp_path / "mine.py").write_text(MINE)
    flags = ["--steps", "1", "--batch", "8", "--angular", "tests_blend:a=learned", "--device", "cpu"]
    done = call("train", *flags, "--run", tmp_path / "run", "--formulas", tmp_path / "mine.py")
    assert done.exit_code == 0, done.output
    forget()
    return tmp_path / "run"


def test_the_copy_is_the_formula(run, tmp_path):
    images = torch.rand(4, 1, 8, 8)
    with pytest.raises(
        MissingFormula,
        match=r"was trained with the angular function 'tests_blend', which is not known here.*--formulas FILE",
    ):
        dcnet.load(run)
    assert "tests_blend" not in dcnet.angulars()  # nothing was executed
    trusted = dcnet.load(run, trust_formulas=True)(images)
    copied = dcnet.angulars()["tests_blend"]
    forget()
    exec(compile(MINE, str(tmp_path / "mine.py"), "exec"), {})
    assert torch.equal(dcnet.load(run)(images), trusted)
    assert (copied.parameters, copied.text) == (
        dcnet.angulars()["tests_blend"].parameters,
        dcnet.angulars()["tests_blend"].text,
    )
    forget()
    # it is a file for --formulas too, and the copy that is known already is not executed again
    assert (
        call("evaluate", run, "--formulas", run / "formulas.py", "--trust-formulas", "--device", "cpu").exit_code == 0
    )


def test_every_command_names_what_is_missing(run, tmp_path):
    for arguments in (["evaluate"], ["attack"], ["figure", "filters"], ["predict", "x.png"], ["train", "--resume"]):
        (run / "result.json").unlink(missing_ok=True)
        (run / "inspection.json").unlink(missing_ok=True)
        command = [arguments[0], run, "x.png"] if arguments[0] == "predict" else [*arguments, run]
        result = call(*command)
        assert result.exit_code == 1, result.output
        words = " ".join(result.output.split())
        assert "'tests_blend', which is not known here" in words, words
        assert "--formulas FILE" in words
        assert "--trust-formulas" in words
    report = call("report", run, "-o", tmp_path / "page.html")
    assert report.exit_code == 0
    assert "which is not known here" in (tmp_path / "page.html").read_text()
    assert "which is not known here" in report.output
    trusted = call("report", run, "-o", tmp_path / "page.html", "--trust-formulas")
    assert "not known here" not in trusted.output + (tmp_path / "page.html").read_text()


def test_another_formula_of_that_name(run, tmp_path):
    (tmp_path / "mine.py").write_text(MINE.replace("c - square", "c - 1.0 * square"))
    result = call("evaluate", run, "--formulas", tmp_path / "mine.py", "--device", "cpu")
    assert result.exit_code == 1
    assert "was trained with another angular function 'tests_blend'" in result.output
    assert "another one of that name is known here" in " ".join(
        call("evaluate", run, "--trust-formulas").output.split()
    )
    forget()
    (tmp_path / "mine.py").write_text(MINE.replace("# why", "# because").replace('"""a·cos', '"""A·cos'))  # only words
    assert call("evaluate", run, "--formulas", tmp_path / "mine.py", "--device", "cpu").exit_code == 0


def test_a_changed_copy_is_not_executed(run):
    path = run / "formulas.py"
    text = path.read_text()
    path.write_text(text + "\nraise SystemExit('executed')\n")
    result = call("evaluate", run, "--trust-formulas")
    assert result.exit_code == 1
    assert "formulas.py was changed after training had written it" in result.output
    path.write_text("#\ndef (\n")
    assert "formulas.py is damaged" in call("evaluate", run).output
    path.unlink()
    assert "The folder has no formulas.py" in call("evaluate", run).output


def test_all_that_registration_admits(tmp_path, catalogue):
    register_own()
    recipe = dcnet.make_recipe(steps=1, batch=8, magnitude="rational:new=0.4", angular="rooted:new=learned,p=1.5")
    folder = dcnet.train(recipe, tmp_path / "run", device="cpu", quiet=True).folder
    before = [dcnet.magnitudes()["rational"], dcnet.angulars()["rooted"]]
    images = torch.rand(2, 1, 8, 8)
    expected = dcnet.load(folder)(images)
    del CATALOGUES["magnitude"]["rational"], CATALOGUES["angular"]["rooted"]
    assert torch.equal(dcnet.load(folder, trust_formulas=True)(images), expected)
    for old, new in zip(before, [dcnet.magnitudes()["rational"], dcnet.angulars()["rooted"]], strict=True):
        assert (old.parameters, old.has_radius, old.bounded, old.text) == (
            new.parameters,
            new.has_radius,
            new.bounded,
            new.text,
        )


def test_without_source_there_is_a_warning(tmp_path, catalogue):
    exec(MINE, {})  # as typed into an interpreter
    recipe = dcnet.make_recipe(steps=1, batch=8, angular="tests_blend")
    with pytest.warns(UserWarning, match="gets no copy of tests_blend, as the source cannot be read"):
        dcnet.train(recipe, tmp_path / "run", device="cpu", quiet=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import dcnet\n\n1 / 0\n", "ZeroDivisionError: division by zero, line 3"),
        ("import sys\nsys.exit(3)\n", "it ends the program, by SystemExit(3), line 2"),
        ("def f(:\n", "SyntaxError: "),
    ],
)
def test_a_file_that_raises(tmp_path, text, message):
    (tmp_path / "mine.py").write_text(text)
    result = call("operators", "--formulas", tmp_path / "mine.py")
    assert result.exit_code == 1
    assert f"mine.py: {message}" in result.output
    assert "Traceback" not in result.output


def test_a_file_that_takes_forever(tmp_path):
    """Ctrl-C says where it was."""
    (tmp_path / "mine.py").write_text("import time\nprint('begun', flush=True)\nwhile True:\n    time.sleep(0.01)\n")
    command = [sys.executable, "-m", "dcnet", "operators", "--formulas", str(tmp_path / "mine.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, words = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "mine.py: interrupted while it was executed, line " in words
    assert "Traceback" not in words
