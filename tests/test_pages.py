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
    "dcnet table white-box": "trains for hours; test_tables.py has it small",
    "torchrun": "needs several GPUs; test_training_distributed.py runs it with two processes",
    "for operator": "trains eight networks on MNIST",
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


def documented():
    """The names in the reference, without "dcnet."."""
    reference = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    return set(re.findall(r"^::: dcnet\.([\w.]+)$", reference, re.MULTILINE))


def found(name):
    """What a name in the reference stands for."""
    if name == "HubModel":
        needs("huggingface_hub")
    where, _, last = f"dcnet.{name}".rpartition(".")
    return getattr(importlib.import_module(where), last)


# All public functions and classes of these are in the reference; of others, those that their users need.
WHOLE = ("figures", "formulas", "inspection", "robustness")
PUBLIC = [name for name in dcnet.__all__ if name not in ("__version__", *WHOLE)]
PUBLIC += [
    f"{module}.{name}"
    for module in WHOLE
    for name in importlib.import_module(f"dcnet.{module}").__all__
    if callable(getattr(importlib.import_module(f"dcnet.{module}"), name))
]


def test_every_public_name_is_in_the_reference():
    # dcnet.robustness.evaluate is a function, and a module too; a formula is also at top level
    there = {part for name in documented() for part in (name, f"{name.partition('.')[0]}.{name.rpartition('.')[2]}")}
    assert not [name for name in PUBLIC if name not in there and name.rpartition(".")[2] not in there]


@pytest.mark.parametrize("name", sorted(documented()))
def test_what_is_in_the_reference_says_what_it_takes(name):
    """Each argument of a public function or class has its line."""
    what = found(name)
    assert what.__doc__
    if not callable(what) or name.startswith("Lazy"):  # which say whose arguments they have
        return
    try:
        arguments = [a for a in inspect.signature(what).parameters if a not in ("self", "args", "kwargs")]
    except ValueError:  # an exception, which takes what all take
        return
    text = inspect.getdoc(what)
    missing = [a for a in arguments if not re.search(rf"^ *\*{{0,2}}{a}: ", text, re.MULTILINE)]
    assert not missing


def test_public_functions_have_examples():
    """They run as tests. from_pretrained needs transformers, and a network that it has saved."""
    functions = [name for name in dcnet.__all__ if inspect.isfunction(getattr(dcnet, name))]
    assert len(functions) > 30
    assert [name for name in functions if ">>> " not in inspect.getdoc(getattr(dcnet, name))] == ["from_pretrained"]
