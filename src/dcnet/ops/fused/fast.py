"""Launching a kernel again without asking Triton again.

Triton works out from every argument which compiled variant to run, which takes longer than most of our kernels do. The
variant depends on few things: dtypes, sizes, flags, and whether pointers are aligned. A launcher fixes all but the
pointers and the floats, which do not matter for the variant; from the second launch on it runs the variant directly.
"""

from collections.abc import Sequence
from functools import reduce
from operator import attrgetter, or_
from typing import Any

import torch
from torch import Tensor

_DTYPE, _ADDRESS = attrgetter("dtype"), Tensor.data_ptr


class Launcher:
    """A kernel with its grid and its arguments behind pointers and floats."""

    __slots__ = ("fixed", "grid", "kernel", "variants", "warps")

    def __init__(self, kernel: Any, grid: tuple[int, ...], fixed: Sequence[Any], warps: int = 4) -> None:
        self.kernel, self.grid, self.fixed, self.warps = kernel, (*grid, 1, 1)[:3], tuple(fixed), warps
        self.variants: dict[tuple[torch.dtype, ...], Any] = {}

    def __call__(self, pointers: Sequence[Tensor], *floats: float) -> None:
        """Runs the kernel on the current stream of the device the tensors are on."""
        device = pointers[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._run(pointers, floats)
        return self._run(pointers, floats)

    def _run(self, pointers: Sequence[Tensor], floats: tuple[float, ...]) -> None:
        key = tuple(map(_DTYPE, pointers))
        variant = self.variants.get(key)
        addresses = list(map(_ADDRESS, pointers))
        aligned = reduce(or_, addresses) % 16 == 0
        if variant is None or not aligned:
            compiled = self.kernel[self.grid](*pointers, *floats, *self.fixed, num_warps=self.warps)
            if compiled is not None and aligned:  # None in the interpreter
                self.variants[key] = compiled
            return
        stream = torch._C._cuda_getCurrentRawStream(pointers[0].device.index)
        # no metadata and no hooks: those are for Triton's profiler
        variant.run(*self.grid, stream, variant.function, variant.packed_metadata, None, None, None, *addresses, *floats, *self.fixed)
