"""Depthwise layers as one compiled pass forward and one backward, which keep no maps but their input.

`depthwise.py` uses PyTorch's operations and takes a few images at a time. Here C (`native/depthwise.c`) takes one
channel at a time: dot products, norms and results stay in the cache. Norms are computed wherever they are needed; no
map of them exists. E{‖x‖} of the batch, which may multiply radii, is the mean of a channel's norms, and needs no extra
pass.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.ops import norms
from dcnet.ops.composite import Composite
from dcnet.ops.cpu import depthwise
from dcnet.ops.cpu.box_sum import differentiable_sums, windows_of
from dcnet.ops.cpu.convolution import convolution_gradients
from dcnet.ops.cpu.native.compiler import can_run
from dcnet.ops.cpu.native.depthwise import Depthwise, compiled_depthwise
from dcnet.ops.cpu.native.lanes import for_lanes
from dcnet.ops.cpu.native.source import NotInC
from dcnet.ops.cpu.passes import Kind, rows_in_c
from dcnet.ops.geometry import convolve
from dcnet.ops.inputs import Inputs
from dcnet.ops.mean_norm import BatchMean
from dcnet.ops.norms import inverse
from dcnet.ops.operator import Operator
from dcnet.util.compat import is_grads_batched, operations_watched, unprepared_apply, wanted_gradients


def decouple(inputs: Inputs, relu: bool, steps: Composite) -> Tensor | None:
    """Return h(‖w‖, ‖x‖)·g(θ) of a depthwise layer, as `Composite.map` does; None if C cannot compute it.

    steps: the implementation that computes ‖w‖, and s, t, ρ, b and the learned parameters.
    """
    if not _applies(inputs):
        return None
    x, mean_norm = inputs.x, inputs.mean_norm
    lanes = for_lanes(inputs.geometry, x.shape)
    program = _compiled(inputs.operator, relu, inputs.radius is not None, inputs.bias is not None, lanes)
    if program is None:
        return None
    relative = isinstance(mean_norm, BatchMean) and inputs.radius is not None
    nothing = x.new_empty(0)
    # The pass itself normalizes kernels and multiplies radii by means; placeholder norms suffice where they are unused
    w_norm = nothing if inputs.operator.weighting is None else steps.unit_kernel(inputs.weight, inputs.eps)[1]
    given = steps.vectors(inputs._replace(mean_norm=None) if relative else inputs, w_norm, nothing)
    y, means = _apply_depthwise(program, inputs, relu, relative, x, inputs.weight, *given)
    if isinstance(mean_norm, BatchMean) and relative:
        mean_norm.track(means)
    return y


def _applies(inputs: Inputs) -> bool:
    x, mean = inputs.x, inputs.mean_norm
    if not depthwise.applies(inputs) or inputs.geometry.dims > 2 or not can_run(x.numel()):
        return False
    if isinstance(mean, BatchMean) and mean.sync:  # a mean over several ranks needs the norms themselves
        return False
    given = [x, inputs.weight, inputs.bias, *inputs.learned.values()]
    plain = all(t is None or (t.dtype == torch.float32 and type(t) in (Tensor, nn.Parameter)) for t in given)
    return plain and x.is_contiguous() and not operations_watched()


@lru_cache(maxsize=256)
def _compiled(operator: Operator, relu: bool, radius: bool, bias: bool, lanes: bool) -> Depthwise | None:
    weighting = operator.weighting
    there = (weighting in ("linear", "separate"), weighting == "joint", radius, bias, *[True] * len(operator.learned))
    wanted = (True, True, *there)  # an extra sum is cheap; recompiling takes a second
    try:
        kind = Kind(operator, relu, 4, there, wanted, True, True, True, False)
        rows = rows_in_c(kind, norm_of_each=True, vector_of_each=False, single=True, lanes=lanes)
        return compiled_depthwise(rows, lanes)
    except NotInC:
        return None


class _Depthwise(torch.autograd.Function):
    """Computes y from x, the kernels and the vectors, and the mean norms; keeps x and w.

    relative: whether the radius is to be multiplied by the mean norm of the channel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        program: Depthwise,
        inputs: Inputs,
        relu: bool,
        relative: bool,
        x: Tensor,
        weight: Tensor,
        *vectors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.program, ctx.operator, ctx.geometry, ctx.eps = program, inputs.operator, inputs.geometry, inputs.eps
        given = [v.contiguous() for v in vectors if v is not None]
        ctx.radius = sum(v is not None for v in vectors[:2]) if relative else -1
        y, means = program.forward(x, weight.contiguous(), inputs.geometry, inputs.eps, given, ctx.radius)
        ctx.save_for_backward(x, weight, means, y if relu else None, *vectors)
        ctx.mark_non_differentiable(means)
        return y, means

    @staticmethod
    def backward(ctx: Any, e: Tensor, _: Tensor) -> tuple[Any, ...]:
        x, weight, means, y, *vectors = ctx.saved_tensors
        geometry, eps = ctx.geometry, ctx.eps
        want_x, want_weight, *want_vectors = wanted_gradients(ctx)[4:]
        if torch.is_grad_enabled() or is_grads_batched(e):
            of_x, of_weight, *of_vectors = _differentiable(ctx, x, weight, vectors, y, e)
        else:
            given = [v.contiguous() for v in vectors if v is not None]
            sums = [torch.empty_like(v) for v in given]
            of_x = torch.empty_like(x) if want_x else None
            of_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format) if want_weight else None
            program, options = ctx.program, (geometry, eps, given, ctx.radius)
            program.backward(x, weight.contiguous(), *options, means, y, e.contiguous(), of_x, of_weight, sums)
            found = iter(sums)
            of_vectors = [None if v is None else next(found) for v in vectors]
        of_vectors = [of if want else None for of, want in zip(of_vectors, want_vectors, strict=True)]
        return None, None, None, None, of_x, of_weight, *of_vectors


