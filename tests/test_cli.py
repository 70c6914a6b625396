"""The command line and the figures it draws."""

import inspect
import json
import os
import re
import shutil
import sys
import typing
from pathlib import Path

import pytest
import torch
import typer
from typer.main import get_command
from typer.testing import CliRunner

import dcnet
from dcnet.cli import app, main
from dcnet.figures import make_figure
from dcnet.formulas.catalogue import CATALOGUES


@pytest.fixture(autouse=True)
def small_numbers():
    """`main` rounds numbers below 1e-38 to 0, for the whole process."""
    yield
    torch.set_flush_denormal(False)


def call(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_help_lists_the_catalogue():
    text = call("--help").output
    for name in [*dcnet.magnitudes(), *dcnet.angulars(), "figure"]:
        assert name in text
    assert dcnet.__version__ in call("--version").output


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_figure(tmp_path, ending):
    path = tmp_path / "sub" / f"curves.{ending}"
    result = call("figure", "functions", "--out", str(path))
    assert result.exit_code == 0
    assert path.stat().st_size > 5_000


def test_figure_errors(tmp_path):
    result = call("figure", "functons")
    assert result.exit_code == 1
    assert "Did you mean 'functions'" in result.output
    result = call("figure", "functions", "--out", str(tmp_path / "curves.bmp"))
    assert result.exit_code == 1
    assert "possible: .png, .svg, .pdf" in result.output


def test_a_users_formula_is_drawn_and_listed(catalogue):
    @dcnet.angular
    def mine(c):
        """half of cos θ"""
        return 0.5 * c, 0.5

    left, right = make_figure("functions").axes
    assert [line.get_label() for line in left.lines] == list(dcnet.magnitudes())
    assert [line.get_label() for line in right.lines][-1] == "mine"
    assert right.lines[-1].get_ydata()[0] == pytest.approx(0.5)


def test_train_evaluate_runs(tmp_path):
    run = tmp_path / "run"
    flags = ["--magnitude", "none", "--steps", "3", "--milestones", "0.5,0.75", "--schedule", "step", "--device", "cpu"]
    result = call("train", *flags, "--run", str(run))
    assert result.exit_code == 0, result.output
    assert "plain" in result.output
    recipe = dcnet.Run(run).recipe
    assert (recipe.magnitude, recipe.milestones, recipe.steps, recipe.schedule) == (None, (0.5, 0.75), 3, "step")
    shown = call("evaluate", str(run), "--device", "cpu")
    assert f"accuracy {dcnet.Run(run).accuracy:.2f}%" in shown.output
    result = json.loads(call("evaluate", str(run), "--device", "cpu", "--json").output)
    right, images = (sum(one[number] for one in result["classes"]) for number in ("right", "images"))
    assert result["accuracy"] == 100.0 * right / images == pytest.approx(dcnet.Run(run).accuracy, abs=0.005)
    assert result["accuracy"] <= result["top5_accuracy"] <= 100.0
    assert (result["run"], result["data"], result["unfinished_after"]) == (str(run), "digits", None)
    assert "digits, cnn9_narrow" in call("runs", str(tmp_path)).output
    again = call("train", "--resume", str(run), "--device", "cpu")
    assert again.exit_code == 0
    # a file of a recipe, changed by a flag
    other = call(
        "train",
        "--recipe",
        str(run / "recipe.json"),
        "--seed",
        "3",
        "--device",
        "cpu",
        "--run",
        str(tmp_path / "other"),
    )
    assert other.exit_code == 0
    assert dcnet.Run(tmp_path / "other").recipe.seed == 3


def test_train_errors(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    (tmp_path / "folder.json").mkdir()
    for arguments, message in [
        (
            ["--data", "cifar10", "--data-root", str(tmp_path)],
            "cifar-10-batches-bin/data_batch_1.bin is missing (and 5 more)",
        ),
        (["--recipe", "paper"], "unknown recipe 'paper'"),
        (["--recipe", "nothing.json"], "--recipe nothing.json does not exist; possible: a JSON file, or paper-cifar"),
        (["--recipe", str(tmp_path / "bytes.json")], f"--recipe {tmp_path / 'bytes.json'} is not text"),
        (["--recipe", str(tmp_path / "folder.json")], f"--recipe {tmp_path / 'folder.json'} is a folder"),
        (["--epochs", "2", "--steps", "3"], "error: --epochs 2 and --steps 3 are two lengths of one run"),
        (["--weighting", "foo"], "(on the command line: none, linear, joint, separate)"),
        (["--magnitude", "rational"], "for a formula of your own, give its file: --formulas FILE"),
        (["--angular", "rational"], "for a formula of your own, give its file: --formulas FILE"),
        (["--resume", str(tmp_path)], "is not a run folder"),
        (
            ["--resume", str(tmp_path), "--lr", "0.1", "--epochs", "3"],
            "--lr cannot change it. Possible: --epochs, --steps",
        ),
        (["--resume", str(tmp_path), "--overwrite"], "--overwrite cannot change it"),
        (["--resume", ""], "it is empty; possible: the path of a folder"),
        (["--milestones", "a,b"], "Invalid value for --milestones: 'a,b' is not numbers with commas between them"),
        (["--steps", "1.5"], "Invalid value for --steps: '1.5' is not a whole number"),
        (["--epochs", "-1"], "epochs=-1.0 must be > 0"),
        (["--device", "cuda:9"], "unknown device 'cuda:9'; possible: cpu, cuda"),
        (["--schedule", "cosin"], "unknown schedule 'cosin'"),
    ]:
        result = (
            call("train", *arguments, "--run", str(tmp_path / "run"))
            if "--resume" not in arguments
            else call("train", *arguments)
        )
        assert result.exit_code in (1, 2), arguments
        assert message in " ".join(result.output.split()), result.output
    assert not (tmp_path / "run").exists()
    assert call("evaluate", str(tmp_path)).exit_code == 1


def test_every_field_is_a_flag():
    import dataclasses

    text = call("train", "--help").output
    for field in dataclasses.fields(dcnet.Recipe):
        assert f"--{field.name.replace('_', '-')}" in text
    narrow = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"}).output
    for field in dataclasses.fields(dcnet.Recipe):  # whole, also where it has an opposite
        assert f"│ --{field.name.replace('_', '-')} " in narrow
    assert "…" not in narrow.split("─ Recipe ─")[1]
    assert "Its opposite: --no-graphs." in text
    assert "Default: 8/255." in text


def test_attack(tmp_path):
    run = tmp_path / "run"
    assert call("train", "--magnitude", "none", "--steps", "20", "--device", "cpu", "--run", str(run)).exit_code == 0
    flags = [
        "--attacks",
        "fgsm,bim:steps=2",
        "--eps",
        "0.1",
        "--limit",
        "40",
        "--check-images",
        "10",
        "--device",
        "cpu",
    ]
    shown = call("attack", str(run), *flags)
    assert shown.exit_code == 0, shown.output
    assert "bim:steps=2" in shown.output  # as it was typed
    words = " ".join(shown.output.split())
    assert f"{run}: 40 images, ε = 25.5/255, true labels, each on the survivors of the last" in words
    assert f"Check-up: white-box attacks on {run} itself; the first 10 images" in words
    assert "at ε = 0 the accuracy on these 10 images is" in words
    transfer = call(
        "attack",
        str(run),
        "--attacks",
        "fgsm",
        "--from",
        str(run),
        "--limit",
        "20",
        "--no-check",
        "--device",
        "cpu",
        "--separate",
    )
    assert transfer.exit_code == 0, transfer.output
    assert f"{run}: 20 images made on {run.name}, ε = 8/255" in " ".join(transfer.output.split())
    first, second = json.loads((run / "attacks.json").read_text())
    assert (first["images"], first["eps"], len(first["attacks"])) == (40, 0.1, 2)
    assert first["attacks"][1]["attack"] == "bim:iterations=2"  # as in earlier records
    assert "bim:steps=2 " in call("attack", str(run), "--records").output
    sizes = ["--attacks", "fgsm,deepfool:steps=20", "--limit", "20", "--check-images", "5", "--device", "cpu"]
    shown = call("attack", str(run), *sizes, "--from", str(run))
    words = " ".join(shown.output.split())
    assert "each on the survivors of the last, DeepFool on all that are classified right" in words
    other = f"Check-up: white-box attacks on {run} itself, and not the images made on {run.name}"
    assert f"{other}; the first 5 images" in words
    assert re.search(r"│ deepfool:steps=20 │ +\d+ │ +│ +[\d.]+ in ℓ2 │", shown.output)
    assert first["check-up"]["images"] == 10
    assert (second["transfer"], second["cumulative"], second["from"]) == (True, False, run.name)
    for arguments, message in [
        (["--attacks", "fgms"], "unknown attack 'fgms'. Did you mean 'fgsm'"),
        (["--attacks", "fgsm,foo"], "unknown attack 'foo'. Known: fgsm, bim"),  # and no guess
        (["--eps", "8/0"], "eps='8/0' is no number"),
        (["--eps", "-1"], "eps must be a finite number"),
        (["--from", str(tmp_path)], "is not a run folder"),
    ]:
        result = call("attack", str(run), "--device", "cpu", *arguments)
        assert result.exit_code == 1, result.output
        assert message in " ".join(result.output.split())


def test_one_odd_run_does_not_hide_the_others(tmp_path):
    call("train", "--data", "digits", "--steps", "1", "--batch", "8", "--run", str(tmp_path / "good run"))
    for name, file, text in (
        ("cut", "result.json", '{"accuracy": 9'),
        ("other", "result.json", "{}"),
        ("bare", "metrics.jsonl", '{"epoch": 1}\n'),
    ):
        shutil.copytree(tmp_path / "good run", tmp_path / name)
        (tmp_path / name / "result.json").unlink()
        (tmp_path / name / file).write_text(text)
    shown = " ".join(call("runs", str(tmp_path)).output.split())
    assert shown.count("digits, cnn9_narrow") == 1
    assert "cut cannot be read" in shown
    assert "is not what `dcnet train` writes" in shown
    assert "line 1 lacks one of epoch, seconds, step" in shown
    result = CliRunner().invoke(app, ["train", "--resume", str(tmp_path / "other")])
    assert result.exit_code == 1
    assert f"remove it, and have it made again: dcnet train --resume {tmp_path / 'other'}" in " ".join(
        result.output.split()
    )
    (tmp_path / "other" / "result.json").unlink()
    call("train", "--resume", str(tmp_path / "other"))
    assert (tmp_path / "other" / "result.json").read_text().startswith("{")


def test_formulas_of_ones_own_in_every_command(tmp_path, catalogue):
    file = tmp_path / "mine.py"
    file.write_text(
        'import dcnet\n\n@dcnet.angular\ndef tests_cli_third(c):\n    """a third of cos θ"""\n    return 0.3 * c, 0.3\n'
    )
    run, own = str(tmp_path / "run"), ("--formulas", str(file))

    def in_process(*arguments):
        """Each as in a process of its own, where nothing is registered yet."""
        CATALOGUES["angular"].pop("tests_cli_third", None)
        result = call(*arguments)
        assert result.exit_code == 0, result.output
        return result.output

    in_process(
        "train",
        "--data",
        "digits",
        "--model",
        "cnn6_2d",
        "--steps",
        "1",
        "--batch",
        "8",
        "--angular",
        "tests_cli_third",
        "--run",
        run,
        *own,
    )
    assert "class" in in_process("evaluate", run, *own)
    assert "fgsm" in in_process("attack", run, "--attacks", "fgsm", "--limit", "4", "--no-check", *own)
    (tmp_path / "run" / "inspection.json").unlink()
    in_process("report", run, "-o", str(tmp_path / "page.html"), *own)
    assert "No filters" not in (tmp_path / "page.html").read_text()


def test_flags_are_called_after_their_parameters():
    """Typer 0.27 takes an option's metavar for its name where that is the parameter's name in capitals."""
    for name, command in get_command(app).commands.items():
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert all(flag == flag.lower() for flag in parameter.opts), (name, parameter.opts)
    for info in app.registered_commands:
        for parameter in inspect.signature(info.callback).parameters.values():
            for option in typing.get_args(parameter.annotation)[1:]:
                # in Annotated, the first name is where a default would be
                named = isinstance(option, typer.models.OptionInfo) and (option.param_decls or option.default)
                if isinstance(option, typer.models.OptionInfo) and not str(named).startswith(("--", "('--")):
                    assert (option.metavar or "").lower() != parameter.name, f"name the flag: --{parameter.name}"


def test_table_errors(tmp_path):
    """What can be found before anything is trained or written."""
    book = Path(__file__).parent.parent / "results" / "tables" / "ledger.jsonl"
    page, picture = tmp_path / "page.md", tmp_path / "a.png"
    page.write_text("no marks\n")
    picture.write_bytes(b"\xff")
    for arguments, message in [
        (["--list", "--ledger", tmp_path / "none"], f"--ledger {tmp_path / 'none'} does not exist"),
        (["--render", tmp_path / "new", "--ledger", tmp_path], f"--ledger {tmp_path} is a folder"),
        (
            ["--into", tmp_path / "none.md", "--ledger", book],
            f"{tmp_path / 'none.md'} does not exist; possible: a file",
        ),
        (["--into", tmp_path, "--ledger", book], f"{tmp_path} is a folder"),
        (["--into", picture, "--ledger", book], f"{picture} is not text"),
        (
            ["cause", "--render", tmp_path / "new", "--into", page, "--ledger", book],
            f"{page} has no place for cause; a table goes between the lines <!-- dcnet table cause: begin -->",
        ),
        (["--render", picture, "--ledger", book], f"--render {picture} is a file; possible: a folder"),
        (["cnn9", "--budget", "0"], "budget='0' leaves no time for any cell"),
        (["cnn9", "--budget", "0h0m"], "budget='0h0m' leaves no time"),
        (["cnn9", "--budget", "20s"], "budget='20s' leaves no time for any cell; possible: more than 20s"),
        (["cnn9", "--set", "precision"], "--set precision: give a value, as in precision=bf16"),
    ]:
        result = call("table", *map(str, arguments), "--runs", str(tmp_path / "runs"))
        assert result.exit_code == 1, (arguments, result.output)
        assert result.output.startswith("error: ")
        assert message in result.output
        assert result.output.count("\n") == 1
    assert not (tmp_path / "new").exists()
    begin, end = "<!-- dcnet table cause: begin -->", "<!-- dcnet table cause: end -->"
    page.write_bytes(f"before\r\n{begin}\r\n{end}\r\nafter\r\n".encode())
    assert "cause put in place" in call("table", "--into", str(page), "--ledger", str(book)).output
    assert page.read_bytes().startswith(b"before\r\n")
    listed = call("table", "--list", "--ledger", str(book)).output
    assert "Time of NVIDIA H200, judged by cells" in listed


def test_errors_name_files_and_have_no_numbers(tmp_path):
    (tmp_path / "file").touch()
    for arguments, message in [
        (["explore", "--no-open", "-o", tmp_path], f"error: --out {tmp_path} is a folder; possible: a file, such as"),
        (["explore", "--no-open", "-o", tmp_path / "file" / "a.html"], f"error: {tmp_path / 'file'}: "),
        (["figure", "functions", "-o", tmp_path / "file" / "a.png"], f"error: {tmp_path / 'file'}: "),
        (["runs", tmp_path / "none"], f"error: {tmp_path / 'none'} does not exist; possible: a folder"),
        (["runs", tmp_path / "file"], f"error: {tmp_path / 'file'} is a file; possible: a folder"),
    ]:
        result = call(*map(str, arguments))
        assert result.exit_code == 1, result.output
        assert result.output.startswith(message)
        assert "Errno" not in result.output
        assert result.output.count("\n") == 1


def test_no_runs_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call("runs")
    assert (result.exit_code, result.output) == (0, "no runs under runs\n")


@pytest.mark.parametrize(("name", "module"), [("attack", "attack"), ("figure", "figure"), ("evaluate", "evaluate")])
def test_interrupted(tmp_path, monkeypatch, name, module):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"dcnet.cli.{module}.register", interrupt)
    result = call(name, *(["functions"] if name == "figure" else [str(tmp_path)]))
    assert result.exit_code == 130
    assert result.stderr == "stopped\n"


def test_numbers_that_take_a_cpu_long_are_zero(monkeypatch):
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot do that")
    torch.set_flush_denormal(False)
    small, seen = torch.full((64,), 1e-40), []
    assert (small * 1.0).sum() > 0.0
    monkeypatch.setattr("dcnet.cli.app", lambda: seen.append(float((small * 1.0).sum())))
    main()
    assert seen == [0.0]


@pytest.mark.parametrize("arguments", [["operators"], ["--help"], ["--version"], ["runs", "--json"], ["train"]])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_full_output(tmp_path, monkeypatch, capsys, arguments):
    """One line says so, wherever it was printed: by a command, by typer, or by training."""
    monkeypatch.chdir(tmp_path)
    more = ["--steps", "1", "--batch", "8", "--device", "cpu"] if arguments == ["train"] else []
    monkeypatch.setattr(sys, "argv", ["dcnet", *arguments, *more])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 1
    assert capsys.readouterr().err == "error: the output cannot be written: No space left on device\n"


def test_output_that_nobody_reads(monkeypatch, capsys):
    """Silent for a pipe that was closed, as by head; a line where there is no output at all."""
    monkeypatch.setattr(sys, "argv", ["dcnet", "operators"])
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as end:
            main()
    assert (end.value.code, capsys.readouterr().err) == (1, "")
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert capsys.readouterr().err == "error: the output cannot be written: it is closed\n"


def test_help_says_what_flags_do():
    def text(command):
        return " ".join(re.sub(r"[│╭╮╰╯─]", " ", call(command, "--help").output).split())

    assert "Restrict which layers are decoupled (default: all convolutions except gates)." in text("train")
    assert "Several patterns select more layers" in text("finetune")
    assert "may be repeated; cells are trained in that order." in text("table")
    assert "Start a cell only if, judged by earlier cells, it will finish within the budget." in text("table")
    assert "Overwrite earlier records of the same attack" in text("attack")
