"""Compile the kernels of a plan in parallel, before the first of them runs.

A new kind of layer needs up to eight variants. Compiled one after the other, they took half a minute. The variants for
backward compile while forward goes on to the next layers.
"""

from typing import Any

import torch
from torch import Tensor

from dcnet.ops.fused.compilers import KernelCompilers, most_processes
from dcnet.ops.fused.native import Launches, compiled_launcher
from dcnet.ops.fused.operands import BACKWARD, FORWARD, Effects, Operands, tracking, wanted_output
from dcnet.ops.fused.plan import Backward, Plan

# slots with the dtype of x, and with that of the weight
_MAPS = ("x", "residual", "unit", "dot", "out", "e", "e_more", "grad_d", "behind", "grad_x", "grad_unit")
_KERNELS = ("weight", "grad_weight")
COMPILERS = KernelCompilers(most_processes())
Passes = list[tuple[tuple[str, ...], Launches]]  # each with the names of its slots


def compile_ahead(plan: Plan, t: Operands, effects: Effects, differentiable: bool, in_graph: bool) -> None:
    """Compile what the next forward pass will launch, and the backward pass that is likely to follow it.

    A wrong prediction only costs time.
    """
    if not _compiles(t.x):
        return
    track, _ = tracking(effects, plan.options)
    passes: Passes = [(FORWARD, plan.ahead), (FORWARD, plan.epilogue(track, effects.momentum is not None))]
    ahead = sum(len(launches.launchers) for _, launches in passes)
    if differentiable:
        key = _likely_backward(plan, t, in_graph)
        plan.used.add(key)
        passes += _passes(plan, plan.backward(*key))
    kernels = _warm_up(passes, _given(t, effects))
    compiled_launcher()  # built now, while this thread has to wait anyway
    COMPILERS.wait_for(kernels[:ahead])


def compile_backward(plan: Plan, t: Operands, launchers: Backward) -> None:
    """Start compiling a backward pass that differs from the predicted one; `COMPILERS.wait` waits for it."""
    if _compiles(t.x):
        _warm_up(_passes(plan, launchers), _given(t, Effects()))


def _likely_backward(plan: Plan, t: Operands, in_graph: bool) -> tuple[bool, ...]:
    """Return the arguments of `Plan.backward` that `op.backward` is likely to give it."""
    o = plan.options
    behind = wanted_output(t.x, t, o) is not None
    want_x, want_weight = (True, True) if in_graph else (t.x.requires_grad, t.weight.requires_grad)
    add = (plan.maps == 0 and not in_graph) or not want_x or plan.depthwise
    return behind, o.leaves, add, want_x, want_weight, False


def _passes(plan: Plan, launchers: Backward) -> Passes:
    return [(BACKWARD, plan.again), (BACKWARD, launchers.epilogue), (BACKWARD, launchers.ends)]


def _warm_up(passes: Passes, given: dict[str, Tensor]) -> list[Any]:
    """Start compiling the kernels of passes in the background, and return them; return none if that cannot be done."""
    with COMPILERS.collecting() as can:
        return [
            launcher.warm_up([_dtype(name, given) for name in slots])
            for slots, launches in passes
            if can
            for launcher in launches.launchers
        ]


def _compiles(x: Tensor) -> bool:
    """Tell whether kernels are compiled for the device of x; Triton's interpreter compiles nothing."""
    return x.is_cuda


def _given(t: Operands, effects: Effects) -> dict[str, Tensor]:
    """Return the tensors that exist before the call, by slot."""
    tracked = effects.tracked
    counts = {"batches": effects.batches, "mean_batches": None if tracked is None else tracked.num_batches_tracked}
    return {name: tensor for name, tensor in (t._asdict() | counts).items() if tensor is not None}


def _dtype(name: str, given: dict[str, Tensor]) -> torch.dtype:
    """Return the dtype of the tensor that a slot will hold."""
    if name in given:
        return given[name].dtype
    if name == "batches":
        return torch.int64
    return given["x"].dtype if name in _MAPS else given["weight"].dtype if name in _KERNELS else torch.float32
