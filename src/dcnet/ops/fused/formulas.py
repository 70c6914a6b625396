"""The catalogue's formulas inside Triton kernels: the same code objects, with `m` bound to its Triton twin."""

import ast
from functools import cache
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from dcnet.formulas import Choice, Formula
from dcnet.ops.fused import triton_math, triton_math16

MOST_PARAMETERS = 3  # of one formula, in a kernel


@cache
def jit(formula: Formula, half: bool) -> Any:
    """The formula as a Triton function; `half` where its results are rounded to 16 bits."""
    plain = formula.function
    assert isinstance(plain, FunctionType)
    # tl is for the interpreter, which wants to see it in every function
    bound = FunctionType(
        plain.__code__,
        {**plain.__globals__, "m": triton_math16 if half else triton_math, "tl": tl},
        plain.__name__,
        plain.__defaults__,
    )
    bound.__module__ = plain.__module__
    function = triton.jit(bound)
    if isinstance(function, triton.JITFunction):
        # The compiler looks up the annotations too, as if they were part of the arithmetic: `positive` is none of its business.
        tree = ast.parse(function.src)
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        for argument in definition.args.args:
            argument.annotation = None
        function._unsafe_update_src(ast.unparse(tree))
    return function


def arguments(choice: Choice, overrides: dict[str, float], first_learned: int) -> tuple[int, list[float], list[int]]:
    """How many parameters a formula has, their fixed values, and which row of the learned ones each takes (−1: fixed)."""
    values = dict(choice.values) | overrides
    names = list(choice.formula.parameters)
    fixed = [values.get(name, 0.0) for name in names]
    rows = [first_learned + choice.learned.index(name) if name in choice.learned else -1 for name in names]
    padding = MOST_PARAMETERS - len(names)
    return len(names), fixed + [0.0] * padding, rows + [-1] * padding
