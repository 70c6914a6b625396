"""Compile the formulas of the catalogue for Triton: the same code objects, with `m` bound to its Triton twin."""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from dcnet.formulas import Choice
from dcnet.ops.fused import triton_math, triton_math16
from dcnet.util.compat_triton import without_annotations


@cache
def jit(plain: Callable[..., Any], half: bool) -> Any:
    """Return a formula's function for Triton; half: whether its results are rounded to 16 bits."""
    assert isinstance(plain, FunctionType)
    # Triton's interpreter needs tl in every function
    names = {**plain.__globals__, "m": triton_math16 if half else triton_math, "tl": tl}
    bound = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__)
    bound.__module__ = plain.__module__
    return without_annotations(triton.jit(bound))


def arguments(
    letter: str, choice: Choice, half: bool, overrides: dict[str, float], first_learned: int
) -> dict[str, Any]:
    """Return the arguments of a kernel for a formula, by name.

    They are the function, the values of its parameters, and for each parameter its row among the learned ones (−1 for
    a parameter that is not learned).
    """
    values, names = dict(choice.values) | overrides, list(choice.formula.parameters)
    rows = [first_learned + choice.learned.index(name) if name in choice.learned else -1 for name in names]
    fixed = tuple(values.get(name, 0.0) for name in names)
    return {letter: jit(choice.formula.function, half), f"{letter}_FIXED": fixed, f"{letter}_ROWS": tuple(rows)}
