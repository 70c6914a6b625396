"""Convolutions with one channel per group, which keep little more than their input for backward.

Each channel has a norm map of its own, as large as the output, while the convolution itself is cheap. So backward
convolves again, a few images at a time. It also computes the norms again, except where `_keeps_norms` says otherwise.
Intermediate results never take memory for the whole batch.

There are two autograd functions, since the mean of all norms, E{‖x‖}, is needed between them:

    x → ‖x‖, and a stand-in for x
    the stand-in, ‖x‖, normalized kernels, vectors → y

The stand-in takes no memory. Its gradient is the convolution's part of the gradient in x, to which the first function
adds the part of the norms.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dcnet.ops import norms
from dcnet.ops.cpu.box_sum import Windows, differentiable_sums, memory_format, window_sums, windows_of
from dcnet.ops.cpu.chunks import row_slices
from dcnet.ops.cpu.convolution import convolution_gradients, exact_convolutions
from dcnet.ops.cpu.passes import Kind, arranged, channels_last, gradients, per_kernel, programs_of
from dcnet.ops.geometry import Geometry, convolve
from dcnet.ops.inputs import Inputs
from dcnet.ops.norms import compute_dtype, inverse, never_zero
from dcnet.ops.operator import Operator
from dcnet.util.compat import is_grads_batched, unprepared_apply, wanted_gradients

_CHUNK = 131072  # elements for each thread
_CHUNKS = 4  # at least, since eight maps of a chunk exist at once


def applies(inputs: Inputs) -> bool:
    """Tell whether these functions are meant for this layer, and can compute it."""
    x, geometry = inputs.x, inputs.geometry
    one_channel = geometry.groups > 1 and inputs.weight.shape[1] == 1 and geometry.symmetric_padding is not None
    return one_channel and x.device.type == "cpu" and type(x) is Tensor and x.numel() > 0


def _keeps_norms(geometry: Geometry) -> bool:
    """Tell whether to keep the norms for backward.

    They are kept where computing them again takes as long as the plain layer, and with a stride, where they are small.
    """
    small = math.prod(geometry.kernel_size) <= 9 and max(geometry.dilation) == 1
    return small or max(geometry.stride) > 1


def _slices(x: Tensor) -> list[slice]:
    return row_slices(x, _CHUNK, _CHUNKS)


def patch_norms(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the stand-in for x, ‖x‖ of every patch and channel, and every channel's mean: (1, channels, 1, …)."""
    return _apply_norms(inputs.x, inputs.geometry, inputs.eps)


def epilogue(
    inputs: Inputs,
    stand_in: Tensor,
    norm_map: Tensor,
    unit: Tensor,
    w_norm: Tensor,
    vectors: tuple[Tensor | None, ...],
    relu: bool,
) -> Tensor:
    """Return h(‖w‖, ‖x‖)·g(θ) for these norms, normalized kernels and vectors; see `Composite.epilogue`."""
    settings = (inputs.operator, inputs.geometry, inputs.eps, relu)
    return _apply_depthwise(*settings, inputs.x, inputs.weight, w_norm, stand_in, norm_map, unit, *vectors)


@lru_cache(maxsize=64)
def _ones(groups: int, kernel_size: tuple[int, ...]) -> Tensor:
    with torch.inference_mode(False):  # a tensor made in inference mode can be used nowhere else
        return torch.ones((groups, 1, *kernel_size))


def _empty(shape: Sequence[int], dtype: torch.dtype, by_channel: bool) -> Tensor:
    """Return maps to write to: `arranged` gives a view of them, not a copy."""
    batch, channels, *positions = shape
    if by_channel:
        return torch.empty((batch, *positions, channels), dtype=dtype).movedim(-1, 1)
    return torch.empty(tuple(shape), dtype=dtype)


