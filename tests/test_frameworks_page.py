"""The code of docs/frameworks.md runs, as far as the packages it is about are installed."""

import re
from pathlib import Path

import pytest
import torch
from helpers import needs, packages

import dcnet
from dcnet.layers import decoupled_layers

PAGE = Path(__file__).parent.parent / "docs" / "frameworks.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.filterwarnings("ignore")  # of other people's packages
@pytest.mark.parametrize(
    "code", BLOCKS, ids=lambda code: "-".join(sorted(packages(code) - {"torch", "dcnet"})) or "dcnet"
)
def test_the_code_trains(code, tmp_path, monkeypatch):
    for name in sorted(packages(code)):
        needs(name)
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
