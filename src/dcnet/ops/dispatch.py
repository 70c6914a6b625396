"""Choose the implementation. Only this module decides that.

There are four with the same results: `reference` (slow, obvious), `Composite` (ordinary PyTorch operations),
`AutogradFunctions` (few passes over memory) and `fused` (Triton kernels). `impl="eager"` is one of the middle two.
"""

import inspect
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dcnet.formulas import Formula
from dcnet.ops import reference
from dcnet.ops.checks import check_impl
from dcnet.ops.composite import Composite
from dcnet.ops.cpu import AutogradFunctions
from dcnet.ops.geometry import Geometry
from dcnet.ops.inputs import Inputs
from dcnet.ops.operator import Operator
from dcnet.util.compat import function_transform_active, only_ordinary_operations, recorded_by_jit

_COMPOSITE, _AUTOGRAD_FUNCTIONS = Composite(), AutogradFunctions()
_fused: Any = None  # `dcnet.ops.fused` once it is imported, which needs Triton


def decouple(inputs: Inputs, impl: str) -> tuple[Tensor, Tensor | None]:
    """Return the decoupled convolution (over no dimensions, the linear map) after its post-ops, and its energy.

    x may lack the batch dimension; for a linear map it may have any leading dimensions. The energy is None unless it
    is wanted and the implementation computes it.
    """
    x, geometry = inputs.x, inputs.geometry
    if not torch.compiler.is_compiling() and _fused is not None and (impl == "fused" or (impl == "auto" and x.is_cuda)):
        results = _fused.again(inputs)
        if results is not None:
            return results
    if geometry.dims == 0 and x.dim() == 0:
        raise ValueError("input must be (…, in_features), got a single number")
    if geometry.dims == 0:
        flat = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    elif x.dim() not in (geometry.dims + 1, geometry.dims + 2):
        dims = f"{geometry.dims + 1} (unbatched) or {geometry.dims + 2} dimensions"
        raise ValueError(f"input must have {dims}, got the shape {tuple(x.shape)}")
    else:
        flat = x if x.dim() == geometry.dims + 2 else x.unsqueeze(0)
    if not recorded_by_jit():  # otherwise the convolution checks sizes, with less helpful errors
        _check_sizes(x, flat, inputs.weight, geometry)
    y, energy = _choose(inputs if flat is x else inputs._replace(x=flat), impl)
    if flat is not x:
        y = y.reshape(*x.shape[:-1], y.shape[1]) if geometry.dims == 0 else y.squeeze(0)
    return y, energy


def _choose(inputs: Inputs, impl: str) -> tuple[Tensor, Tensor | None]:
    """Return the result of the implementation asked for; "auto" takes the fastest that can run.

    Raise where the implementation asked for cannot run.
    """
    check_impl(impl)
    if impl == "fused" or (impl == "auto" and inputs.x.is_cuda):
        reasons = reasons_against_fused(inputs)
        if not reasons:
            return _import_fused().decouple(inputs)
        if impl == "fused":
            raise ValueError(f"impl='fused' cannot run here: {'; '.join(reasons)}")
    if impl == "reference":
        y = reference.decouple(inputs)
        return y if inputs.post_ops is None else inputs.post_ops.apply(y), None
    return eager().decouple(inputs), None


def _import_fused() -> Any:
    from dcnet.ops import fused

    if not torch.compiler.is_compiling():  # a graph that reads this global would be recompiled when it changes
        global _fused
        _fused = fused
    return fused


def eager() -> Composite:
    """Return the implementation of `impl="eager"` that can run now."""
    return _COMPOSITE if only_ordinary_operations() else _AUTOGRAD_FUNCTIONS


def reasons_against_fused(inputs: Inputs) -> list[str]:
    """Return every reason why the fused kernels cannot compute this; none if they can."""
    reasons: list[str] = []
    if not torch.compiler.is_compiling():  # a trace cannot look for source code; compiling the kernels would raise
        reasons += _reasons_against_operator(inputs.operator)
    if not inputs.x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append(f"the input is on {inputs.x.device}, and the kernels need a CUDA device (or TRITON_INTERPRET=1)")
    if inputs.x.dtype == torch.float64:
        reasons.append("the input is float64, and the kernels compute in float32")
    if recorded_by_jit():
        reasons.append("torch.jit.trace is recording, and cannot look into the kernels")
    if function_transform_active():
        reasons.append("a function transform (vmap, jvp, …) is active, and the kernels have no rules for it")
    return reasons


@cache
def _reasons_against_operator(operator: Operator) -> tuple[str, ...]:
    absent = () if find_spec("triton") is not None else ("Triton is not installed",)
    formulas = operator.magnitude.formula, operator.angular.formula
    return sum(map(_reasons_against_formula, formulas), absent)


def _reasons_against_formula(formula: Formula) -> tuple[str, ...]:
    try:
        inspect.getsource(formula.function)
    except (OSError, TypeError):
        return (f"the source of the {formula.kind} {formula.name!r} cannot be read (define it in a file)",)
    return ()


def _check_sizes(x: Tensor, flat: Tensor, weight: Tensor, geometry: Geometry) -> None:
    """Raise where the input, or the groups, do not fit the kernels."""
    expected = weight.shape[1] * geometry.groups
    if flat.shape[1] != expected:
        what = "features" if geometry.dims == 0 else "channels"
        raise ValueError(f"input has {flat.shape[1]} {what}, the layer expects {expected} (shape {tuple(x.shape)})")
    if weight.shape[0] % geometry.groups:
        raise ValueError(f"groups={geometry.groups} does not divide the {weight.shape[0]} kernels of the weight")
    geometry.check_fits(flat.shape[2:])