class _Sums:
    """Sums over the windows of maps, and, transposed, over the windows that contain a place; not for autograd.

    Use a convolution with ones where it is exact and fast (half the time of slices on small maps), else slices.
    """

    def __init__(self, geometry: Geometry, x: Tensor) -> None:
        self.windows, self.geometry = windows_of(geometry, x.shape[2:]), geometry
        fast = geometry.dims == 2 and max(geometry.dilation) == 1 and compute_dtype(x) == torch.float32
        convolves = fast and torch.backends.mkldnn.is_available() and exact_convolutions()
        self.ones = _ones(geometry.groups, geometry.kernel_size) if convolves else None

    def of(self, maps: Tensor) -> Tensor:
        if self.ones is None:
            return window_sums(maps, self.windows, False)
        return convolve(maps, self.ones, None, self.geometry)

    def transposed(self, maps: Tensor, x: Tensor) -> Tensor:
        """Return the transposed sums, in the shape of x."""
        if self.ones is None:
            return window_sums(maps, self.windows, True)
        sums, _ = convolution_gradients(maps, x.to(maps.dtype), self.ones, self.geometry, True, False)
        assert sums is not None
        return sums

    def norms(self, x: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """Return ‖x‖ of every patch and channel."""
        sums = self.of(x.to(compute_dtype(x)).square())
        if eps > 0.0:
            return torch.sqrt(sums.add_(eps), out=sums if out is None else out)
        return norms.root(sums, eps) if out is None else out.copy_(norms.root(sums, eps))


class _PatchNorms(torch.autograd.Function):
    """Computes the norm of every patch and channel, and the mean of every channel's; keeps x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, geometry: Geometry, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        ctx.geometry, ctx.eps = geometry, eps
        ctx.set_materialize_grads(False)
        sums = _Sums(geometry, x)
        sizes = (*x.shape[:2], *(along.outputs for along in sums.windows))
        n = torch.empty(sizes, dtype=compute_dtype(x), memory_format=memory_format(x))
        for rows in _slices(x):
            sums.norms(x[rows], eps, n[rows])
        ctx.save_for_backward(x, n if _keeps_norms(geometry) else None)
        return x.new_empty(()).expand(x.shape), n, n.mean(_all_but_channels(n), keepdim=True)

    @staticmethod
    def backward(
        ctx: Any, of_stand_in: Tensor | None, of_n: Tensor | None, of_mean: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        x, norm_map = ctx.saved_tensors
        sums = _Sums(ctx.geometry, x)
        sizes = (len(x), x.shape[1], *(along.outputs for along in sums.windows))
        if of_mean is not None:
            of_mean = of_mean / (math.prod(sizes) // sizes[1])
        if of_n is None:
            if of_mean is None:
                return of_stand_in, None, None
            of_n, of_mean = of_mean.expand(sizes), None
        grad = torch.zeros_like(x) if of_stand_in is None else of_stand_in
        # a gradient that is differentiated itself, or batched, cannot be changed in place
        given = [maps for maps in (of_stand_in, of_n, of_mean) if maps is not None]
        if torch.is_grad_enabled() or any(map(is_grads_batched, given)):
            total = of_n if of_mean is None else of_n + of_mean
            n = _differentiable_norms(x, sums.windows, ctx.eps)
            of_squares = differentiable_sums(total * inverse(n, ctx.eps), sums.windows, True)
            return grad + (x * of_squares).to(grad.dtype), None, None
        for rows in _slices(x):
            one_over_n = inverse(sums.norms(x[rows], ctx.eps) if norm_map is None else norm_map[rows], ctx.eps)
            total = of_n[rows] if of_mean is None else of_n[rows] + of_mean
            grad[rows].addcmul_(x[rows], sums.transposed(one_over_n.mul_(total), x[rows]))
        return grad, None, None


def _all_but_channels(maps: Tensor) -> list[int]:
    return [0, *range(2, maps.dim())]


def _differentiable_norms(x: Tensor, windows: tuple[Windows, ...], eps: float) -> Tensor:
    return norms.root(differentiable_sums(x.to(compute_dtype(x)).square(), windows, False), eps)


class _Depthwise(torch.autograd.Function):
    """Computes y from the norms, the normalized kernels and the vectors; keeps x, w and ‖w‖, which exist anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        geometry: Geometry,
        eps: float,
        relu: bool,
        x: Tensor,
        weight: Tensor,
        w_norm: Tensor,
        stand_in: Tensor,
        norm_map: Tensor,
        unit: Tensor,
        *vectors: Tensor | None,
    ) -> Tensor:
        groups, dtype = geometry.groups, norm_map.dtype
        want_x, want_n, want_unit, *want_vectors = ctx.needs_input_grad[7:]
        there = tuple(v is not None for v in vectors)
        clamped = False
        made: list[Tensor] = []
        for rows in _slices(x):
            dot = convolve(x[rows], unit, None, geometry)
            if not made:  # the first dot product tells the memory format
                by_channel = channels_last(dot)
                made.append(_empty((len(x), *dot.shape[1:]), dot.dtype, by_channel))
                wanted = (want_x or want_unit, want_n, *want_vectors)
                options = (dot.dtype == dtype, dot.shape[1] == groups, never_zero(eps, dtype), False)
                kind = Kind(operator, relu, 3 if by_channel else 4, there, wanted, *options)
                given = [per_kernel(v, dtype, groups, by_channel) for v in vectors if v is not None]
                program = programs_of(kind, clamped, False).forward(*given)
            out, d, n = (arranged(maps, groups, by_channel) for maps in (made[0][rows], dot, norm_map[rows]))
            one_over_n = inverse(n, eps)
            (extremes,) = program(out, d, n, one_over_n)
            if not clamped and not -1.0 < extremes[0].item() <= extremes[1].item() < 1.0:
                clamped, program = True, programs_of(kind, True, False).forward(*given)
                program(out, d, n, one_over_n)
        (y,) = made
        ctx.kind, ctx.geometry, ctx.eps, ctx.clamped = kind, geometry, eps, clamped
        kept = norm_map if _keeps_norms(geometry) else None
        ctx.save_for_backward(x, weight, w_norm, kept, y if relu else None, *vectors)
        return y

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        kind, geometry, eps = ctx.kind, ctx.geometry, ctx.eps
        x, weight, w_norm, kept, y, *vectors = ctx.saved_tensors
        want_x, _, want_unit, *_ = wanted_gradients(ctx)[7:]
        unit, sums = norms.normalized(weight, inverse(w_norm, eps)), _Sums(geometry, x)
        if torch.is_grad_enabled() or is_grads_batched(e):
            dot, n = convolve(x, unit, None, geometry), _differentiable_norms(x, sums.windows, eps)
            of_whole, *of_rest = gradients_at_once(kind.operator, kind.wanted, dot, n, eps, vectors, y, e)
            both: tuple[Tensor | None, Tensor | None] = (None, None)
            if of_whole is not None:
                both = convolution_gradients(of_whole, x, unit, geometry, want_x, want_unit)
            return *(None,) * 7, both[0], of_rest[0], both[1], *of_rest[1:]
        by_channel, dtype, groups = kind.dims == 3, compute_dtype(x), geometry.groups
        given = (per_kernel(v, dtype, groups, by_channel) for v in vectors if v is not None)
        program = programs_of(kind, ctx.clamped, False).backward(*given)
        of_x = torch.empty_like(x) if want_x else None
        shape = (len(x), x.shape[1], *e.shape[2:])
        of_n = _empty(shape, dtype, by_channel) if kind.wanted[1] else None

        def of_part(rows: slice) -> tuple[Tensor, list[Tensor | None]]:
            """Return the gradients in some rows of the dot product, and in the vectors; write those in the norms."""
            dot = convolve(x[rows], unit, None, geometry)
            norm_map = sums.norms(x[rows], eps) if kept is None else kept[rows]
            d, n = (arranged(maps, groups, by_channel) for maps in (dot, norm_map))
            later = (arranged(maps[rows], groups, by_channel).to(dtype) for maps in (y, e) if maps is not None)
            of_dot = _empty(dot.shape, dot.dtype, by_channel)
            place = [arranged(of_dot, groups, by_channel)] if kind.wanted[0] else []
            of_norms, *of_vectors = program(*place, d, n, inverse(n, eps), *later)
            if of_n is not None:
                arranged(of_n[rows], groups, by_channel).copy_(of_norms)
            return of_dot, of_vectors

        of_others: list[Tensor | None] = []  # of the kernels, and of the vectors
        for rows in _slices(x):
            of_dot, parts = of_part(rows)
            of_kernels = None
            if kind.wanted[0]:
                of_image, of_kernels = convolution_gradients(of_dot, x[rows], unit, geometry, want_x, want_unit)
                if of_x is not None and of_image is not None:
                    of_x[rows] = of_image
                del of_image
            of_others = _added(of_others, [of_kernels, *parts])
        of_unit, *of_vectors = of_others
        of_vectors = [
            None if of is None else of.flatten().to(v.dtype) for of, v in zip(of_vectors, vectors, strict=True)
        ]
        return *(None,) * 7, of_x, of_n, of_unit, *of_vectors


