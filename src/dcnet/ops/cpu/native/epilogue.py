"""h·g on the output of a convolution in C: calls of epilogue.c."""

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dcnet.ops.cpu.native.call import addresses, call, longs
from dcnet.ops.cpu.native.compiler import compiled, included

_BLOCK = 512  # positions of a piece of work
_NUMBERS = 16384  # of a piece of work where kernels lie next to each other
_FEW = 8  # positions: fewer than a vector has numbers


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
        sizes, _, vectors = self._prepared(d, vectors)
        call(self._forward, sizes, d.data_ptr(), n.data_ptr(), addresses(vectors), y.data_ptr())

    def backward(
        self, d: Tensor, n: Tensor, vectors: Sequence[Tensor], y: Tensor | None, e: Tensor, of_d: Tensor, of_n: Tensor
    ) -> list[Tensor]:
        """Write the gradients in d and n, and return those in the vectors."""
        sizes, pieces, given = self._prepared(d, vectors)
        few = self._layout == "few positions"
        shape = (pieces, len(vectors), d.shape[1] * d.shape[2] * (d.shape[3] if few else 1))
        # where a number of a vector comes for each result, sums are added to
        sums = d.new_empty(shape) if self._layout == "positions" else d.new_zeros(shape)
        others = (None if t is None else t.data_ptr() for t in (y, e, of_d, of_n, sums))
        call(self._backward, sizes, d.data_ptr(), n.data_ptr(), addresses(given), *others)
        total = sums.sum(0)
        if few:
            total = total.unflatten(1, (-1, d.shape[3])).sum(2)
        return [of.reshape(v.shape) for of, v in zip(total.unbind(0), vectors, strict=True)]

    def _prepared(self, d: Tensor, vectors: Sequence[Tensor]) -> tuple[Any, int, Sequence[Tensor]]:
        """Return the sizes as epilogue.c takes them, the pieces that leave sums for all kernels, and the vectors."""
        rows, groups, kernels, *positions = d.shape
        if self._layout == "positions":
            return longs([rows, groups, kernels, *positions, _BLOCK]), rows * -(-positions[0] // _BLOCK), vectors
        if self._layout == "few positions":
            kernels *= positions[0]
            vectors = [v.expand(*d.shape[1:]).contiguous() for v in vectors]
        block = max(1, _NUMBERS // max(1, groups * kernels))
        return longs([rows, groups, kernels, *(positions or [1]), block]), -(-rows // block), vectors


def layout_of(d: Tensor) -> str:
    """Return which loops are for d: over "kernels", "positions", or both at once where there are "few positions"."""
    if d.dim() == 3:
        return "kernels"
    return "few positions" if d.shape[3] < _FEW else "positions"


def compiled_epilogue(rows: str, layout: str) -> Epilogue | None:
    """Return the functions for an operator whose rows are computed by this C text (`source.row_functions`)."""
    flags = (
        f"#define BY_CHANNEL {int(layout == 'kernels')}",
        f"#define FEW_POSITIONS {int(layout == 'few positions')}",
    )
    parts = [included("elementary.h"), included("parallel.h"), *flags, rows, included("epilogue.c")]
    library = compiled("\n".join(parts))
    return None if library is None else Epilogue(library, layout)
