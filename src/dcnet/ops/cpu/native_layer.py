"""Layers on contiguous maps as one autograd function: a convolution, and compiled passes for the rest.

On small maps, the time of a layer depends on its number of operations. So everything except the convolution takes two
calls of C forward and three backward: kernels, norms, radii and their gradients (`native/layer.c`), and h·g
(`native/epilogue.c`). Rare cases are left to the functions in `autograd.py`.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from dcnet.ops.cpu import depthwise
from dcnet.ops.cpu.box_sum import windows_of
from dcnet.ops.cpu.convolution import autocast, convolution_gradients
from dcnet.ops.cpu.native.call import pointers
from dcnet.ops.cpu.native.compiler import can_run
from dcnet.ops.cpu.native.epilogue import Epilogue, layout_of
from dcnet.ops.cpu.native.layer import Average, Layer, Radius, Sizes, compiled_layer, sizes_of
from dcnet.ops.cpu.passes import compiled_passes
from dcnet.ops.geometry import Geometry, convolve
from dcnet.ops.inputs import Inputs, LearnedRadius
from dcnet.ops.mean_norm import BatchMean
from dcnet.ops.norms import never_zero
from dcnet.ops.operator import Operator
from dcnet.ops.post_ops import ONLY
from dcnet.util.compat import (
    is_grads_batched,
    operations_watched,
    recomputing,
    release_saved_tensors,
    unprepared_apply,
    wanted_gradients,
)

Decouple = Callable[[Inputs], Tensor]


class Plan(NamedTuple):
    """What shapes and settings tell about a layer."""

    geometry: Geometry
    operator: Operator
    relu: bool
    there: tuple[bool, ...]  # which vectors are given
    sizes: Sizes
    shape: tuple[int, ...]  # of dot products, by groups and kernels
    norms: tuple[int, ...]  # the shape of the map of norms
    results: int
    strides: tuple[tuple[int, ...], ...]  # of x and w


class Programs(NamedTuple):
    """The compiled functions of a layer."""

    around: Layer
    passes: Epilogue


@lru_cache(maxsize=1024)
def _plan(
    geometry: Geometry, x: torch.Size, weight: torch.Size, operator: Operator, relu: bool, radius: bool, bias: bool
) -> Plan | None:
    """Return the plan for these shapes; None if the compiled passes do not support such a layer."""
    weighting, g = operator.weighting, geometry
    if operator.is_inner_product or weighting == "separate" or g.dims > 2 or g.symmetric_padding is None:
        return None
    there = (weighting == "linear", weighting == "joint", radius, bias, *[True] * len(operator.learned))
    windows = windows_of(geometry, x[2:])
    outputs = [along.outputs for along in windows]
    shape = (x[0], g.groups, weight[0] // g.groups, *([math.prod(outputs)] if outputs else []))
    sizes = sizes_of(x, g.groups, windows, (weight[0], math.prod(weight[1:])))
    strides = tuple(torch.empty(size, device="meta").stride() for size in (x, weight))
    return Plan(geometry, operator, relu, there, sizes, shape, (x[0], g.groups, *outputs), math.prod(shape), strides)


def decouple(inputs: Inputs, otherwise: Decouple) -> Tensor | None:
    """Return what `Composite.decouple` does; None if C cannot compute it.

    otherwise: computes the same by functions whose gradients can be differentiated.
    """
    x, weight, operator, post_ops = inputs.x, inputs.weight, inputs.operator, inputs.post_ops
    relu = post_ops is not None and post_ops.is_relu
    given = (inputs.radius is not None, inputs.bias is not None)
    plan = _plan(inputs.geometry, x.shape, weight.shape, operator, relu, *given)
    if plan is None or not can_run(plan.results) or not never_zero(inputs.eps, torch.float32):
        return None
    learns = isinstance(inputs.radius, LearnedRadius)
    rho = inputs.radius.raw if isinstance(inputs.radius, LearnedRadius) else inputs.radius
    mean = None if rho is None else inputs.mean_norm
    vectors = [inputs.bias, *(inputs.learned[name] for name in operator.learned)]
    # maps with one channel or one position can have the strides of channels_last and still be contiguous
    if not _plain([x, weight, rho, *vectors]) or (x.stride(), weight.stride()) != plan.strides:
        return None
    if not _usable(mean) or depthwise.applies(inputs) or operations_watched() or autocast(x):
        return None
    around, passes = compiled_layer(), compiled_passes(operator, relu, layout_of(plan.shape), plan.there)
    if around is None or passes is None:
        return None
    of_batch = isinstance(mean, BatchMean)
    radius = Radius(None, learns, of_batch, mean if isinstance(mean, Tensor) else None)
    average = _average(mean) if isinstance(mean, BatchMean) else None
    options = (plan, Programs(around, passes), inputs.eps, radius, average, otherwise)
    y: Tensor = _apply_layer(*options, x, weight, rho, *vectors)
    return y if post_ops is None or relu else post_ops.apply(y)


def _plain(tensors: Sequence[Tensor | None]) -> bool:
    """Tell whether C can read these tensors."""
    for t in tensors:
        if t is None:
            continue
        if type(t) not in (Tensor, nn.Parameter) or t.dtype != torch.float32 or not t.is_cpu or not t.is_contiguous():
            return False
    return True


def _usable(mean: "Tensor | BatchMean | None") -> bool:
    """Tell whether C can use, or compute, this E{‖x‖}."""
    if isinstance(mean, BatchMean):  # a mean over several ranks needs the norms themselves
        averages = mean.running_norm, mean.num_batches_tracked
        return not mean.sync and _plain(averages) and not any(t is not None and t.is_inference() for t in averages)
    return mean is None or (_plain([mean]) and not mean.requires_grad)


def _average(mean: BatchMean) -> Average | None:
    """Return the running average to update, if there is one and this forward pass is not a recomputation."""
    running, batches, momentum, _ = mean
    if running is None or batches is None or recomputing():
        return None
    increment_version([running, batches])  # as in-place operations do
    return Average(running, batches, -1.0 if momentum is None else momentum)


class _Layer(torch.autograd.Function):
    """Computes y from x, w, ρ (or its raw parameter), b and the learned parameters.

    It keeps x, the dot products and norms, w and ‖w‖. Backward computes the normalized kernels again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        programs: Programs,
        eps: float,
        radius: Radius,
        average: Average | None,
        otherwise: Decouple,
        x: Tensor,
        weight: Tensor,
        rho: Tensor | None,
        *vectors: Tensor | None,
    ) -> Tensor:
        unit, n = torch.empty_like(weight), x.new_empty(plan.norms)
        numbers = x.new_empty(2 * len(weight) + plan.geometry.groups)
        programs.around.before(plan.sizes, eps, x, weight, unit, n, numbers, radius._replace(rho=rho), average)
        d = convolve(x, unit, None, plan.geometry).contiguous()
        y = torch.empty_like(d)
        programs.passes.value(plan.shape, d, n, _places(plan, numbers, vectors), y)
        ctx.plan, ctx.programs, ctx.eps, ctx.radius, ctx.otherwise = plan, programs, eps, radius, otherwise
        ctx.save_for_backward(x, weight, rho, numbers, n, d, y if plan.relu else None, *vectors)
        return y

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        x, weight, rho, numbers, n, d, y, *vectors = ctx.saved_tensors
        plan: Plan = ctx.plan
        around, passes = ctx.programs
        want_x, want_weight, want_rho, *wanted = wanted_gradients(ctx)[6:]
        if torch.is_grad_enabled() or is_grads_batched(e):
            return *[None] * 6, *_differentiable(ctx, x, weight, rho, vectors, e)
        of_d, of_n = torch.empty_like(d), torch.empty_like(n)
        totals = d.new_empty((sum(plan.there), len(weight)))
        places = _places(plan, numbers, vectors)
        passes.gradients(plan.shape, d, n, places, y, e.contiguous(), of_d, of_n, totals)
        release_saved_tensors(ctx)
        del d, y  # before the convolution needs memory
        of_vectors = iter(totals.unbind(0))
        of_factor, of_gain, of_rho, *of_rest = (next(of_vectors) if there else None for there in plan.there)
        of_x = of_weight = None
        if want_x or want_weight:
            unit = torch.empty_like(weight)
            around.kernels(plan.sizes, weight, numbers, unit)
            of_x, of_weight = convolution_gradients(of_d, x, unit, plan.geometry, want_x, want_weight)
            of_x, of_weight = (None if of is None else of.contiguous() for of in (of_x, of_weight))
        of_norm = of_gain if of_factor is None else of_factor
        radius = ctx.radius._replace(rho=rho)
        around.after(plan.sizes, x, n, of_n, of_x, weight, numbers, of_weight, of_norm, radius, of_rho)
        of_rest = [of if want else None for of, want in zip(of_rest, wanted, strict=True)]
        return *[None] * 6, of_x, of_weight, of_rho if want_rho else None, *of_rest


