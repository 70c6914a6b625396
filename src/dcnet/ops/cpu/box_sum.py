"""Sums over the windows of maps, by slices: five times faster on a CPU than pooling."""

from collections.abc import Iterator
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.ops import norms
from dcnet.ops.geometry import Geometry
from dcnet.util.compat import is_grads_batched


def box_sum(maps: Tensor, geometry: Geometry) -> Tensor:
    """Return the sum over the window of every patch, for each channel separately."""
    if geometry.is_pointwise or maps.device.type != "cpu" or max(geometry.kernel_size) > 7:
        return norms.box_sum(maps, geometry)
    if geometry.padding_mode != "zeros":
        maps = geometry.pad(maps)
    return _BoxSum.apply(maps, windows_of(geometry, maps.shape[2:]), False)


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


@lru_cache(maxsize=1024)
def windows_of(geometry: Geometry, sizes: torch.Size) -> tuple[Windows, ...]:
    """Return the windows along each dimension of maps of these sizes, with zeros around them.

    Zeros add nothing, so none are written: with a large dilation a padded map would be much larger than the map. Maps
    with another padding mode must include their padding.
    """
    padding = geometry.padding if geometry.padding_mode == "zeros" else ((0, 0),) * geometry.dims
    return tuple(
        Windows(size, step, apart, before, length, (length + before + after - apart * (size - 1) - 1) // step + 1)
        for size, step, apart, (before, after), length in zip(
            geometry.kernel_size, geometry.stride, geometry.dilation, padding, sizes, strict=True
        )
    )


def window_sums(maps: Tensor, windows: tuple[Windows, ...], transposed: bool) -> Tensor:
    """Return the sum over every window, or transposed: for every place, the sum over the windows that contain it.

    It sums one dimension at a time, and keeps the memory format of the maps. Autograd cannot follow it.
    """
    order = memory_format(maps)
    for dim, (along, (first, rest)) in enumerate(zip(windows, _sums(windows, transposed), strict=True), 2):
        sizes = list(maps.shape)
        sizes[dim] = along.inputs if transposed else along.outputs
        sums = torch.empty(sizes, dtype=maps.dtype, device=maps.device, memory_format=order)
        if first is None:
            sums.zero_()
        else:  # nothing to add to yet
            sums.copy_(maps[first])
        for written, read in rest:
            sums[written].add_(maps[read])  # with `+=` Python would also copy the result onto itself
        maps = sums
    return maps


Place = tuple[slice, ...]


@lru_cache(maxsize=1024)
def _sums(windows: tuple[Windows, ...], transposed: bool) -> list[tuple[Place | None, list[tuple[Place, Place]]]]:
    """Return, for each dimension, which slice to copy first (None: start at 0), and then where to add which slices."""
    found = []
    for i, along in enumerate(windows):
        lead = (slice(None),) * (2 + i)
        length = along.inputs if transposed else along.outputs
        # in the order in which places are read, so that a sum and its transpose add in the same order
        pairs = (
            [(places, of) for of, places in reversed(list(along.overlaps()))] if transposed else list(along.overlaps())
        )
        # swapping the first two summands changes nothing
        whole = [j for j, (written, _) in enumerate(pairs[:2]) if written.indices(length) == (0, length, 1)]
        first = (*lead, pairs.pop(whole[0])[1]) if whole else None
        found.append((first, [((*lead, written), (*lead, read)) for written, read in pairs]))
    return found


def memory_format(maps: Tensor) -> torch.memory_format:
    """Return the format of maps: channels last if they are not contiguous as well, else the contiguous one."""
    if not maps.is_contiguous():
        for order in (torch.channels_last, torch.channels_last_3d):
            if maps.dim() == (4 if order is torch.channels_last else 5) and maps.is_contiguous(memory_format=order):
                return order
    return torch.contiguous_format


class _BoxSum(torch.autograd.Function):
    """`window_sums` for autograd."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, windows: tuple[Windows, ...], transposed: bool) -> Tensor:
        ctx.windows, ctx.transposed = windows, transposed
        return window_sums(maps, windows, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return differentiable_sums(grad, ctx.windows, not ctx.transposed), None, None


def differentiable_sums(maps: Tensor, windows: tuple[Windows, ...], transposed: bool) -> Tensor:
    """Return what `window_sums` does, for autograd, and for batched gradients, which cannot be written to a buffer."""
    if is_grads_batched(maps):
        return _placed_sums(maps, windows, transposed)
    return _BoxSum.apply(maps, windows, transposed)


def _placed_sums(maps: Tensor, windows: tuple[Windows, ...], transposed: bool) -> Tensor:
    """Return what `window_sums` does, with a padded copy of every slice."""
    for i, along in enumerate(windows):
        dim, size = 2 + i, along.inputs if transposed else along.outputs
        lead = (slice(None),) * dim
        placed = []
        for of_windows, of_places in along.overlaps():
            read, written = (of_windows, of_places) if transposed else (of_places, of_windows)
            whole = read.start == 0 and read.stop == maps.shape[dim] and read.step in (None, 1)
            values, step = maps if whole else maps[*lead, read], written.step or 1  # a batch cannot be aliased
            if step > 1:  # zeros in between
                zeros = [torch.zeros_like(values)] * (step - 1)
                values = torch.stack([values, *zeros], dim + 1).flatten(dim, dim + 1)
                values = values.narrow(dim, 0, written.stop - written.start)
            around = [written.start, size - written.start - values.shape[dim]]
            placed.append(F.pad(values, [0, 0] * (maps.dim() - 1 - dim) + around))
        maps = reduce(torch.add, placed)
    return maps
