"""What type checkers see of the public names: mistakes are errors, and right uses are none."""

import os
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import get_type_hints

import pytest

import dcnet
from dcnet.layers import LayerOptions
from dcnet.layers.options import Options
from dcnet.ops.api import _Convolution

# Each line with what mypy says about it; a line without that has to pass.
USES = """
import torch
from matplotlib.figure import Figure
from torch import nn
import dcnet
from dcnet import figures

class Net(nn.Module): ...

net, x = Net(), torch.ones(1, 3, 8, 8)
dcnet.decoupled_conv2d(x, x, padding="same", groups=1, radius=2.0)
dcnet.decoupled_conv2d(1, x)  # incompatible type "int"; expected "Tensor"
dcnet.decoupled_conv2d(x, x, strid=3)  # did you mean "stride"
dcnet.decoupled_conv1d(x)  # Missing positional argument "weight"
dcnet.decoupled_conv3d(x, x, magnitud="tanh")  # did you mean "magnitude"
dcnet.decoupled_conv3d(x, x).shap  # "Tensor" has no attribute "shap"
dcnet.decouple  # Module has no attribute "decouple"
dcnet.figure  # Module has no attribute "figure"
dcnet.figures.make_figure("functions").savefig("a.png")
dcnet.figures.make_figure("functions").save("a.png")  # "Figure" has no attribute "save"
dcnet.HubModel.from_run("runs/a")
dcnet.decouple_(net, radius=2.0, where=["layer1", lambda name, layer: True], example_input=x, calibrate=[x])
dcnet.decouple_(net, radus=2.0)  # did you mean "radius"
dcnet.decouple_(net, momentum="none")  # incompatible type "str"; expected "float | None"
dcnet.decouple_(net, example_input=3)  # incompatible type "int"
dcnet.decouple_(net, calibrate=3)  # incompatible type "int"
dcnet.create_model("cnn9", weighting="linear", impl="eager")
dcnet.create_model("cnn9", weightin="linear")  # did you mean "weighting"
dcnet.LazyDecoupledConv2d(8, 3, magnitude="seg", sync=True)
dcnet.LazyDecoupledConv2d(8, 3, magnitud="seg")  # did you mean "magnitude"
dcnet.fuse_(net, (x, 1))
dcnet.fuse_(net, {"x": x})
dcnet.fuse_(net, "x")  # incompatible type "str"
dcnet.couple_(net, example_input="x")  # incompatible type "str"
dcnet.export(net, "a.onnx", example_input={"x": x})  # incompatible type "dict[str, Tensor]"
dcnet.project_weights_(net, where="!stem*")
dcnet.project_weights_(net, where=3)  # incompatible type "int"
dcnet.orthogonal_penalty(net, lambda name: True)  # incompatible type
same: Net = dcnet.recalibrate_(net, [x, (x, 1)])
other: nn.Linear = dcnet.unfuse_(net)  # "Linear"
read: Net = dcnet.from_pretrained(Net, "folder", revision="main")
wrong: nn.Linear = dcnet.from_pretrained(Net, "folder")  # "Linear"
dcnet.from_pretrained(3, "folder")  # incompatible type "int"
figures.draw_angulars(Figure().subplots())
figures.draw_angulars(Figure())  # incompatible type "Figure"; expected "Axes"
dcnet.magnitude("tanh")  # No overload variant of "magnitude"
"""


def test_types(tmp_path):
    if find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    file = tmp_path / "uses.py"
    file.write_text(USES, encoding="utf-8")
    options = ["--strict", "--follow-imports=silent", "--config-file", "", "--cache-dir", str(tmp_path / "cache")]
    found = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(file)],
        env=os.environ | {"MYPYPATH": str(Path(dcnet.__file__).parent.parent)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    said = {}
    for line in found.stdout.splitlines():
        if ": error: " in line:
            where, _, text = line.partition(": error: ")
            number = int(where.rpartition(":")[2])
            said[number] = f"{said.get(number, '')} {text}".strip()
    assert said, found.stdout + found.stderr
    for number, line in enumerate(USES.splitlines(), 1):
        code, _, expected = line.partition("  # ")
        assert (expected in said.get(number, "")) if expected else number not in said, (code, said.get(number))


def test_keywords_of_layers_are_their_options():
    """`Options` is for type checkers: it names what `LayerOptions` has."""
    assert get_type_hints(Options) == get_type_hints(LayerOptions)
    assert {field.name for field in fields(LayerOptions)} == set(Options.__annotations__)
    assert not Options.__required_keys__


@pytest.mark.parametrize("name", ["decoupled_conv1d", "decoupled_conv2d", "decoupled_conv3d"])
def test_the_signature_for_type_checkers_is_the_real_one(name):
    shown = signature(_Convolution.__call__)
    assert list(shown.parameters.values())[1:] == list(signature(getattr(dcnet, name)).parameters.values())
    assert shown.return_annotation == signature(getattr(dcnet, name)).return_annotation
