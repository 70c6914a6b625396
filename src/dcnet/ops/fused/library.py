"""The decoupled convolution for autograd: an ordinary function in eager mode, `torch.library` operators for compiled graphs.

Going through `torch.library` costs a third of a millisecond a call in eager mode, more than many of our kernels. A registered operator with
a gradient may not write to its inputs either, so in a compiled graph the running averages move afterwards; in eager mode the kernels
move them on the way.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dcnet.ops.fused.backward import backward
from dcnet.ops.fused.call import READ_BY_BACKWARD, call_of, convolution
from dcnet.ops.fused.forward import forward
from dcnet.ops.fused.launch import energy_maps
from dcnet.ops.fused.operands import GIVEN, Effects, Gradients, Kept, Operands, Options, operand_gradients, places, vector_places
from dcnet.ops.fused.plan import Plan

TENSORS, KEPT = len(Operands._fields), len(Kept._fields)
NO_EFFECTS = Effects()


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Options, effects: Effects, *tensors: Any) -> tuple[Tensor, Tensor | None]:
        t = Operands(*tensors)
        call = ctx.call = call_of(t, options)
        out, left, kept = forward(call, t, effects)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept, _wanted_output(out, t, options), t.x, t.weight, t.bias, t.radius, t.mean_norm, t.learned, t.slope)
        return out, left

    @staticmethod
    def backward(ctx: Any, e: Tensor | None, of_left: Tensor | None) -> tuple[Any, ...]:
        # with create_graph=True: the gradients, from which a second derivative is an error
        return _once(ctx, e, of_left) if torch.is_grad_enabled() else _gradients(ctx, e, of_left)


def _gradients(ctx: Any, e: Tensor | None, of_left: Tensor | None) -> tuple[Any, ...]:
    call, wanted = ctx.call, ctx.needs_input_grad[2:]
    dot, norms, unit, vectors, out, x, weight, bias, radius, mean_norm, learned, slope = ctx.saved_tensors
    if e is None:
        e = torch.zeros_like(dot)
    t = Operands(x, weight, bias, radius, mean_norm, learned, None, None, None, None, None, slope, None)
    out = out if _depends_on_output(call.options, of_left) else None
    gradients = backward(call, e, of_left, t, Kept(dot, norms, unit, vectors), out, wanted[0], wanted[1], add=call.maps == 0)
    return None, None, *operand_gradients(gradients, e, call.of_vectors, t, call.options, wanted, call.maps)


_once = once_differentiable(_gradients)

# Function.apply without its preparations for function transforms, which `dispatch.py` does not let through to here
_apply = super(torch.autograd.Function, _Eager).apply


def _wanted_output(out: Tensor, operands: Operands, options: Options) -> Tensor | None:
    """The output where backward may need it; elsewhere it is computed again."""
    return out if operands.residual is not None and (options.activation != 0 or options.leaves) else None


def _depends_on_output(options: Options, of_left: Tensor | None) -> bool:
    """Whether the gradient behind the residual's addition depends on the sum."""
    return options.activation != 0 or of_left is not None


def elsewhere(x: Tensor) -> bool:
    """Whether x is not on the current device, where kernels run."""
    return x.is_cuda and x.get_device() != torch.cuda.current_device()


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of x the current one."""
    return torch.cuda.device(x.device) if elsewhere(x) else _HERE


_HERE: AbstractContextManager[Any] = nullcontext()


def decoupled(operands: Operands, options: Options, effects: Effects) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output, and its energy if that is to be left; in a compiled graph also `Kept.vectors`, for averages that are still to be moved."""
    x, weight = operands[:2]
    differentiable = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or any(tensor is not None and tensor.requires_grad for tensor in operands)
    )
    if not torch.compiler.is_compiling():
        if elsewhere(x):
            with torch.cuda.device(x.device):
                return decoupled(operands, options, effects)
        if differentiable:  # the engine runs backward on the same device
            return *_apply(options, effects, *operands), None
        return *forward(call_of(operands, options), operands, effects, keep=False)[:2], None
    if not differentiable and effects == NO_EFFECTS:
        out, left = torch.ops.dcnet.decoupled_inference(*operands, *options)
        return out, left if options.leaves else None, None
    out, left, *kept = torch.ops.dcnet.decoupled(*operands, *options)
    return out, left if options.leaves else None, kept[-1]


