"""Activations in the pass of a decoupled convolution: right by themselves, and in every implementation of a block."""

import pytest
import torch
from torch import nn

import dcnet
from dcnet.layers import Block
from dcnet.ops import ACTIVATIONS, activate
from dcnet.ops.activations import FUNCTIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, inside Triton's interpreter


@pytest.mark.parametrize("name", FUNCTIONS)
def test_value_and_slope(name):
    """Value and slope against PyTorch's operator, in float64."""
    z = torch.linspace(-7.03, 7.01, 801, dtype=torch.float64, requires_grad=True)
    expected = activate(z, name, None)
    (slope,) = torch.autograd.grad(expected.sum(), z)
    value, written = FUNCTIONS[name](z)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(written, slope, rtol=1e-10, atol=1e-10)


def test_every_name_is_known():
    for name in ACTIVATIONS:
        y = activate(torch.tensor([-1.0, 2.0]), name, torch.tensor([0.5]))
        assert y.shape == (2,)
    with pytest.raises(
        ValueError, match="unknown activation 'swish'; possible: None, 'relu', 'prelu', 'relu6', 'silu'"
    ):
        Block(nn.Conv2d(3, 4, 3), activation="swish")


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("residual", [False, True])
def test_blocks(activation, residual):
    """Fused, eager and plain blocks agree, with their gradients, in training and in evaluation."""
    pytest.importorskip("triton")
    x, e = torch.randn(2, 4, 5, 5, device=DEVICE), torch.randn(2, 8, 5, 5, device=DEVICE)
    rest = (torch.randn(2, 8, 5, 5, device=DEVICE),) if residual else ()
    for training in (True, False):
        found = []
        for impl in ("reference", "eager", "fused"):
            torch.manual_seed(1)
            conv = dcnet.DecoupledConv2d(4, 8, 3, padding=1, impl=impl)
            block = Block(conv, nn.BatchNorm2d(8), activation).to(DEVICE).train(training)
            nn.init.normal_(block.norm.weight)
            images = x.clone().requires_grad_()
            with torch.backends.cudnn.flags(enabled=False):
                y = block(images, *rest)
                found.append([y, *torch.autograd.grad(y, [images, *block.parameters()], e)])
        for others in found[1:]:
            for a, b in zip(others, found[0], strict=True):
                torch.testing.assert_close(a, b, rtol=3e-4, atol=3e-5)
