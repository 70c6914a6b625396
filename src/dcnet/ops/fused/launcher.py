"""Launching a kernel again without asking Triton again, on memory allocated once.

Triton works out from every argument which compiled variant to run, which takes longer than most of our kernels do. The
variant depends on few things: dtypes, sizes, flags, and whether pointers are aligned. A launcher fixes all but the
memory and the leading floats, which do not matter for the variant; from the second launch on it runs the variant directly. It is for
tensors of the same dtypes on the same device every time: calls, which keep the launchers, are kept by dtypes and devices too.

An allocation costs as much as a launch. So the many small float32 buffers of a call are pieces of few tensors, and a launcher's
table says where each pointer of its kernel is: (slot of the tensor among the call's, offset in float32 elements).
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

Place = tuple[int, int]

_ALIGNED = 4  # float32 elements: what a kernel loads at once


def aligned(size: int) -> int:
    """The size rounded up, so that the next piece starts where a pointer may."""
    return -(-size // _ALIGNED) * _ALIGNED


class Memory:
    """The tensors of one call by slot, their addresses, and the stream their kernels run on: that of the first one's device."""

    __slots__ = ("addresses", "aligned", "stream", "tensors")

    def __init__(self, tensors: list[Tensor | None]) -> None:
        first = tensors[0]
        assert first is not None
        self.tensors = tensors
        self.addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self.aligned = reduce(or_, self.addresses) % 16 == 0
        self.stream = torch._C._cuda_getCurrentRawStream(first.device.index) if first.is_cuda else 0

    def put(self, slot: int, tensor: Tensor) -> None:
        """Fills a slot that was empty, or puts another tensor there."""
        self.tensors[slot] = tensor
        address = self.addresses[slot] = tensor.data_ptr()
        if address % 16:
            self.aligned = False


class Launcher:
    """A kernel with its grid, the places of its pointers, and its arguments behind those and behind the floats that change."""

    __slots__ = ("before", "fixed", "grid", "kernel", "table", "variant", "warps")

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], table: Sequence[Place], fixed: Sequence[Any], warps: int = 4
    ) -> None:
        self.kernel, self.grid, self.fixed, self.warps = kernel, (*grid, 1, 1)[:3], tuple(fixed), warps
        self.table = [(slot, 4 * offset) for slot, offset in table]  # in bytes
        self.variant: Any = None
        self.before: tuple[Any, ...] = ()  # what the variant takes before the arguments

    def __call__(self, memory: Memory, *floats: float) -> None:
        """Runs the kernel on the memory's stream."""
        if self.variant is None or not memory.aligned:
            self._ask_triton(memory, floats)
            return
        at = memory.addresses
        self.variant(
            *self.grid,
            memory.stream,
            *self.before,
            *[at[slot] + offset for slot, offset in self.table],
            *floats,
            *self.fixed,
        )

    def _ask_triton(self, memory: Memory, floats: tuple[float, ...]) -> None:
        tensors = [(memory.tensors[slot], offset // 4) for slot, offset in self.table]
        views = [tensor.view(-1)[offset:] if tensor is not None and offset else tensor for tensor, offset in tensors]
        compiled = self.kernel[self.grid](*views, *floats, *self.fixed, num_warps=self.warps)
        if compiled is not None and memory.aligned:  # None in the interpreter
            # no metadata and no hooks: those are for Triton's profiler
            self.variant, self.before = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