# -- for compiled graphs -----------------------------------------------------------------------------------------------

_OPTIONS = (
    "int[] stride, int[] padding, int[] dilation, int groups, float eps, int radius_kind, int mean_kind, int follows, float norm_eps, "
    "int activation, str magnitude, str angular, str weighting, bool leaves"
)
_OPERANDS = "Tensor x, Tensor weight, " + ", ".join(f"Tensor? {name}" for name in Operands._fields[2:])
_KEPT = ", ".join(f"Tensor {name}" for name in Kept._fields)
_LIBRARY = torch.library.Library("dcnet", "FRAGMENT")


def _options(arguments: Sequence[Any]) -> Options:
    """The options out of an operator's arguments, which come with lists."""
    stride, padding, dilation, *rest = arguments
    return Options(tuple(stride), tuple(padding), tuple(dilation), *rest)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    t, o = Operands(*arguments[:TENSORS]), _options(arguments[TENSORS:])
    with on_device(t.x):
        out, left, kept = forward(call_of(t, o), t, NO_EFFECTS)
    return out, kept.vectors.new_empty(0) if left is None else left, *kept


def _inference(*arguments: Any) -> tuple[Tensor, Tensor]:
    t, o = Operands(*arguments[:TENSORS]), _options(arguments[TENSORS:])
    with on_device(t.x):
        out, left, kept = forward(call_of(t, o), t, NO_EFFECTS, keep=False)
    return out, kept.vectors.new_empty(0) if left is None else left


def _inference_fake(*arguments: Any) -> tuple[Tensor, ...]:
    return _forward_fake(*arguments)[:2]


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    t, o = Operands(*arguments[:TENSORS]), Options(*arguments[TENSORS:])
    unit = torch.empty_like(t.weight, dtype=t.x.dtype)
    dot = convolution(t.x, unit, o)
    norms = t.x.new_empty((t.x.shape[0], o.groups, *dot.shape[2:]), dtype=torch.float32)
    size = places(t.weight.shape[0], o.groups, o.mean_kind, o.follows, o.weighting).size
    left = norms.new_empty((energy_maps(t.weight.shape[0], o.groups), *norms.shape) if o.leaves else 0)
    return torch.empty_like(dot), left, dot, norms, unit, norms.new_empty(size)


