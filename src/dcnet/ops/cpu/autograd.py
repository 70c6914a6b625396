"""Norms, dot products and normalized kernels as autograd functions."""

from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.ops import norms
from dcnet.ops.composite import Composite
from dcnet.ops.cpu.chunks import chunks
from dcnet.ops.cpu.passes import epilogue
from dcnet.ops.geometry import Geometry, convolve
from dcnet.ops.norms import compute_dtype, inverse, per_kernel
from dcnet.util.compat import is_grads_batched


class AutogradFunctions(Composite):
    """`impl="eager"` where nothing, such as a compiler, has to look into an autograd function."""

    def unit_kernel(self, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return _UnitKernel.apply(weight, eps)

    def norm_map(self, x: Tensor, geometry: Geometry, eps: float) -> Tensor:
        return norms.root(_box_sum(_SumOfSquares.apply(x, geometry.groups), geometry), eps)

    def dot_and_norms(self, x: Tensor, unit: Tensor, geometry: Geometry, eps: float) -> tuple[Tensor, Tensor]:
        kind = x.device.type
        autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        # under autocast the convolution decides on the dtype
        if geometry.dims == 0 or geometry.symmetric_padding is None or autocast:
            return convolve(x, unit, None, geometry), self.norm_map(x, geometry, eps)
        dot, squares = _DotAndSquares.apply(x, unit, geometry)
        return dot, norms.root(_box_sum(squares, geometry), eps)

    epilogue = staticmethod(epilogue)


class _UnitKernel(torch.autograd.Function):
    """Computes w/‖w‖ and ‖w‖ in few operations.

    For a small batch, operations on kernels take as long as operations on maps.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        w_norm = norms.kernel_norm(weight, eps)
        ctx.eps = eps
        ctx.save_for_backward(weight, w_norm)
        ctx.set_materialize_grads(False)  # few operators use ‖w‖
        return norms.normalized(weight, inverse(w_norm, eps)), w_norm

    @staticmethod
    def backward(ctx: Any, of_unit: Tensor | None, of_norm: Tensor | None) -> tuple[Tensor, None]:
        weight, w_norm = ctx.saved_tensors
        one_over_norm, exact = inverse(w_norm, ctx.eps), weight.to(w_norm.dtype)
        # the slope of ‖w‖ is w/‖w‖; that of w/‖w‖ is 1/‖w‖, less the part along w
        along = torch.zeros_like(w_norm) if of_norm is None else of_norm * one_over_norm
        if of_unit is None:
            return (exact * per_kernel(along, weight)).to(weight.dtype), None
        of_unit = of_unit.to(w_norm.dtype)
        # one factor at a time: the cube of a small norm's inverse may overflow
        length = (of_unit * exact).sum(tuple(range(1, weight.dim()))) * one_over_norm * one_over_norm
        along = along - length * one_over_norm
        grad = (of_unit * per_kernel(one_over_norm, weight)).addcmul_(exact, per_kernel(along, weight))
        return grad.to(weight.dtype), None


def _squares(x: Tensor, groups: int) -> Tensor:
    """Return Σ over each group's channels of x², in the compute dtype; not for autograd."""
    squares = torch.empty((x.shape[0], groups, *x.shape[2:]), dtype=compute_dtype(x), device=x.device)
    for chunk, sums in chunks(x, squares):
        torch.sum(chunk.to(squares.dtype).square().unflatten(1, (groups, -1)), 2, out=sums)
    return squares if x.numel() else squares.zero_()


class _SumOfSquares(torch.autograd.Function):
    """Computes Σ over each group's channels of x², in the compute dtype.

    It saves only x, which the convolution saves anyway.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int) -> Tensor:
        ctx.save_for_backward(x)
        return _squares(x, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        product = x.unflatten(1, (grad.shape[1], -1)) * (2.0 * grad).unsqueeze(2)
        return product.reshape(x.shape).to(x.dtype), None


class _DotAndSquares(torch.autograd.Function):
    """Computes a convolution, and Σx² over each group's channels; adds both parts of the gradient of x in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        ctx.geometry = geometry
        ctx.save_for_backward(x, kernel)
        dot, squares = convolve(x, kernel, None, geometry), _squares(x, geometry.groups)
        if not ctx.needs_input_grad[0]:  # they do not depend on the kernel
            ctx.mark_non_differentiable(squares)
        return dot, squares

    @staticmethod
    def backward(ctx: Any, of_dot: Tensor, of_squares: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, kernel = ctx.saved_tensors
        g, (want_x, want_kernel, _) = ctx.geometry, ctx.needs_input_grad
        shape = (g.stride, g.symmetric_padding, g.dilation, False, [0] * g.dims, g.groups)
        grad_x, grad_kernel, _ = torch.ops.aten.convolution_backward(
            of_dot, x, kernel, None, *shape, (want_x, want_kernel, False)
        )
        if want_x:
            grouped, doubled = x.unflatten(1, (g.groups, -1)), (2.0 * of_squares).unsqueeze(2)
            # a gradient that is differentiated itself, or batched, cannot be changed in place
            if torch.is_grad_enabled() or is_grads_batched(of_dot):
                grad_x = grad_x + (grouped * doubled).reshape(x.shape).to(grad_x.dtype)
            else:
                grad_x.unflatten(1, (g.groups, -1)).addcmul_(grouped, doubled)
        return grad_x, grad_kernel, None


def _box_sum(maps: Tensor, geometry: Geometry) -> Tensor:
    """Return the sum over the window of every patch, for each channel separately."""
    if geometry.is_pointwise or maps.device.type != "cpu" or max(geometry.kernel_size) > 7:
        return norms.box_sum(maps, geometry)
    if geometry.padding_mode != "zeros":
        maps, padding = geometry.pad(maps), ((0, 0),) * geometry.dims
    else:  # zeros add nothing, so no padded map is written; with a large dilation it would be much larger than the map
        padding = geometry.padding
    sizes = maps.shape[2:]
    windows = tuple(
        Windows(size, step, apart, before, length, (length + before + after - apart * (size - 1) - 1) // step + 1)
        for size, step, apart, (before, after), length in zip(
            geometry.kernel_size, geometry.stride, geometry.dilation, padding, sizes, strict=True
        )
    )
    return _BoxSum.apply(maps, windows, False)


class Windows(NamedTuple):
    """The windows along one dimension: window o holds the places o·step − before + j·apart for 0 ≤ j < size."""

    size: int
    step: int
    apart: int
    before: int
    inputs: int
    outputs: int

    def overlaps(self) -> Iterator[tuple[slice, slice]]:
        """Yield, for each j, the windows whose j-th place lies inside the map, and those places."""
        for j in range(self.size):
            offset = j * self.apart - self.before
            first = max(0, -(offset // self.step))  # the smallest o with o·step + offset ≥ 0
            end = min(self.outputs, (self.inputs - 1 - offset) // self.step + 1)
            if first < end:
                start = first * self.step + offset
                yield slice(first, end), slice(start, start + (end - first - 1) * self.step + 1, self.step)


class _BoxSum(torch.autograd.Function):
    """Computes the sum over every window, or, transposed, for every place the sum over the windows that hold it.

    It adds slices, one dimension at a time: five times faster on a CPU than pooling.
    """

    @staticmethod
    def forward(ctx: Any, maps: Tensor, windows: tuple[Windows, ...], transposed: bool) -> Tensor:
        ctx.windows, ctx.transposed = windows, transposed
        for i, along in enumerate(windows):
            lead = (slice(None),) * (2 + i)
            sizes = list(maps.shape)
            sizes[2 + i] = along.inputs if transposed else along.outputs
            sums = maps.new_zeros(sizes)
            overlaps = list(along.overlaps())
            # in the order of what is read, so that a sum and its transpose add up alike
            for of_windows, of_places in reversed(overlaps) if transposed else overlaps:
                read, written = (of_windows, of_places) if transposed else (of_places, of_windows)
                sums[*lead, written] += maps[*lead, read]
            maps = sums
        return maps

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if is_grads_batched(grad):  # which cannot be written into a buffer
            return _placed_sums(grad, ctx.windows, not ctx.transposed), None, None
        return _BoxSum.apply(grad, ctx.windows, not ctx.transposed), None, None


def _placed_sums(maps: Tensor, windows: tuple[Windows, ...], transposed: bool) -> Tensor:
    """Return what `_BoxSum` does, with a padded copy of every slice."""
    for i, along in enumerate(windows):
        dim, size = 2 + i, along.inputs if transposed else along.outputs
        lead = (slice(None),) * dim
        placed = []
        for of_windows, of_places in along.overlaps():
            read, written = (of_windows, of_places) if transposed else (of_places, of_windows)
            whole = read.start == 0 and read.stop == maps.shape[dim] and read.step in (None, 1)
            values, step = maps if whole else maps[*lead, read], written.step or 1  # batches have no rule for an alias
            if step > 1:  # zeros in between
                zeros = [torch.zeros_like(values)] * (step - 1)
                values = torch.stack([values, *zeros], dim + 1).flatten(dim, dim + 1)
                values = values.narrow(dim, 0, written.stop - written.start)
            around = [written.start, size - written.start - values.shape[dim]]
            placed.append(F.pad(values, [0, 0] * (maps.dim() - 1 - dim) + around))
        maps = reduce(torch.add, placed)
    return maps
