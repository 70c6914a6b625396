"""How much a decoupled convolution computes, for those who count.

PyTorch's own counter, `torch.utils.flop_counter.FlopCounterMode`, counts products of matrices and convolutions and nothing else, in our
layers as in others: the formulas for the fused operators are in `fused/library.py`. fvcore counts what torch.jit.trace records, and is told
here what else there is.
"""

import math
from collections.abc import Callable
from typing import Any

# Of the operations a decoupled layer is traced as, those that fvcore neither counts nor ignores by itself: one for each number that comes
# out, or, of sums, that goes in
_EACH = (
    *("abs", "acos", "add", "add_", "asin", "div", "exp", "expm1", "log", "log1p", "maximum", "minimum", "mul", "neg"),
    *("pow", "reciprocal", "rsqrt", "rsub", "sigmoid", "sign", "sqrt", "square", "sub", "tanh", "where"),
)
_SUMS = ("mean", "sum")
# what moves, repeats or compares numbers
_NOTHING = (
    *("isfinite", "all", "lerp_", "le", "lt", "ne", "repeat_interleave", "clone", "ones_like", "unflatten"),
    *("clamp_max", "clamp_min", "pad"),
)

Handle = Callable[[list[Any], list[Any]], int]


def fvcore_handles() -> dict[str, Handle | None]:
    """Return what `fvcore.nn.FlopCountAnalysis` needs to count the norms, angles and magnitudes of decoupled layers too.

    `FlopCountAnalysis(model, x).set_op_handle(**dcnet.fvcore_handles()).total()`: the plain network's count plus that of the epilogues. Without
    them fvcore counts the convolutions, and says what it left out.
    """
    handles: dict[str, Handle | None] = {f"aten::{name}": _outputs for name in _EACH}
    handles |= {f"aten::{name}": _inputs for name in _SUMS}
    return handles | {f"aten::{name}": None for name in _NOTHING}


def _outputs(inputs: list[Any], outputs: list[Any]) -> int:
    return _numbers(outputs[0])


def _inputs(inputs: list[Any], outputs: list[Any]) -> int:
    return _numbers(inputs[0])


def _numbers(value: Any) -> int:
    """Return the size of a traced tensor of floating-point numbers; others are sizes themselves, or places."""
    if not value.isCompleteTensor() or value.type().scalarType() not in ("Float", "Double", "Half", "BFloat16"):
        return 0
    return math.prod(value.type().sizes())
