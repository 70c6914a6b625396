"""The decoupled convolution in compiled graphs: `torch.library` operators.

A graph is first built with `decoupled`. When its gradient is traced, two operators without gradients take its place,
`decoupled_forward` and `decoupled_backward`. They are faster to call and may write to their inputs: the kernels update
the running averages, as they do in eager mode.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import conv_flop_count, register_flop_formula

from dcnet.ops.fused.graph_sums import rewrite_sums
from dcnet.ops.fused.host import HOST, Host
from dcnet.ops.fused.layout import channels_last_strides, energy_maps, on_device
from dcnet.ops.fused.once import differentiable_once
from dcnet.ops.fused.op import backward, forward
from dcnet.ops.fused.operands import (
    GIVEN,
    OF_RANKS,
    Effects,
    Gradients,
    Kept,
    Operands,
    Options,
    Results,
    arrived,
    as_arguments,
    as_options,
    convolution,
    for_backward,
    gradient_regions,
    is_depthwise,
    operand_gradients,
    output_sizes,
    vector_regions,
    wanted_output,
)
from dcnet.ops.fused.plan import plan_of
from dcnet.ops.fused.tiles import mean_parts
from dcnet.ops.mean_norm import BatchMean
from dcnet.util.compat import below_autograd

TENSORS, KEPT, OPTIONS = len(Operands._fields), len(Kept._fields), 3
NO_EFFECTS = Effects()

_OPERANDS = "Tensor x, Tensor weight, " + ", ".join(f"Tensor? {name}" for name in Operands._fields[2:])
_EFFECTS = (
    "Tensor(a!)? running_norm, Tensor(b!)? mean_batches, float? mean_momentum, "
    "Tensor(c!)? moving_mean, Tensor(d!)? moving_var, Tensor(e!)? batches, float? momentum"
)
_KEPT = ", ".join(f"Tensor {name}" for name in Kept._fields)
_LIBRARY = torch.library.Library("dcnet", "FRAGMENT")


def in_graph(t: Operands, o: Options, effects: Effects, differentiable: bool) -> Results:
    """Return the output, and its energy if the options ask for it, while a graph is traced."""
    options = as_arguments(o)
    if t.residual is not None:
        shape = (t.x.shape[0], t.weight.shape[0], *output_sizes(t.x.shape[2:], t.weight.shape[2:], o))
        if t.residual.shape != shape:  # kernels do not broadcast
            t = t._replace(residual=t.residual.expand(shape))
    if not differentiable and effects == NO_EFFECTS:
        out, left = torch.ops.dcnet.decoupled_inference(*t, *options)
    else:
        tracked, momentum, batches = effects
        mean = (
            (None, None, None)
            if tracked is None
            else (tracked.running_norm, tracked.num_batches_tracked, tracked.momentum)
        )
        norm = (None, None) if momentum is None else (t.running_mean, t.running_var)
        if momentum is not None:
            t = t._replace(running_mean=None, running_var=None)
        out, left, *_ = torch.ops.dcnet.decoupled(*t, *mean, *norm, batches, momentum, *options)
    return Results(out, left if o.leaves else None)


# -- the operators, without gradients ----------------------------------------------------------------------------------


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    t, o = Operands(*arguments[:TENSORS]), as_options(*arguments[-OPTIONS:])
    running_norm, mean_batches, mean_momentum, moving_mean, moving_var, batches, momentum = arguments[TENSORS:-OPTIONS]
    if momentum is not None:
        t = t._replace(running_mean=moving_mean, running_var=moving_var)
    tracked = (
        None if running_norm is None else BatchMean(running_norm, mean_batches, mean_momentum, o.mean_kind == OF_RANKS)
    )
    with on_device(t.x):
        plan = plan_of(t, o)
        results, kept = forward(plan, t, Effects(tracked, momentum, batches), in_graph=True)
        HOST.learn_in_graph(plan, t, arguments[-OPTIONS:], backward=False)
    return *_as_tensors(results, kept), *kept


def _inference(*arguments: Any) -> tuple[Tensor, ...]:
    t, o = Operands(*arguments[:TENSORS]), as_options(*arguments[-OPTIONS:])
    with on_device(t.x):
        plan = plan_of(t, o)
        results, kept = forward(plan, t, NO_EFFECTS, keep=False)
        HOST.learn_in_graph(plan, t, arguments[-OPTIONS:], backward=False)
    return _as_tensors(results, kept)


def _as_tensors(results: Results, kept: Kept) -> tuple[Tensor, ...]:
    """Return the results with empty tensors in place of None, which operators in a graph cannot return."""
    return tuple([kept.vectors.new_empty(0) if result is None else result for result in results])


def _inference_fake(*arguments: Any) -> tuple[Tensor, ...]:
    return _forward_fake(*arguments)[:2]


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    t, o = Operands(*arguments[:TENSORS]), as_options(*arguments[-OPTIONS:])
    unit = torch.empty_like(t.weight, dtype=t.x.dtype)
    dot = convolution(t.x, unit, o)
    if is_depthwise(t.x, t.weight, o.groups):
        dot = dot.new_empty_strided(dot.shape, channels_last_strides(dot.shape))
        norms = torch.empty_like(dot, dtype=torch.float32)
    else:
        norms = t.x.new_empty((t.x.shape[0], o.groups, *dot.shape[2:]), dtype=torch.float32)
    size = vector_regions(t.weight.shape[0], o).size
    left = norms.new_empty((energy_maps(t.weight.shape[0], o.groups), *norms.shape) if o.leaves else 0)
    return torch.empty_like(dot), left, dot, norms, unit, norms.new_empty(size)


def _backward(
    e: Tensor,
    e_more: Tensor | None,
    of_left: Tensor | None,
    out: Tensor | None,
    want_x: bool,
    want_weight: bool,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    t, kept, o = Operands(*arguments[:TENSORS]), Kept(*arguments[TENSORS:-OPTIONS]), as_options(*arguments[-OPTIONS:])
    with on_device(t.x):
        plan = plan_of(t, o, kept.dot)
        gradients = backward(plan, e, of_left, t, kept, out, want_x, want_weight, add=False, e_more=e_more)
        HOST.learn_in_graph(plan, t, arguments[-OPTIONS:], backward=True)
    single = {"products", "mean"}  # float32, whatever the dtype of the gradient
    found = zip(Gradients._fields, gradients, strict=True)
    return tuple(
        [
            (kept.vectors if name in single else e).new_empty(0) if gradient is None else gradient
            for name, gradient in found
        ]
    )


def _backward_fake(
    e: Tensor,
    e_more: Tensor | None,
    of_left: Tensor | None,
    out: Tensor | None,
    want_x: bool,
    want_weight: bool,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    t, kept, o = Operands(*arguments[:TENSORS]), Kept(*arguments[TENSORS:-OPTIONS]), as_options(*arguments[-OPTIONS:])
    parts = mean_parts(t.weight.shape[0] // o.groups)
    products = want_x and not is_depthwise(t.x, t.weight, o.groups)
    return (
        torch.empty_like(t.x) if want_x else e.new_empty(0),
        kept.vectors.new_empty((t.x.shape[0], o.groups, *t.x.shape[2:]) if products else 0),
        torch.empty_like(t.weight) if want_weight else e.new_empty(0),
        kept.vectors.new_empty(gradient_regions(t, o).size),
        kept.vectors.new_empty(o.groups * parts if o.mean_kind == GIVEN else 0),
        e.new_empty(0) if out is None else torch.empty_like(kept.dot),
    )


# -- the gradient ------------------------------------------------------------------------------------------------------


@differentiable_once
def _gradients(ctx: Any, e: Tensor | None, of_left: Tensor | None, *_: Any) -> tuple[Any, ...]:
    rewrite_sums()
    *saved, out = ctx.saved_tensors
    t, kept, o = Operands(*saved[:TENSORS]), Kept(*saved[TENSORS:]), as_options(*ctx.options)
    if kept.unit is None:
        kept = kept._replace(unit=_unit(t, vector_regions(t.weight.shape[0], o).view(kept.vectors, "w_norm")))
    e, out = arrived(e, of_left, out, kept.dot, o)
    if of_left is not None:
        of_left = of_left[:1]  # all maps are the same one, expanded; this is a view of it
    wanted = ctx.needs_input_grad[:TENSORS]
    gradients = Gradients(
        *torch.ops.dcnet.decoupled_backward(e, None, of_left, out, *wanted[:2], *t, *kept, *ctx.options)
    )
    if out is None:
        gradients = gradients._replace(residual=None)
    if wanted[0] and ctx.maps == 0 and not is_depthwise(t.x, t.weight, o.groups):
        assert gradients.x is not None
        assert gradients.products is not None
        x = t.x.unflatten(1, (o.groups, -1)).float() * gradients.products.unsqueeze(2)
        gradients = gradients._replace(x=(gradients.x.float() + x.flatten(1, 2)).to(t.x.dtype))
    rest = len(ctx.needs_input_grad) - TENSORS
    return *operand_gradients(gradients, e, gradient_regions(t, o), t, o, wanted, ctx.maps), *[None] * rest


def _unit(t: Operands, w_norm: Tensor) -> Tensor:
    """Compute the normalized kernels again, as `normalize_kernel` writes them on a GPU.

    To keep them from forward to backward would take a copy of all kernels, which a plain network does not need.
    """
    inverse = torch.where(w_norm > 0, 1 / w_norm, 0).view(-1, *[1] * (t.weight.dim() - 1))
    return (t.weight.float() * inverse).to(t.x.dtype)


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        t, ctx.options = Operands(*arguments[:TENSORS]), arguments[-OPTIONS:]
        out, left, *kept = _below_autograd(*arguments)
        o = as_options(*ctx.options)
        ctx.mark_non_differentiable(*kept, *[] if o.leaves else [left])
        ctx.set_materialize_grads(False)
        ctx.maps = 0 if t.energy is None else t.energy.shape[0]
        saved = Kept(*kept)
        if not is_depthwise(t.x, t.weight, o.groups):  # `_unit` cannot restore these, which have the taps first
            saved = saved._replace(unit=None)  # type: ignore[arg-type]
        ctx.save_for_backward(*for_backward(t), *saved, wanted_output(out, t, o))
        return out, left, *kept

    backward = staticmethod(_gradients)


def _below_autograd(*arguments: Any) -> tuple[Tensor, ...]:
    with below_autograd():
        return torch.ops.dcnet.decoupled_forward(*arguments)


def _with_gradient(*arguments: Any) -> tuple[Tensor, ...]:
    wanted = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in arguments[:TENSORS]
    )
    return (_Traced.apply if wanted else _below_autograd)(*arguments)


def _register(name: str, arguments: str, results: int, implementation: Any, fake: Any) -> None:
    # not by `torch.library.custom_op`, whose checks of every call cost more than the launches
    signature = f"{name}({arguments}, str options, float eps, float norm_eps) -> ({', '.join(['Tensor'] * results)})"
    _LIBRARY.define(signature, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dcnet::{name}", fake, lib=_LIBRARY)


_register("decoupled_inference", _OPERANDS, 2, _inference, _inference_fake)
for _name in ("decoupled", "decoupled_forward"):
    _register(_name, f"{_OPERANDS}, {_EFFECTS}", 2 + KEPT, _forward, _forward_fake)
_register(
    "decoupled_backward",
    f"Tensor e, Tensor? e_more, Tensor? of_left, Tensor? out, bool want_x, bool want_weight, {_OPERANDS}, {_KEPT}",
    len(Gradients._fields),
    _backward,
    _backward_fake,
)
_LIBRARY.impl("decoupled", _with_gradient, "Autograd")
Host.in_graph = _forward, _inference, _backward  # C++ replaces these, and calls them for plans that it does not have


# -- for torch.utils.flop_counter, which counts convolutions only, as in a plain layer ---------------------------------


@register_flop_formula(
    [torch.ops.dcnet.decoupled, torch.ops.dcnet.decoupled_forward, torch.ops.dcnet.decoupled_inference]
)
def _flops(x: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return conv_flop_count(x, weight, out_shape[0])


@register_flop_formula(torch.ops.dcnet.decoupled_backward)
def _backward_flops(
    e: Any,
    e_more: Any,
    of_left: Any,
    out: Any,
    want_x: bool,
    want_weight: bool,
    x: Any,
    weight: Any,
    *_: Any,
    **__: Any,
) -> int:
    def turned(shape: Any) -> list[int]:
        return [shape[1], shape[0], *shape[2:]]

    flops = conv_flop_count(e, weight, x, transposed=True) if want_x else 0
    return flops + (conv_flop_count(turned(x), turned(e), turned(weight)) if want_weight else 0)
