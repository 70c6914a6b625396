"""The code of docs/frameworks.md runs, as far as the packages it is about are installed."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torchvision_stub import make_torchvision_importable

import dcnet
from dcnet.layers import decoupled_layers

PAGE = Path(__file__).parent.parent / "docs" / "frameworks.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def packages(code):
    """The packages that code imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


@pytest.mark.filterwarnings("ignore")  # of other people's packages
@pytest.mark.parametrize(
    "code", BLOCKS, ids=lambda code: "-".join(sorted(packages(code) - {"torch", "dcnet"})) or "dcnet"
)
def test_the_code_trains(code, tmp_path, monkeypatch):
    missing = [name for name in packages(code) if find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    make_torchvision_importable()  # which the packages import where it is installed
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), scope)
    layers = decoupled_layers(scope["model"])
    assert layers
    if "run" in scope:
        x = torch.rand(2, 1, 8, 8)
        assert torch.equal(scope["model"](x), scope["run"].model(x))
        return
    if "report" in scope:
        assert scope["report"].converted == list(layers)
        return
    start = dcnet.DecoupledConv2d(1, 1, 3).running_norm
    for layer in layers.values():  # it has seen batches, and its kernels were trained
        assert layer.running_norm is not None
        assert not torch.equal(layer.running_norm.cpu(), start)
        assert int(layer.num_batches_tracked) >= 2


def test_the_page_has_the_code():
    assert {"lightning", "accelerate", "transformers"} <= set().union(*map(packages, BLOCKS))
