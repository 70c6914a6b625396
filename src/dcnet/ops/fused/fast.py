"""Launching a kernel again without asking Triton again, on memory allocated once.

Triton works out from every argument which compiled variant to run, which takes longer than most of our kernels do. The
variant depends on few things: dtypes, sizes, flags, and whether pointers are aligned. A launcher fixes all but the
pointers and the floats, which do not matter for the variant; from the second launch on it runs the variant directly. It is for
tensors of the same dtypes on the same device every time: plans, which keep the launchers, are kept by dtypes and devices too.

An allocation costs as much as a launch. So the many small float32 buffers of a call are pieces of few tensors: a piece is
(tensor, offset in elements), and a kernel takes its tensors first, then its pieces, then floats.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

Piece = tuple[Tensor, int]

_ADDRESS = Tensor.data_ptr
_ALIGNED = 4  # float32 elements: what a kernel loads at once


def aligned(size: int) -> int:
    """The size rounded up, so that the next piece starts where a pointer may."""
    return -(-size // _ALIGNED) * _ALIGNED


class Launcher:
    """A kernel with its grid and its arguments behind pointers and floats."""

    __slots__ = ("before", "fixed", "grid", "kernel", "variant", "warps")

    def __init__(self, kernel: Any, grid: tuple[int, ...], fixed: Sequence[Any], warps: int = 4) -> None:
        self.kernel, self.grid, self.fixed, self.warps = kernel, (*grid, 1, 1)[:3], tuple(fixed), warps
        self.variant: Any = None
        self.before: tuple[Any, ...] = ()  # what the variant takes before the arguments

    def __call__(self, tensors: Sequence[Tensor], pieces: Sequence[Piece], *floats: float) -> None:
        """Runs the kernel on the current stream of the current device."""
        addresses = [*map(_ADDRESS, tensors), *[tensor.data_ptr() + 4 * offset for tensor, offset in pieces]]
        if self.variant is None or reduce(or_, addresses) % 16:
            views = [tensor.view(-1)[offset:] if offset else tensor for tensor, offset in pieces]
            compiled = self.kernel[self.grid](*tensors, *views, *floats, *self.fixed, num_warps=self.warps)
            if compiled is not None and reduce(or_, addresses) % 16 == 0:  # None in the interpreter
                # no metadata and no hooks: those are for Triton's profiler
                self.variant, self.before = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
            return
        stream = torch._C._cuda_getCurrentRawStream(pieces[0][0].device.index)
        self.variant(*self.grid, stream, *self.before, *addresses, *floats, *self.fixed)


class Launchers:
    """What keeps launchers: a subclass makes one called NAME in a method _NAME, out of its flags."""

    def __init__(self) -> None:
        self._launchers: dict[Any, Launcher] = {}

    def launcher(self, *key: Any) -> Launcher:
        """The launcher of that name and flags, made once."""
        found = self._launchers.get(key)
        if found is None:
            name, *flags = key
            found = self._launchers[key] = getattr(self, f"_{name}")(*flags)
        return found
