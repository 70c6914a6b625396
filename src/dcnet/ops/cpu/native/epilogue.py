"""h·g on the output of a convolution in C: calls of epilogue.c."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from dcnet.ops.cpu.native.call import addresses, call, longs
from dcnet.ops.cpu.native.compiler import compiled, included

_BLOCK = 512  # positions of a chunk of work
_NUMBERS = 16384  # of a chunk of work where kernels lie next to each other
_FEW = 17  # positions: with fewer, rows are too short for vectors (4×4 backward: 2.3 ns per number, 1.8 in this layout)


class Epilogue:
    """The value and the gradients of an operator.

    d is (rows, groups, kernels[, positions]), n is (rows, groups, 1[, positions]), vectors are (groups, kernels[, 1]);
    all are contiguous.
    """

    def __init__(self, library: ctypes.CDLL, layout: str) -> None:
        self._layout = layout
        self._forward, self._backward = library.forward, library.backward
        pointer, number = ctypes.c_void_p, ctypes.c_long
        self._forward.argtypes = [*[pointer] * 6, number]
        self._backward.argtypes = [*[pointer] * 10, number]

    def forward(self, d: Tensor, n: Tensor, vectors: Sequence[Tensor], y: Tensor) -> None:
        """Write y."""
        self.value(d.shape, d, n, addresses(vectors), y)

    def backward(
        self, d: Tensor, n: Tensor, vectors: Sequence[Tensor], y: Tensor | None, e: Tensor, of_d: Tensor, of_n: Tensor
    ) -> list[Tensor]:
        """Write the gradients in d and n, and return those in the vectors."""
        totals = d.new_empty((len(vectors), d.shape[1] * d.shape[2]))
        self.gradients(d.shape, d, n, addresses(vectors), y, e, of_d, of_n, totals)
        return [of.reshape(v.shape) for of, v in zip(totals.unbind(0), vectors, strict=True)]

    def value(self, shape: tuple[int, ...], d: Tensor, n: Tensor, vectors: Any, y: Tensor) -> None:
        """Write y; d is taken to have this shape, and vectors are addresses."""
        given = (d.data_ptr(), n.data_ptr(), vectors, y.data_ptr())
        call(self._forward, _sizes(self._layout, shape), *given, numbers=d.numel())

    def gradients(
        self,
        shape: tuple[int, ...],
        d: Tensor,
        n: Tensor,
        vectors: Any,
        y: Tensor | None,
        e: Tensor,
        of_d: Tensor,
        of_n: Tensor,
        totals: Tensor,
    ) -> None:
        """Write the gradients in d, n, and, as rows of `totals`, in the vectors; d is taken to have this shape."""
        given = (d.data_ptr(), n.data_ptr(), vectors, None if y is None else y.data_ptr(), e.data_ptr())
        written = (of_d.data_ptr(), of_n.data_ptr(), totals.data_ptr())
        call(self._backward, _sizes(self._layout, shape), *given, *written, numbers=d.numel())


@lru_cache(maxsize=1024)
def _sizes(layout: str, shape: tuple[int, ...]) -> Any:
    """Return the sizes in the order of epilogue.c."""
    rows, groups, kernels, *positions = shape
    if layout == "positions":
        return longs([rows, groups, kernels, *positions, _BLOCK])
    (count,) = positions or [1]
    return longs([rows, groups, kernels, count, max(1, _NUMBERS // max(1, groups * kernels * count))])


def layout_of(shape: tuple[int, ...]) -> str:
    """Return what the loops over d run along: "kernels", "positions", or both at once ("few positions")."""
    if len(shape) == 3:
        return "kernels"
    return "few positions" if shape[3] < _FEW else "positions"


def compiled_epilogue(rows: str, layout: str) -> Epilogue | None:
    """Return the functions for an operator whose rows are computed by this C text (`source.row_functions`)."""
    flags = (
        f"#define BY_CHANNEL {int(layout == 'kernels')}",
        f"#define FEW_POSITIONS {int(layout == 'few positions')}",
    )
    parts = [included("elementary.h"), included("parallel.h"), *flags, rows, included("epilogue.c")]
    library = compiled("\n".join(parts))
    return None if library is None else Epilogue(library, layout)
