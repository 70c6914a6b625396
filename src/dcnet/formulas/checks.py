"""What a formula must satisfy to enter the catalogue: code the kernels can run, and right slopes."""

import dis
import math
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from dcnet.formulas import m
from dcnet.formulas.catalogue import Formula
from dcnet.util.suggest import nearest

_REFUSED = {
    "**": "use m.power",
    "//": "it has no slope",
    "%": "it has no slope",
    "@": "a formula acts on each element by itself",
}


def check_code(kind: str, function: Any) -> None:
    """Raise unless the function uses its arguments, literals and `m` alone, without branches.

    The code object is read, not the source: the GPU kernels run the same code with `m` bound to another module, and
    compiled Triton refuses other globals where its interpreter lets them pass.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"a {kind} must be a plain function, got {type(function).__name__}")
    where = f"{kind} {function.__name__!r}"
    code = function.__code__
    if code.co_freevars or code.co_cellvars:
        names = ", ".join(code.co_freevars + code.co_cellvars)
        raise ValueError(
            f"{where} uses {names} from the function around it; a formula uses its arguments, literals and m"
        )
    jumps = {*dis.hasjrel, *dis.hasjabs}
    of_m = False  # whether the value on top of the stack is `m`
    for step in dis.get_instructions(code):
        name = step.opname
        if step.opcode in jumps or name in ("RETURN_GENERATOR", "RAISE_VARARGS"):
            raise ValueError(
                f"{where} branches, loops or raises at line {_line(step, code)}; use m.where, m.minimum or m.step"
            )
        if name in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "IMPORT_NAME") and step.argval != "m":
            raise ValueError(
                f"{where} uses the global name {step.argval!r}; a formula uses its arguments, literals and m"
            )
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            if not of_m:
                raise ValueError(
                    f"{where} uses the attribute .{step.argval}; call functions of m instead, as in m.{step.argval}(…)"
                )
            if step.argval not in m.NAMES:
                raise ValueError(
                    f"{where} uses m.{step.argval}.{nearest(step.argval, m.NAMES)} m has: {', '.join(sorted(m.NAMES))}"
                )
        if name == "BINARY_OP" and step.argrepr.endswith("="):
            raise ValueError(
                f"{where} uses {step.argrepr}, which would change its argument; write a = a {step.argrepr[:-1]} b"
            )
        if name == "BINARY_OP" and step.argrepr in _REFUSED:
            raise ValueError(f"{where} uses the operator {step.argrepr}: {_REFUSED[step.argrepr]}")
        if name not in ("CACHE", "PRECALL", "PUSH_NULL"):
            of_m = name == "LOAD_GLOBAL"
    if "m" in code.co_names and function.__globals__.get("m") is not m:
        raise ValueError(f"{where}: its m is not dcnet's; write 'from dcnet import m'")


def _line(step: dis.Instruction, code: Any) -> int:
    line = getattr(step, "line_number", None) or (step.positions.lineno if step.positions else None)
    return line or code.co_firstlineno


# One-sided differences with this step are off by about 1e-6 · the second derivative.
_STEP = 1e-6
_TOLERANCE = 1e-4


def check_slopes(formula: Formula) -> Formula:
    """Return the formula with `uses_norm` filled in; raise if a slope is not the derivative of its value."""
    names = ["n" if formula.kind == "magnitude" else "c", *(["rho"] if formula.has_radius else []), *formula.learnable]
    moves = False  # whether the value depends on ‖x‖ (or cos θ) at all
    for point in _points(formula):
        results = _evaluate(formula, point, len(names) + 1)
        here = results[0]
        if not bool(torch.isfinite(here).all()):
            raise ValueError(
                f"{formula.kind} {formula.name!r} is not finite at {_describe(point, ~torch.isfinite(here))}"
            )
        for name, slope in zip(names, results[1:], strict=True):
            left = (here - _evaluate(formula, _moved(point, name, -_STEP))[0]) / _STEP
            right = (_evaluate(formula, _moved(point, name, _STEP))[0] - here) / _STEP
            # At a kink left and right disagree, and any slope between them will do.
            tolerance = _TOLERANCE * (1.0 + torch.maximum(left.abs(), right.abs()))
            wrong = (
                (slope < torch.minimum(left, right) - tolerance)
                | (slope > torch.maximum(left, right) + tolerance)
                | slope.isnan()
            )
            if bool(wrong.any()):
                i = int(wrong.nonzero()[0])
                raise ValueError(
                    f"{formula.kind} {formula.name!r}: its slope in {name} is {slope[i]:.6g} at "
                    f"{_describe(point, wrong)}, "
                    f"but its value changes at the rate {0.5 * (left[i] + right[i]):.6g} there",
                )
            moves |= name == names[0] and bool((slope != 0).any())
    if formula.kind == "magnitude" and formula.bounded:
        _check_bound(formula)
    if formula.kind == "angular" and not moves:
        raise ValueError(f"angular {formula.name!r} does not depend on cos θ")
    return replace(formula, uses_norm=moves) if formula.kind == "magnitude" else formula


def _points(formula: Formula) -> Iterator[dict[str, Tensor]]:
    """Set of arguments: random ones with random parameters, then the likely kinks with the default parameters."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    count = 48

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")

    first = "n" if formula.kind == "magnitude" else "c"
    for draw in range(5 if first == "n" else 3):
        if draw < 3:
            point = {first: uniform(0.05, 5.0) if first == "n" else uniform(-0.99, 0.99)}
            if formula.has_radius:
                point["rho"] = uniform(0.2, 3.0)
        else:  # from the norm that eps leaves of an empty patch to those of wide layers
            point = {"n": 10.0 ** uniform(-2.0, 2.0)}
            if formula.has_radius:
                point["rho"] = point["n"] * 10.0 ** uniform(-1.2, 1.2)
        for name, parameter in formula.parameters.items():
            low = (
                -2.0
                if math.isinf(parameter.range.low)
                else parameter.range.low + (0.1 if parameter.range.open else 1e-3)
            )
            point[name] = (
                torch.full((count,), parameter.default, dtype=torch.float64, device="cpu")
                if draw in (0, 3)
                else uniform(low, low + 2.0)
            )
        yield point
    kinks = torch.tensor([0.25, 1.0, 3.0] if first == "n" else [-0.5, 0.0, 0.5], dtype=torch.float64, device="cpu")
    point = {first: kinks, **({"rho": kinks} if formula.has_radius else {})}
    yield point | {name: torch.full_like(kinks, parameter.default) for name, parameter in formula.parameters.items()}


