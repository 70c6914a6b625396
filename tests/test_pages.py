"""The code and the commands of README and docs run; what is too expensive runs small, or is skipped with the reason."""

import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest
import torch
from helpers import needs, packages
from test_cli import call
from typer.main import get_command

import dcnet
from dcnet.cli import app
from dcnet.data import load_data

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


# test_other_tools_page.py, …, test_callbacks.py
_TESTED_ELSEWHERE = ("other-tools.md", "your-model.md", "frameworks.md", "callbacks.md")


def blocks(python):
    """(page, number, text) of every block of Python, or of all others."""
    for page in PAGES:
        if (python and page.name in _TESTED_ELSEWHERE) or page.name in ("other-tools.md", "your-model.md"):
            continue
        found = [text for kind, text in FENCE.findall(page.read_text(encoding="utf-8")) if (kind == "python") == python]
        for number, text in enumerate(found, 1):
            yield pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.mark.usefixtures("few_digits", "catalogue")
@pytest.mark.parametrize("code", list(blocks(python=True)))
def test_python(code, tmp_path, monkeypatch):
    for name in sorted(packages(code)):
        needs(name)
    if '"cuda"' in code and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.chdir(tmp_path)
    # from a file: formulas of one's own are read from their source
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    exec(compile(code, str(tmp_path / "page.py"), "exec"), {"__name__": "page"})


# What a command costs less with; the last of two equal flags counts.
SMALL = ["--device", "cpu", "--batch", "160", "--recalibrate", "1"]
BRIEF = [*SMALL, "--steps", "1", "--data", "digits", "--model", "cnn9_narrow"]
STAND_INS = {
    "dcnet train --recipe": BRIEF,
    "dcnet train --data digits --adversarial": BRIEF,
    "dcnet train --data": SMALL,
    "dcnet train --resume": ["--device", "cpu"],
    "dcnet evaluate": ["--device", "cpu"],
    "dcnet predict": ["--device", "cpu"],
    "dcnet attack": ["--limit", "2", "--no-check", "--device", "cpu"],
    "dcnet explore": ["--no-open", "--out", "explorer.html"],
}
SKIPPED = {
    "dcnet finetune my_package": "needs a package of yours",
    "dcnet finetune t": "needs timm or torchvision, weights and a folder of images; test_finetune.py has them small",
    "torchrun": "needs several GPUs; test_training_distributed.py runs it with two processes",
    "for operator": "trains eight networks on MNIST",
    "python experiments": "a quarter of an hour on an H200; test_robustness_tables.py checks its records",
    "make ": "sets up an environment of its own",
    "git ": "is no command of ours",
    "python -m venv": "sets up an environment of its own",
}


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("text", list(blocks(python=False)))
def test_commands(text, tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image", reason="predict needs Pillow")
    monkeypatch.chdir(tmp_path)
    lines = [line.split("  #")[0].strip() for line in text.splitlines() if line.strip()]
    skipped = next((why for line in lines for start, why in SKIPPED.items() if lines[0].startswith(start)), None)
    if skipped is not None:
        pytest.skip(skipped)
    image.fromarray(load_data("digits").test.images[0, 0].numpy()).save("a.png")
    if not lines[0].startswith("dcnet train"):  # what the blocks before have trained
        for name, magnitude in (("tanh", "tanh"), ("plain", "none")):
            done = call("train", "--magnitude", magnitude, "--run", f"runs/{name}", *BRIEF)
            assert done.exit_code == 0, done.output
    for line in lines:
        if any(line.startswith(start) for start in SKIPPED):
            continue
        assert line.startswith("dcnet "), f"{line!r} is neither run nor skipped with a reason"
        extra = next((flags for start, flags in STAND_INS.items() if line.startswith(start)), [])
        done = call(*shlex.split(line)[1:], *extra)
        assert done.exit_code == 0, (line, done.output)


def test_commands_in_the_text_exist():
    """Every `dcnet COMMAND --flag` in a sentence names a command and flags that there are."""
    group = get_command(app)
    for page in PAGES:
        prose = FENCE.sub("", page.read_text(encoding="utf-8"))
        for text in re.findall(r"`dcnet ([a-z][^`]*)`", prose):
            name, *words = text.split()
            assert name in group.commands, f"{page.name}: dcnet {text}"
            options = group.commands[name].params
            known = {flag for option in options for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
            for word in words:
                if word.startswith("-"):
                    assert word in known, f"{page.name}: dcnet {text}"


def test_every_public_name_is_in_the_reference():
    reference = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^::: dcnet\.([\w.]+)$", reference, re.MULTILINE))
    missing = set(dcnet.__all__) - {"__version__", "formulas", "robustness"} - documented
    assert not missing
    for name in documented:
        where, _, last = f"dcnet.{name}".rpartition(".")
        assert getattr(importlib.import_module(where), last).__doc__, f"dcnet.{name} has no docstring"


def test_public_functions_say_what_they_take():
    """Each argument of a public function or class has its line."""
    for name in dcnet.__all__:
        found = getattr(dcnet, name)
        if not callable(found) or name == "DecoupleReport":
            continue
        arguments = [a for a in inspect.signature(found).parameters if a not in ("self", "args", "kwargs")]
        if name.startswith("Lazy"):
            continue  # they say whose arguments they have
        text = inspect.getdoc(found)
        missing = [a for a in arguments if not re.search(rf"^ *\*{{0,2}}{a}: ", text, re.MULTILINE)]
        assert not missing, f"{name}: {missing}"