def _differentiable(
    ctx: Any, x: Tensor, weight: Tensor, vectors: list[Tensor | None], y: Tensor | None, e: Tensor
) -> list[Tensor | None]:
    """Return the gradients of x, the kernels and the vectors by operations that can be differentiated."""
    geometry, eps, channels = ctx.geometry, ctx.eps, x.shape[1]
    one_over_norm = norms.per_kernel(inverse(norms.kernel_norm(weight, eps), eps), weight)
    unit = weight * one_over_norm
    want_x, want_weight, *want_vectors = ctx.needs_input_grad[4:]
    wanted = [want_x or want_weight, want_x, *want_vectors]
    windows = windows_of(geometry, x.shape[2:])
    n = norms.root(differentiable_sums(x.square(), windows, False), eps)
    rho = vectors[2] if ctx.radius >= 0 else None
    if rho is not None:
        scale = n.mean([0, *range(2, n.dim())]).repeat_interleave(len(rho) // channels)
        radius = rho * scale
        positive = radius > 0.0 if eps == 0.0 else None
        vectors = [*vectors[:2], radius if positive is None else torch.where(positive, radius, 1.0), *vectors[3:]]
        wanted[4] = want_x or want_vectors[2]
    dot = convolve(x, unit, None, geometry)
    of_dot, of_n, *of_vectors = depthwise.gradients_at_once(ctx.operator, tuple(wanted), dot, n, eps, vectors, y, e)
    if rho is not None and of_vectors[2] is not None:
        of_radius = of_vectors[2] if positive is None else of_vectors[2] * positive
        of_vectors[2] = of_radius * scale
        if of_n is not None:
            of_mean = (of_radius * rho).reshape(channels, -1).sum(1) / (n.numel() // channels)
            of_n = of_n + of_mean.reshape(1, -1, *[1] * (n.dim() - 2))
    of_x = of_weight = None
    if of_dot is not None:
        of_x, of_unit = convolution_gradients(of_dot, x, unit, geometry, want_x, want_weight)
        if of_unit is not None:  # the slope of w/‖w‖ is 1/‖w‖, less the part along w
            along = (of_unit * unit).sum(tuple(range(1, unit.dim())), keepdim=True)
            of_weight = (of_unit - unit * along) * one_over_norm
    if of_x is not None and of_n is not None:
        of_x = of_x + x * differentiable_sums(of_n * inverse(n, eps), windows, True)
    return [of_x, of_weight, *of_vectors]


# safe because `dispatch.eager` sends function transforms elsewhere
_apply_depthwise = unprepared_apply(_Depthwise)
