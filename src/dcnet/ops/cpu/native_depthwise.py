"""Depthwise layers as one compiled pass forward and one backward, which keep nothing but their input.

What `depthwise.py` does with PyTorch's operations, a few images at a time, is done here in C (`native/depthwise.c`)
with a channel at a time: dot products, norms and what the operator makes of them stay in the cache. Norms are computed
wherever they are needed, so that no map of them exists, and E{‖x‖} of the batch, by which radii may be multiplied, is
the mean of a channel's norms, so that it needs no pass of its own.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.ops import norms
from dcnet.ops.cpu import depthwise
from dcnet.ops.cpu.box_sum import differentiable_sums, windows_of
from dcnet.ops.cpu.convolution import convolution_gradients
from dcnet.ops.cpu.native.compiler import can_run
from dcnet.ops.cpu.native.depthwise import Depthwise, compiled_depthwise
from dcnet.ops.cpu.native.source import NotInC
from dcnet.ops.cpu.passes import Kind, rows_in_c
from dcnet.ops.geometry import convolve
from dcnet.ops.inputs import Inputs
from dcnet.ops.mean_norm import BatchMean
from dcnet.ops.norms import inverse
from dcnet.ops.operator import Operator
from dcnet.util.compat import is_grads_batched, operations_watched, unprepared_apply

Vectors = tuple[Tensor | None, ...]


def decouple(
    inputs: Inputs, unit: Tensor, w_norm: Tensor, relu: bool, vectors: Callable[[Inputs, Tensor, Tensor], Vectors]
) -> Tensor | None:
    """Return h(‖w‖, ‖x‖)·g(θ) of a depthwise layer, as `Composite.map` does; None where that is not for C.

    vectors: gives s, t, ρ, b and the learned parameters; see `Composite.vectors`.
    """
    if not _applies(inputs):
        return None
    x, mean_norm = inputs.x, inputs.mean_norm
    program = _compiled(inputs.operator, relu, inputs.radius is not None, inputs.bias is not None)
    if program is None:
        return None
    relative = isinstance(mean_norm, BatchMean) and inputs.radius is not None
    # the pass itself multiplies by means, and any norms do where nothing depends on them
    given = vectors(inputs._replace(mean_norm=None) if relative else inputs, w_norm, x.new_empty(0))
    y, means = _apply_depthwise(program, inputs, relu, relative, x, unit, inputs.weight, w_norm, *given)
    if isinstance(mean_norm, BatchMean) and relative:
        mean_norm.track(means)
    return y


def _applies(inputs: Inputs) -> bool:
    x, mean = inputs.x, inputs.mean_norm
    if not depthwise.applies(inputs) or inputs.geometry.dims > 2 or not can_run(x.numel()):
        return False
    if isinstance(mean, BatchMean) and mean.sync:  # means over several ranks are made of the norms themselves
        return False
    given = [x, inputs.weight, inputs.bias, *inputs.learned.values()]
    plain = all(t is None or (t.dtype == torch.float32 and type(t) in (Tensor, nn.Parameter)) for t in given)
    return plain and x.is_contiguous() and not operations_watched()


@lru_cache(maxsize=256)
def _compiled(operator: Operator, relu: bool, radius: bool, bias: bool) -> Depthwise | None:
    weighting = operator.weighting
    there = (weighting in ("linear", "separate"), weighting == "joint", radius, bias, *[True] * len(operator.learned))
    wanted = (True, True, *there)  # a sum more costs little, a second compilation half a second
    try:
        kind = Kind(operator, relu, 4, there, wanted, True, True, True, False)
        return compiled_depthwise(rows_in_c(kind, norm_of_each=True, vector_of_each=False))
    except NotInC:
        return None


class _Depthwise(torch.autograd.Function):
    """Computes y from x, the normalized kernels and the vectors, and the mean norms; keeps x, w and ‖w‖.

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
        unit: Tensor,
        weight: Tensor,
        w_norm: Tensor,
        *vectors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.program, ctx.operator, ctx.geometry, ctx.eps = program, inputs.operator, inputs.geometry, inputs.eps
        given = [v.contiguous() for v in vectors if v is not None]
        ctx.radius = sum(v is not None for v in vectors[:2]) if relative else -1
        y, means = program.forward(x, unit.contiguous(), inputs.geometry, inputs.eps, given, ctx.radius)
        ctx.save_for_backward(x, weight, w_norm, means, y if relu else None, *vectors)
        ctx.mark_non_differentiable(means)
        return y, means

    @staticmethod
    def backward(ctx: Any, e: Tensor, _: Tensor) -> tuple[Any, ...]:
        x, weight, w_norm, means, y, *vectors = ctx.saved_tensors
        geometry, eps = ctx.geometry, ctx.eps
        want_x, want_unit, _, _, *want_vectors = ctx.needs_input_grad[4:]
        unit = norms.normalized(weight, inverse(w_norm, eps))
        if torch.is_grad_enabled() or is_grads_batched(e):
            of_x, of_unit, *of_vectors = _differentiable(ctx, x, unit, vectors, y, e)
        else:
            given = [v.contiguous() for v in vectors if v is not None]
            sums = [torch.empty_like(v) for v in given]
            of_x = torch.empty_like(x) if want_x else None
            of_unit = torch.zeros_like(unit, memory_format=torch.contiguous_format) if want_unit else None
            program, options = ctx.program, (geometry, eps, given, ctx.radius)
            program.backward(x, unit.contiguous(), *options, means, y, e.contiguous(), of_x, of_unit, sums)
            found = iter(sums)
            of_vectors = [None if v is None else next(found) for v in vectors]
        of_vectors = [of if want else None for of, want in zip(of_vectors, want_vectors, strict=True)]
        return None, None, None, None, of_x, of_unit, None, None, *of_vectors


def _differentiable(
    ctx: Any, x: Tensor, unit: Tensor, vectors: list[Tensor | None], y: Tensor | None, e: Tensor
) -> list[Tensor | None]:
    """Return the gradients of x, the normalized kernels and the vectors by operations that can be differentiated."""
    geometry, eps, channels = ctx.geometry, ctx.eps, x.shape[1]
    want_x, want_unit, _, _, *want_vectors = ctx.needs_input_grad[4:]
    wanted = [want_x or want_unit, want_x, *want_vectors]
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
    of_x = of_unit = None
    if of_dot is not None:
        of_x, of_unit = convolution_gradients(of_dot, x, unit, geometry, want_x, want_unit)
    if of_x is not None and of_n is not None:
        of_x = of_x + x * differentiable_sums(of_n * inverse(n, eps), windows, True)
    return [of_x, of_unit, *of_vectors]


# function transforms, for which `apply` prepares, go another way (`dispatch.eager`)
_apply_depthwise = unprepared_apply(_Depthwise)
