"""The decoupled convolution for autograd: an ordinary function in eager mode, the operators of `library.py` in compiled graphs.

Going through `torch.library` costs a third of a millisecond a call in eager mode, more than many of our kernels.
"""

from typing import Any

import torch
from torch import Tensor

from dcnet.ops.fused.backward import backward
from dcnet.ops.fused.call import call_of
from dcnet.ops.fused.forward import forward
from dcnet.ops.fused.layout import elsewhere
from dcnet.ops.fused.library import in_graph
from dcnet.ops.fused.once import differentiable_once
from dcnet.ops.fused.operands import Effects, Kept, Operands, Options, arrived, operand_gradients, wanted_output


@differentiable_once
def _gradients(ctx: Any, e: Tensor | None, of_left: Tensor | None) -> tuple[Any, ...]:
    call, wanted = ctx.call, ctx.needs_input_grad[2:]
    dot, norms, unit, vectors, out, x, weight, bias, radius, mean_norm, learned, slope = ctx.saved_tensors
    e, out = arrived(e, of_left, out, dot, call.options)
    t = Operands(x, weight, bias, radius, mean_norm, learned, None, None, None, None, None, slope, None)
    gradients = backward(
        call, e, of_left, t, Kept(dot, norms, unit, vectors), out, wanted[0], wanted[1], add=call.maps == 0
    )
    return None, None, *operand_gradients(gradients, e, call.of_vectors, t, call.options, wanted, call.maps)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Options, effects: Effects, *tensors: Any) -> tuple[Tensor, Tensor | None]:
        t = Operands(*tensors)
        call = ctx.call = call_of(t, options)
        out, left, kept = forward(call, t, effects)
        if left is not None:
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            *kept, wanted_output(out, t, options), t.x, t.weight, t.bias, t.radius, t.mean_norm, t.learned, t.slope
        )
        return out, left

    backward = staticmethod(_gradients)


# Function.apply without its preparations for function transforms, which `dispatch.py` does not let through to here
_apply = super(torch.autograd.Function, _Eager).apply


def decoupled(operands: Operands, options: Options, effects: Effects) -> tuple[Tensor, Tensor | None]:
    """The output, and its energy if that is to be left."""
    x, weight = operands[:2]
    differentiable = torch.is_grad_enabled() and (
        x.requires_grad
        or weight.requires_grad
        or any(tensor is not None and tensor.requires_grad for tensor in operands)
    )
    if torch.compiler.is_compiling():
        return in_graph(operands, options, effects, differentiable)
    if elsewhere(x):
        with torch.cuda.device(x.device):
            return decoupled(operands, options, effects)
    if differentiable:  # the engine runs backward on the same device
        return _apply(options, effects, *operands)
    return forward(call_of(operands, options), operands, effects, keep=False)[:2]
