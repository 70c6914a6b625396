"""The decoupled convolution for autograd: an autograd function in eager mode, the operators of `library.py` in graphs.

In eager mode a call through `torch.library` costs a third of a millisecond, more than many kernels. The autograd
function exists twice: in C++ (`host.py`), for common layers and once it is built, and here in Python.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dcnet.ops.fused.host import HOST, gradients_of_saved, output_shape
from dcnet.ops.fused.launcher import Memory, Place
from dcnet.ops.fused.layout import dense, elsewhere, like
from dcnet.ops.fused.library import in_graph
from dcnet.ops.fused.native import Launches
from dcnet.ops.fused.norm_plan import KernelPlan
from dcnet.ops.fused.once import differentiable_once
from dcnet.ops.fused.op import forward
from dcnet.ops.fused.operands import Effects, Operands, Options, Results, for_backward, wanted_output
from dcnet.ops.fused.plan import Plan, plan_of
from dcnet.util.compat import unprepared_apply, wanted_gradients
from dcnet.util.compat_triton import hash_triton


class _Decoupled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, effects: Effects, *tensors: Any) -> Results:
        t = Operands(*tensors)
        ctx.plan = plan
        results, kept = forward(plan, t, effects)
        if results.energy is not None:
            ctx.set_materialize_grads(False)
        # a depthwise layer's dot products and norms, two maps, are quick to compute again
        dot = None if plan.depthwise or plan.options.recovers else kept.dot
        norms = None if plan.depthwise else kept.norms
        ctx.save_for_backward(dot, norms, *kept[2:], wanted_output(results.out, t, plan.options), *for_backward(t))
        return results

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        return None, None, *gradients_of_saved(ctx.plan, incoming, ctx.saved_tensors, wanted_gradients(ctx)[2:])


# safe because `dispatch.py` sends function transforms elsewhere
_apply = unprepared_apply(_Decoupled)


def decoupled(operands: Operands, options: Options, effects: Effects) -> Results:
    """Return the output, and its energy if the options ask for it."""
    x = operands.x
    if torch.compiler.is_compiling():
        return in_graph(operands, options, effects, _differentiable(operands))
    native = HOST.ready(x)
    if native is not None:
        found = native.run(options, operands, effects)
        if found is not None:
            return Results(*found)
    if elsewhere(x):
        with torch.cuda.device(x.device):
            return decoupled(operands, options, effects)
    if x.is_cuda:
        hash_triton()
    with torch.no_grad():  # a new plan runs a trial convolution, which autograd must not record
        plan = plan_of(operands, options)
    residual = operands.residual
    if residual is not None and residual.shape != (shape := output_shape(plan)):  # kernels do not broadcast
        operands = operands._replace(residual=residual.expand(shape))
    if _differentiable(operands):  # the engine runs backward on the same device
        results = Results(*_apply(plan, effects, *operands))
    else:
        results, _ = forward(plan, operands, effects, keep=False)
    HOST.learn(plan, operands, options)
    return results


def _differentiable(operands: Operands) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)


@lru_cache(1024)
def _launchers(kernels: int, size: int, eps: float, *_for: torch.dtype | torch.device) -> tuple[Launches, Launches]:
    ahead = {"w_ptr": Place(0), "unit_ptr": Place(1), "w_norm_ptr": Place(2)}
    back = {"w_ptr": Place(0), "e_unit_ptr": Place(1), "grad_ptr": Place(2), "w_norm_ptr": Place(3), "e_norm_ptr": None}
    plan = KernelPlan(kernels, size, ahead, back, eps)
    return Launches(plan.forward()), Launches(plan.backward())


class _UnitKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        norm = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
        unit = torch.empty_like(weight, dtype=dtype)
        size = weight.numel() // weight.shape[0]
        ctx.launchers = _launchers(weight.shape[0], size, eps, weight.dtype, dtype, weight.device)
        ctx.launchers[0](Memory((weight, unit, norm)))
        ctx.save_for_backward(weight, norm)
        return unit

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        weight, norm = ctx.saved_tensors
        grad = torch.empty_like(weight)
        ctx.launchers[1](Memory((weight, like(e, weight), grad, norm)))
        return grad, None, None


def unit_kernel(weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return w/‖w‖ in the given dtype, for operators that need nothing else; one launch forward, one backward."""
    return _UnitKernel.apply(dense(weight), eps, dtype)
