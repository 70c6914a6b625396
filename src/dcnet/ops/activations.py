"""Activations that can share the pass of a decoupled convolution.

ReLU and PReLU are built into the kernels. The others are written here, like formulas: a function of z that returns its
value and its slope, in the arithmetic of `dcnet.formulas.m`. The fused kernels compile them from the same source. A new
activation needs a function, and its name in `FUNCTIONS`; `fusing/following.py` says which module it belongs to.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dcnet.formulas import m


def relu6(z):
    """min(max(z, 0), 6)"""
    return m.minimum(m.maximum(z, 0.0), 6.0), m.step(z) * m.step(6.0 - z)


def silu(z):
    """z·σ(z)"""
    s = 1.0 / (1.0 + m.exp(-z))
    return z * s, s * (1.0 + z * (1.0 - s))


def gelu(z):
    """z·Φ(z)"""
    below = 0.5 * (1.0 + m.erf(z * 0.7071067811865476))
    return z * below, below + z * 0.3989422804014327 * m.exp(-0.5 * z * z)


def gelu_tanh(z):
    """z·Φ(z), with Φ by its usual approximation"""
    t = m.tanh(0.7978845608028654 * (z + 0.044715 * z * z * z))
    inner = 0.7978845608028654 * (1.0 + 0.134145 * z * z)
    return 0.5 * z * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * inner


def hardswish(z):
    """z·min(max(z + 3, 0), 6)/6"""
    inside = m.step(z + 3.0) * m.step(3.0 - z)
    return z * m.minimum(m.maximum(z + 3.0, 0.0), 6.0) / 6.0, inside * (z / 3.0 + 0.5) + (1.0 - m.step(3.0 - z))


FUNCTIONS: dict[str, Callable[..., tuple[Any, Any]]] = {
    function.__name__: function for function in (relu6, silu, gelu, gelu_tanh, hardswish)
}
# kernels get an index into this tuple
ACTIVATIONS = (None, "relu", "prelu", *FUNCTIONS)
_BY_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "hardswish": F.hardswish,
}


def activate(y: Tensor, activation: str | None, slope: Tensor | None) -> Tensor:
    """Return the activation of y by PyTorch's own operator; `slope` is PReLU's."""
    if activation is None:
        return y
    if activation == "prelu":
        assert slope is not None
        return F.prelu(y, slope)
    return _BY_TORCH[activation](y)