# safe because `dispatch.eager` sends function transforms elsewhere
_apply_norms, _apply_depthwise = unprepared_apply(_PatchNorms), unprepared_apply(_Depthwise)


def _added(sums: list[Tensor | None], more: list[Tensor | None]) -> list[Tensor | None]:
    """Return the sums of gradients, None for those that are not wanted."""
    return [a if a is None or b is None else a.add_(b) for a, b in zip(sums, more, strict=True)] if sums else more


def gradients_at_once(
    operator: Operator,
    wanted: tuple[bool, ...],
    dot: Tensor,
    norm_map: Tensor,
    eps: float,
    vectors: Sequence[Tensor | None],
    y: Tensor | None,
    e: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of (dot product, norms, *vectors) by operations that can be differentiated, or batched."""
    groups, dtype = norm_map.shape[1], norm_map.dtype
    there = tuple(v is not None for v in vectors)
    single = dot.shape[1] == groups
    kind = Kind(operator, y is not None, 4, there, wanted, dot.dtype == dtype, single, never_zero(eps, dtype), False)
    d, n = arranged(dot, groups, False), arranged(norm_map, groups, False)
    of_kernels = (per_kernel(v, dtype, groups, False) for v in vectors)
    y = None if y is None else arranged(y, groups, False)
    results = gradients(kind, True, d, n, inverse(n, eps), *of_kernels, y, arranged(e, groups, False).to(dtype))
    pairs = zip(results, (dot, norm_map, *vectors), strict=True)
    return [None if of is None or v is None else of.reshape(v.shape).to(v.dtype) for of, v in pairs]
