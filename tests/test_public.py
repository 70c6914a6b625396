"""The names at top level, and what they show of themselves."""

import inspect
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from torch import nn

import dcnet


def test_every_name_is_there():
    for name in dcnet.__all__:
        assert getattr(dcnet, name) is not None
    assert "Block" in dcnet.__all__
    assert not {"m", "positive", "at_least"} & set(dcnet.__all__)
    for name in ("m", "positive", "at_least"):  # where they were before
        assert getattr(dcnet, name) is getattr(dcnet.formulas, name)
    with pytest.raises(AttributeError, match="module 'dcnet' has no attribute 'figure'"):
        _ = dcnet.figure


def test_figures_are_there_without_an_import_of_their_own():
    """As the README writes it; and not before they are asked for."""
    code = """
import sys, dcnet
assert "dcnet.figures" not in sys.modules and "matplotlib" not in sys.modules
assert "figures" in dir(dcnet)
assert callable(dcnet.figures.draw_angles)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hub_model_is_listed_where_it_can_be_made(monkeypatch):
    """What goes through all names, such as help(dcnet), must not meet an ImportError."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "HubModel" not in dir(dcnet)
    assert "figures" in dict(inspect.getmembers(dcnet))
    installed = ModuleType("huggingface_hub")
    installed.__spec__ = ModuleSpec("huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", installed)
    assert "HubModel" in dir(dcnet)


@pytest.mark.parametrize("kind", [dcnet.DecoupledConv1d, dcnet.DecoupledConv2d, dcnet.DecoupledConv3d])
def test_help_of_a_layer(kind):
    """The formula, every argument, shapes, an example and the paper; arguments are typed."""
    text = inspect.getdoc(kind)
    for part in (
        "h(‖w‖, ‖x‖)·g(θ)",
        "Args:",
        "Shape:",
        "Examples:",
        f">>> layer = dcnet.{kind.__name__}(",
        "CVPR 2018",
    ):
        assert part in text
    for name, parameter in inspect.signature(kind).parameters.items():
        assert f"\n    {name}: " in text
        assert "Any" not in str(parameter.annotation)


@pytest.mark.parametrize("name", ["decoupled_conv1d", "decoupled_conv2d", "decoupled_conv3d", "decoupled_linear"])
def test_help_of_a_function(name):
    """As of a layer; the arguments that the others share are in each of them."""
    text = inspect.getdoc(getattr(dcnet, name))
    for part in ("h(‖w‖, ‖x‖)·g(θ)", "Args:", "Shape:", "Examples:", f"dcnet.{name}(", "CVPR 2018"):
        assert part in text
    for argument, parameter in inspect.signature(getattr(dcnet, name)).parameters.items():
        assert f"\n    {argument}: " in text
        assert "Any" not in str(parameter.annotation)


def test_repr():
    conv = dcnet.DecoupledConv2d(3, 4, 3)
    assert "relu(norm(conv(x)) [+ residual])" in repr(dcnet.Block(conv, nn.BatchNorm2d(4), "relu"))
    assert "  conv(x) [+ residual]\n" in repr(dcnet.Block(conv, None, None))
    model = dcnet.create_model("cnn9_narrow", mean=(0.5, 0.25, 0.125), std=0.5)
    assert "Normalize((x - mean) / std, mean=(0.5, 0.25, 0.125), std=(0.5))" in repr(model)