def _places(plan: Plan, numbers: Tensor, vectors: Sequence[Tensor | None]) -> Any:
    """Return the addresses of the given vectors of h·g: of s, t, ρ, b and the learned parameters."""
    start, kernels = numbers.data_ptr(), (numbers.shape[0] - plan.geometry.groups) // 2
    places = [start, start, start + 4 * kernels, *(None if v is None else v.data_ptr() for v in vectors)]
    return pointers([place for place, there in zip(places, plan.there, strict=True) if there])


def _differentiable(
    ctx: Any, x: Tensor, weight: Tensor, rho: Tensor | None, vectors: Sequence[Tensor | None], e: Tensor
) -> list[Tensor | None]:
    """Return the gradients by operations that can be differentiated, and can take a batch of incoming gradients."""
    plan, radius, graph = ctx.plan, ctx.radius, torch.is_grad_enabled()
    given, wanted = [x, weight, rho, *vectors], ctx.needs_input_grad[6:]
    with torch.enable_grad():
        # views, at which the gradient stops: x may itself depend on the weight
        views = [t.view_as(t) if t is not None and want else t for t, want in zip(given, wanted, strict=True)]
        x, weight, rho, bias, *learned = views  # type: ignore[assignment]
        inputs = Inputs(
            x,
            weight,
            bias,
            plan.geometry,
            plan.operator,
            LearnedRadius(rho) if rho is not None and radius.learned else rho,
            BatchMean() if radius.of_batch else radius.means,
            dict(zip(plan.operator.learned, learned, strict=True)),  # type: ignore[arg-type]
            ctx.eps,
            ONLY["relu"] if plan.relu else None,
        )
        y = ctx.otherwise(inputs)
    leaves = [view for view, want in zip(views, wanted, strict=True) if view is not None and want]
    found = iter(torch.autograd.grad(y, leaves, e, create_graph=graph, allow_unused=True))
    return [next(found) if view is not None and want else None for view, want in zip(views, wanted, strict=True)]


# safe because `dispatch.eager` sends function transforms elsewhere
_apply_layer = unprepared_apply(_Layer)