def _evaluate(formula: Formula, point: dict[str, Tensor], expected: int | None = None) -> list[Tensor]:
    where = f"{formula.kind} {formula.name!r}"
    values = list(point.values())
    results: Any = formula.function(*values)
    if expected is not None:
        slopes = [
            "‖x‖" if formula.kind == "magnitude" else "cos θ",
            *(["ρ"] if formula.has_radius else []),
            *formula.learnable,
        ]
        if not isinstance(results, tuple) or len(results) != expected:
            got = f"{len(results)} results" if isinstance(results, tuple) else type(results).__name__
            raise ValueError(
                f"{where} must return its value, then its slopes in {', '.join(slopes)} ({expected} results), got {got}"
            )
        for result in results:
            if not isinstance(result, Tensor | float | int):
                raise ValueError(f"{where} returned a {type(result).__name__}; tensors and numbers are possible")
    like = values[0]
    return [torch.as_tensor(result, dtype=like.dtype, device=like.device).expand_as(like) for result in results]


def _moved(point: dict[str, Tensor], name: str, by: float) -> dict[str, Tensor]:
    return {**point, name: point[name] + by}


def _describe(point: dict[str, Tensor], wrong: Tensor) -> str:
    i = int(wrong.nonzero()[0])
    return ", ".join(f"{name}={float(value[i]):.4g}" for name, value in point.items())


def _check_bound(formula: Formula) -> None:
    """Raise where a bounded magnitude still grows at ‖x‖ a million times the radius."""
    far = torch.tensor([1e6, 1e12], dtype=torch.float64, device="cpu")
    point = {"n": far, **({"rho": torch.ones_like(far)} if formula.has_radius else {})}
    near, further = _evaluate(
        formula, point | {p.name: torch.full_like(far, p.default) for p in formula.parameters.values()}
    )[0].tolist()
    if abs(further) > abs(near) * 1.01 + 1e-9:
        raise ValueError(
            f"magnitude {formula.name!r} is registered as bounded, but is {near:.4g} at ‖x‖ = 1e6 and "
            f"{further:.4g} at 1e12"
        )
