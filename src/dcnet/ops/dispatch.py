"""Which implementation computes: the one asked for, or the fastest that can."""

import inspect
import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from dcnet.formulas import Formula
from dcnet.ops import eager, reference
from dcnet.ops.inputs import Inputs
from dcnet.ops.norms import recorded_by_jit
from dcnet.util.suggest import nearest

IMPLEMENTATIONS = ("reference", "eager", "fused")


def check_impl(impl: object) -> None:
    """Raises unless this names an implementation."""
    if impl not in IMPLEMENTATIONS and impl != "auto":
        raise ValueError(
            f"unknown impl {impl!r}.{nearest(str(impl), IMPLEMENTATIONS)} Possible: 'auto', {', '.join(map(repr, IMPLEMENTATIONS))}"
        )


def decouple_by(impl: str, inputs: Inputs) -> Tensor:
    """The decoupled convolution by that implementation; an explicit one that cannot run raises, and never falls back."""
    check_impl(impl)
    reasons = reasons_against_fused(inputs) if impl == "fused" or (impl == "auto" and inputs.x.is_cuda) else []
    if impl == "auto":
        impl = "fused" if inputs.x.is_cuda and not reasons else "eager"
    if impl == "reference":
        y = reference.decouple(inputs)
        return y if inputs.finish is None else inputs.finish.apply(y)
    if impl == "eager":
        return eager.decouple(inputs)
    if reasons:
        raise ValueError(f"impl='fused' cannot run here: {'; '.join(reasons)}")
    from dcnet.ops import fused  # needs Triton

    return fused.decouple(inputs)


def reasons_against_fused(inputs: Inputs) -> list[str]:
    """Every reason why the fused kernels cannot compute this; none if they can."""
    reasons = []
    if not torch.compiler.is_compiling() and not _triton_present():
        reasons.append("Triton is not installed")
    if not inputs.x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append(f"the input is on {inputs.x.device}, and the kernels need a CUDA device (or TRITON_INTERPRET=1)")
    if inputs.x.dtype == torch.float64:
        reasons.append("the input is float64, and the kernels compute in float32")
    if (
        not torch.compiler.is_compiling()
    ):  # looking for source code is nothing to trace; the kernels would say so themselves
        for formula in (inputs.operator.magnitude.formula, inputs.operator.angular.formula):
            reasons += _reasons_against_formula(formula)
    if recorded_by_jit():
        reasons.append("torch.jit.trace is recording, and cannot look into the kernels")
    if torch._C._are_functorch_transforms_active():
        reasons.append("a function transform (vmap, jvp, …) is active, and the kernels have no rules for it")
    return reasons


@cache
def _triton_present() -> bool:
    return find_spec("triton") is not None


@cache
def _reasons_against_formula(formula: Formula) -> tuple[str, ...]:
    reasons = []
    if len(formula.parameters) > 3:
        reasons.append(
            f"the {formula.kind} {formula.name!r} has {len(formula.parameters)} parameters, and the kernels take 3"
        )
    try:
        inspect.getsource(formula.function)
    except (OSError, TypeError):
        reasons.append(f"the source of the {formula.kind} {formula.name!r} cannot be read (define it in a file)")
    return tuple(reasons)
