"""Count what a decoupled convolution computes.

PyTorch's own counter, `torch.utils.flop_counter.FlopCounterMode`, only counts matrix products and convolutions, here as
in any layer; its formulas for the fused operators are in `fused/library.py`. fvcore counts what torch.jit.trace
records. This module tells it what a decoupled layer computes besides convolutions.
"""

import math
from collections.abc import Callable
from typing import Any

# Operations in the trace of a decoupled layer that fvcore neither counts nor ignores by itself. Each counts once for
# every number of its result; a sum counts once for every number of its input.
_EACH = (
    *("abs", "acos", "add", "add_", "asin", "div", "exp", "expm1", "log", "log1p", "maximum", "minimum", "mul", "neg"),
    *("pow", "reciprocal", "rsqrt", "rsub", "sigmoid", "sign", "sqrt", "square", "sub", "tanh", "where"),
)
_SUMS = ("mean", "sum")
# These only move, repeat or compare numbers.
_NOTHING = (
    *("isfinite", "all", "lerp_", "le", "lt", "ne", "repeat_interleave", "clone", "ones_like", "unflatten"),
    *("clamp_max", "clamp_min", "pad"),
)

Handle = Callable[[list[Any], list[Any]], int]


def fvcore_handles() -> dict[str, Handle | None]:
    """Return the handles with which `fvcore.nn.FlopCountAnalysis` counts norms, angles and magnitudes too.

    `FlopCountAnalysis(model, x).set_op_handle(**dcnet.fvcore_handles()).total()` is then the count of the plain network
    plus that of the epilogues. Without the handles fvcore counts the convolutions, and warns about what it left out.

    Examples:
        >>> import dcnet
        >>> handles = dcnet.fvcore_handles()
        >>> handles["aten::clone"] is None, callable(handles["aten::tanh"])
        (True, True)
    """
    handles: dict[str, Handle | None] = {f"aten::{name}": _outputs for name in _EACH}
    handles |= {f"aten::{name}": _inputs for name in _SUMS}
    return handles | {f"aten::{name}": None for name in _NOTHING}


def _outputs(inputs: list[Any], outputs: list[Any]) -> int:
    return _numbers(outputs[0])


def _inputs(inputs: list[Any], outputs: list[Any]) -> int:
    return _numbers(inputs[0])


def _numbers(value: Any) -> int:
    """Return the number of elements of a traced floating-point tensor; 0 for others, which are sizes or indices."""
    if not value.isCompleteTensor() or value.type().scalarType() not in ("Float", "Double", "Half", "BFloat16"):
        return 0
    return math.prod(value.type().sizes())
