"""linear + cosine + weighting="linear" is the plain convolution: the strongest test there is."""

import pytest
import torch
import torch.nn.functional as F
from helpers import FUNCTIONS, PLAIN, assert_close, cases, gradients, operands
from hypothesis import given, settings
from hypothesis import strategies as st


def plain(case, tensors):
    """What torch itself computes, padding modes included, as nn.ConvNd does it."""
    arguments = case.arguments
    x, mode = tensors["x"], arguments.pop("padding_mode", "zeros")
    if mode != "zeros":
        padding, kernel, dilation = arguments["padding"], case.weight[2:], arguments["dilation"]
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
            sides = [(t // 2, t - t // 2) for t in total]
        else:
            padding = (0,) * case.dims if padding == "valid" else padding
            padding = (padding,) * case.dims if isinstance(padding, int) else padding
            sides = [(p, p) for p in padding]
        x = F.pad(x, [side for pair in reversed(sides) for side in pair], mode=mode)
        arguments["padding"] = 0
    return PLAIN[case.dims](x, tensors["weight"], tensors.get("bias"), **arguments)


@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_plain_convolution(impl):
    seen = set()

    @settings(max_examples=400)
    @given(case=cases(), seed=st.integers(0, 1000))
    def compare(case, seed):
        seen.add(case)
        assert_plain(case, seed, "linear", impl)

    compare()
    assert len(seen) >= 300


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize("weighting", ["joint", "separate"])  # ‖w‖ enters a linear magnitude in one way only
@settings(max_examples=40)
@given(case=cases(), seed=st.integers(0, 1000))
def test_every_weighting_of_linear_is_the_plain_convolution(impl, weighting, case, seed):
    assert_plain(case, seed, weighting, impl)


def assert_plain(case, seed, weighting, impl):
    tensors = operands(case, "linear", "cosine", seed=seed)
    expected = plain(case, tensors)
    y = FUNCTIONS[case.dims](
        tensors["x"],
        tensors["weight"],
        tensors.get("bias"),
        **case.arguments,
        magnitude="linear",
        angular="cosine",
        weighting=weighting,
        impl=impl,
    )
    assert_close(
        {"output": y.detach(), **gradients(y, tensors)},
        {"output": expected.detach(), **gradients(expected, tensors)},
        1e-9,
    )


@settings(max_examples=60)
@given(case=cases(), seed=st.integers(0, 1000))
def test_relu_cosine_is_convolution_and_relu(case, seed):
    tensors = operands(case, "linear", "cosine", seed=seed)
    tensors.pop("bias", None)
    expected = plain(case, tensors).relu()
    y = FUNCTIONS[case.dims](
        tensors["x"],
        tensors["weight"],
        **case.arguments,
        magnitude="linear",
        angular="relu_cosine",
        weighting="linear",
        impl="eager",
    )
    assert_close(
        {"output": y.detach(), **gradients(y, tensors)},
        {"output": expected.detach(), **gradients(expected, tensors)},
        1e-9,
    )


def test_linear_cosine_computes_no_norm(monkeypatch):
    import dcnet

    def never(*args):
        raise AssertionError("a patch norm was computed")

    monkeypatch.setattr("dcnet.ops.cpu.AutogradFunctions.dot_and_norms", never)
    x, w = torch.randn(2, 4, 5, 5), torch.randn(6, 4, 3, 3)
    y = dcnet.decoupled_conv2d(x, w, magnitude="linear:alpha=2", angular="cosine")
    monkeypatch.undo()
    torch.testing.assert_close(
        y, dcnet.decoupled_conv2d(x, w, magnitude="linear:alpha=2", angular="cosine", impl="reference")
    )


def test_no_unfold_outside_the_reference():
    from pathlib import Path

    import dcnet

    sources = Path(dcnet.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "unfold(" in path.read_text()] == ["reference.py"]