def _backward(
    e: Tensor, of_left: Tensor | None, out: Tensor | None, want_x: bool, want_weight: bool, *arguments: Any
) -> tuple[Tensor, ...]:
    t, kept, o = Operands(*arguments[:TENSORS]), Kept(*arguments[TENSORS : TENSORS + KEPT]), _options(arguments[TENSORS + KEPT :])
    with on_device(t.x):
        gradients = backward(call_of(t, o, kept.dot), e, of_left, t, kept, out, want_x, want_weight, add=False)
    return tuple(e.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _backward_fake(
    e: Tensor, of_left: Tensor | None, out: Tensor | None, want_x: bool, want_weight: bool, *arguments: Any
) -> tuple[Tensor, ...]:
    t, kept, o = Operands(*arguments[:TENSORS]), Kept(*arguments[TENSORS : TENSORS + KEPT]), Options(*arguments[TENSORS + KEPT :])
    parts = Plan.parts(t.weight.shape[0] // o.groups)
    return (
        torch.empty_like(t.x) if want_x else e.new_empty(0),
        kept.vectors.new_empty((t.x.shape[0], o.groups, *t.x.shape[2:]) if want_x else 0),
        torch.empty_like(t.weight) if want_weight else e.new_empty(0),
        kept.vectors.new_empty(vector_places(t, o).slope.stop),
        kept.vectors.new_empty(o.groups * parts if o.mean_kind == GIVEN else 0),
        e.new_empty(0) if out is None else torch.empty_like(kept.dot),
    )


class _Traced(torch.autograd.Function):
    """For whoever traces `decoupled`: what is found in it are operators without a gradient, which are called with less ado."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        operands, ctx.options = Operands(*arguments[:TENSORS]), Options(*arguments[TENSORS:])
        out, left, *kept = _below_autograd(*arguments)
        ctx.mark_non_differentiable(*kept, *[] if ctx.options.leaves else [left])
        ctx.set_materialize_grads(False)
        ctx.maps = 0 if operands.energy is None else operands.energy.shape[0]
        saved = [tensor if name in READ_BY_BACKWARD else None for name, tensor in zip(Operands._fields, operands, strict=True)]
        ctx.save_for_backward(*saved, *kept, _wanted_output(out, operands, ctx.options))
        return out, left, *kept

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return _gradient(ctx, *gradients)


def _below_autograd(*arguments: Any) -> tuple[Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.dcnet.decoupled_forward(*arguments)


def _with_gradient(*arguments: Any) -> tuple[Tensor, ...]:
    wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in arguments[:TENSORS])
    return (_Traced.apply if wanted else _below_autograd)(*arguments)


def _gradient(ctx: Any, e: Tensor | None, of_left: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if e is None and of_left is None:
        return (None,) * (TENSORS + len(ctx.options))
    *saved, out = ctx.saved_tensors
    o, operands, kept = ctx.options, Operands(*saved[:TENSORS]), Kept(*saved[TENSORS:])
    if e is None:
        e = torch.zeros_like(kept.dot)
    if of_left is not None:
        of_left = of_left[:1]  # its maps' gradients are all the same
    if not _depends_on_output(o, of_left):
        out = None
    wanted = ctx.needs_input_grad[:TENSORS]
    gradients = Gradients(*torch.ops.dcnet.decoupled_backward(e, of_left, out, *wanted[:2], *saved, *o))
    if out is None:
        gradients = gradients._replace(residual=None)
    if wanted[0] and ctx.maps == 0 and gradients.x is not None and gradients.products is not None:
        x = operands.x.unflatten(1, (o.groups, -1)).float() * gradients.products.unsqueeze(2)
        gradients = gradients._replace(x=(gradients.x.float() + x.flatten(1, 2)).to(operands.x.dtype))
    return *operand_gradients(gradients, e, vector_places(operands, o), operands, o, wanted, ctx.maps), *[None] * len(o)


def _register(name: str, signature: str, implementation: Any, fake: Any) -> None:
    # Defined directly rather than by `torch.library.custom_op`, whose checks of every call cost more than the launches.
    # PyTorch's caches on disk know an operator by its name: between releases, one whose results change needs a new name.
    _LIBRARY.define(f"{name}({signature}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dcnet::{name}", fake, lib=_LIBRARY)


_register("decoupled_inference", f"{_OPERANDS}, {_OPTIONS}) -> (Tensor, Tensor)", _inference, _inference_fake)
for _name in ("decoupled", "decoupled_forward"):
    _register(_name, f"{_OPERANDS}, {_OPTIONS}) -> ({', '.join(['Tensor'] * (2 + KEPT))})", _forward, _forward_fake)
_LIBRARY.impl("decoupled", _with_gradient, "Autograd")
_register(
    "decoupled_backward",  # without a gradient: a second derivative is an error, not a wrong number
    f"Tensor e, Tensor? of_left, Tensor? out, bool want_x, bool want_weight, {_OPERANDS}, {_KEPT}, {_OPTIONS}) "
    f"-> ({', '.join(['Tensor'] * len(Gradients._fields))})",
    _backward,
    _backward_fake,
)
