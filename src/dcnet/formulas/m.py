"""The arithmetic a formula may use, on torch tensors and plain numbers alike.

A magnitude or angular function is written once, with its arguments, literals and the names of this module. The
GPU kernels run the same code with `m` bound to a twin of this module, so every name here must exist there too. What is
neither a number nor a tensor is a torch.fx proxy: `ops/cpu/record.py` records what is computed, for passes without
gradients.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dcnet.util.compat import recorded_by_jit

Value = Tensor | float

# 1/sqrt(1 - c²) is unbounded at c = ±1. Every implementation, in every dtype, uses 1/sqrt(max(1 - c², this)).
ASIN_SLOPE_FLOOR = 1e-6
_ASIN_LINEAR_FROM = math.sqrt(1.0 - ASIN_SLOPE_FLOOR)


def _lifted(
    name: str, of_tensor: Callable[[Tensor], Tensor], of_number: Callable[[float], float]
) -> Callable[[Value], Value]:
    def function(x: Value) -> Value:
        return of_number(x) if isinstance(x, int | float) else of_tensor(x)

    function.__name__ = function.__qualname__ = name
    return function


abs = _lifted("abs", torch.abs, math.fabs)
sign = _lifted("sign", torch.sign, lambda x: float((x > 0) - (x < 0)))
exp = _lifted("exp", torch.exp, math.exp)
log = _lifted("log", torch.log, math.log)
log1p = _lifted("log1p", torch.log1p, math.log1p)
sqrt = _lifted("sqrt", torch.sqrt, math.sqrt)
rsqrt = _lifted("rsqrt", torch.rsqrt, lambda x: 1.0 / math.sqrt(x))
tanh = _lifted("tanh", torch.tanh, math.tanh)
erf = _lifted("erf", torch.erf, math.erf)  # for activations; not among the names a formula may use
# 1 where x > 0, else 0, in the dtype of x (torch.where on two numbers would forget the dtype)
step = _lifted("step", lambda x: (x > 0).to(x.dtype), lambda x: float(x > 0))


def minimum(a: Value, b: Value) -> Value:
    """The smaller of the two, element by element."""
    if isinstance(a, int | float):
        return min(a, b) if isinstance(b, int | float) else b.clamp(max=a)
    return a.clamp(max=b) if isinstance(b, int | float) else torch.minimum(a, b)


def maximum(a: Value, b: Value) -> Value:
    """The larger of the two, element by element."""
    if isinstance(a, int | float):
        return max(a, b) if isinstance(b, int | float) else b.clamp(min=a)
    return a.clamp(min=b) if isinstance(b, int | float) else torch.maximum(a, b)


def where(condition: Tensor | bool, a: Value, b: Value) -> Value:
    """`a` where the condition holds, else `b`; at least one of them a tensor, so that the dtype is known."""
    if isinstance(condition, bool):
        return a if condition else b
    if isinstance(a, int | float) and isinstance(b, int | float):
        raise TypeError(
            f"m.where needs a tensor among its choices, got the numbers {a} and {b}: use m.step, or add 0 * a tensor"
        )
    return torch.where(condition, a, b)


def power(a: Value, p: Value) -> Value:
    """a to the p, for a > 0."""
    return a**p


def asin(c: Value) -> Value:
    """Return asin c for c in [-1, 1].

    Its gradient is `asin_slope`, and right to every order below the cap.
    """
    if isinstance(c, int | float):
        return math.asin(c)
    exact = torch.asin(c)
    if not isinstance(c, Tensor):  # what is being recorded is not differentiated
        return exact
    # torch.jit records with or without gradients: they may be wanted later
    if not recorded_by_jit() and not (c.requires_grad and torch.is_grad_enabled()):
        return exact
    # asin up to the cap, its tangent beyond: the gradient wanted, out of ordinary operations; then the value put right
    inner = c.clamp(-_ASIN_LINEAR_FROM, _ASIN_LINEAR_FROM)
    outside = (c.detach() != inner.detach()).to(c.dtype)
    smooth = torch.asin(inner) + (c - c.detach()) * (outside * ASIN_SLOPE_FLOOR**-0.5)
    value: Tensor = smooth + (exact - smooth).detach()
    return value


def asin_slope(c: Value) -> Value:
    """1/sqrt(max(1 - c², 1e-6)); the product form keeps the digits near c = ±1."""
    return rsqrt(maximum((1.0 - c) * (1.0 + c), ASIN_SLOPE_FLOOR))


NAMES = frozenset(
    [
        "abs",
        "sign",
        "step",
        "minimum",
        "maximum",
        "where",
        "exp",
        "log",
        "log1p",
        "sqrt",
        "rsqrt",
        "tanh",
        "asin",
        "asin_slope",
        "power",
    ],
)
