"""Memory orders of maps, their division into tiles, and the regions of a buffer."""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

Sizes = tuple[int, ...]
MOST_KERNELS = 32  # of a tile
_ALIGNED = 4  # float32 elements: what a kernel loads at once


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def programs_for(device: torch.device, each: int) -> int:
    """Return how many programs fill a device with `each` on every multiprocessor; 2 in Triton's interpreter."""
    if device.type != "cuda":
        return 2
    return each * torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two_in(number: int) -> int:
    """Return the largest power of two, up to 16, that divides a number; the compiler can rely on it."""
    return min(16, number & -number)


class Regions:
    """Named regions of a float32 buffer, one after the other.

    Each starts at an address that is aligned for kernels, or with `packed` right after the one before.
    """

    def __init__(self, *, start: int = 0, packed: bool = False, **sizes: int) -> None:
        step = 1 if packed else _ALIGNED
        self.slices: dict[str, slice] = {}
        for name, size in sizes.items():
            self.slices[name] = slice(start, start + size)
            start += cdiv(size, step) * step
        self.size = cdiv(start, _ALIGNED) * _ALIGNED

    def at(self, name: str) -> int:
        """Return where a region starts."""
        return self.slices[name].start

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """Return a region of the buffer."""
        return buffer[self.slices[name]]

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return all regions of the buffer by name, in one operation; `view` takes one for each."""
        names, sizes = self._parts
        return dict(zip(names, buffer.split_with_sizes(sizes), strict=True))

    @cached_property
    def _parts(self) -> tuple[list[str], list[int]]:
        """The names and sizes of all parts of the buffer, with those of the gaps, whose names are numbers."""
        names, sizes, end = [], [], 0
        for name, region in self.slices.items():
            names += [str(end), name]
            sizes += [region.start - end, region.stop - region.start]
            end = region.stop
        return [*names, str(end)], [*sizes, self.size - end]


def energy_maps(kernels: int, groups: int) -> int:
    """Return the number of maps that hold an output's energy, one for each block of kernels; 0 if it would not pay."""
    if groups > 1 or (kernels % MOST_KERNELS and kernels not in (8, 16)):
        return 0
    return cdiv(kernels, MOST_KERNELS)


class View:
    """A map (N, groups·kernels, …) seen as (batch, groups, kernels, positions).

    Where the memory order allows it, all positions of all images form a batch of one.
    """

    def __init__(self, shape: Sizes, stride: Sizes, groups: int) -> None:
        batch, channels = shape[:2]
        positions = math.prod(shape[2:])
        self.groups, self.kernels = groups, channels // groups
        self.channels_last = len(shape) == 2 or (channels > 1 and stride[1] == 1 and positions > 1)
        if groups == 1 and (self.channels_last or positions == 1 or batch == 1):
            self.channels_last = self.channels_last or positions == 1
            self.batch, self.positions = 1, batch * positions
        else:
            self.batch, self.positions = batch, positions
        channel, position = (1, channels) if self.channels_last else (self.positions, 1)
        self.strides = (
            channels * self.positions if self.batch > 1 else 0,
            channel,
            position,
        )  # of batch, channel, position

    @cached_property
    def kernel_block(self) -> int:
        """The number of kernels in a tile: the widest block that wastes little. Few widths mean few variants."""
        if not self.channels_last:
            return min(triton.next_power_of_2(self.kernels), MOST_KERNELS)
        wastes = {bk: cdiv(self.kernels, bk) * bk for bk in (MOST_KERNELS, 16, 8, 4, 2, 1)}
        return next(bk for bk, covered in wastes.items() if covered <= 1.1 * self.kernels)

    def channel_blocks(self) -> tuple[int, int]:
        """Return the sizes of a tile for the kernels that read x, positions × channels."""
        bc = min(triton.next_power_of_2(self.kernels), 128 if self.channels_last else 16)
        return max(1, min(4096 // bc, triton.next_power_of_2(self.positions))), bc


def dense(x: Tensor) -> Tensor:
    """Return x in contiguous or channels_last order, copied only if it is in neither."""
    if x.is_contiguous() or x.dim() == 2:
        return x.contiguous()
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    if x.dim() == 3:  # PyTorch has no memory format for (N, C, L) with channels last
        return x if x.transpose(1, 2).is_contiguous() else x.contiguous()
    return x if x.is_contiguous(memory_format=order) else x.contiguous()


def channels_last_strides(shape: Sizes) -> Sizes:
    """Return the strides of a map (N, C, …) whose channels lie next to each other."""
    channels, *sizes = shape[1:]
    strides = [channels * math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return (channels * math.prod(sizes), 1, *strides)


def like(x: Tensor, other: Tensor) -> Tensor:
    """Return x in the memory order of the other tensor, copied only if their orders differ."""
    if x.stride() == other.stride():
        return x
    return torch.empty_like(other, dtype=x.dtype).copy_(x)


def elsewhere(x: Tensor) -> bool:
    """Tell whether x is on a CUDA device other than the current one, where kernels run."""
    return x.is_cuda and x.get_device() != torch.cuda.current_device()


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the device of x is the current one."""
    return torch.cuda.device(x.device) if elsewhere(x) else _HERE


_HERE: AbstractContextManager[Any] = nullcontext()
