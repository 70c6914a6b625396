"""Norms of patches in C: calls of norms.c."""

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from torch import Tensor

from dcnet.ops.cpu.native.call import call, longs
from dcnet.ops.cpu.native.compiler import compiled, included

Windows = Sequence[int]  # `box_sum.Windows`: size, step, apart, before, inputs, outputs
_ONE = (1, 1, 1, 0, 1, 1)


class Norms:
    """‖x‖ of every patch and group, and its gradient; all maps are contiguous, over one dimension or two."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._forward, self._backward = library.forward, library.backward
        pointer, number = ctypes.c_void_p, ctypes.c_long
        self._forward.argtypes = [pointer, ctypes.c_float, *[pointer] * 3, number]
        self._backward.argtypes = [*[pointer] * 6, number]

    def forward(self, x: Tensor, groups: int, windows: tuple[Windows, ...], eps: float) -> Tensor:
        """Return ‖x‖ (N, groups, …)."""
        norms = x.new_empty((len(x), groups, *(along[-1] for along in windows)))
        call(self._forward, _sizes(x.shape[:2], groups, windows), eps, x.data_ptr(), norms.data_ptr())
        return norms

    def add_gradient(
        self, x: Tensor, groups: int, windows: tuple[Windows, ...], norms: Tensor, of_norms: Tensor, of_x: Tensor
    ) -> None:
        """Add to the gradient in x that of the norms."""
        given = (t.data_ptr() for t in (x, norms, of_norms, of_x))
        call(self._backward, _sizes(x.shape[:2], groups, windows), *given)


@lru_cache(maxsize=1024)
def _sizes(shape: tuple[int, int], groups: int, windows: tuple[Windows, ...]) -> Any:
    y, x = (_ONE, *windows)[-2:]
    return longs([shape[0], groups, shape[1] // groups, *y, *x])


@cache
def compiled_norms() -> Norms | None:
    """Return the functions, None where they cannot be compiled."""
    library = compiled("\n".join(map(included, ("elementary.h", "parallel.h", "norms.c"))))
    return None if library is None else Norms(library)
