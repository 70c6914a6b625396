"""Depthwise layers in C: the layout of a plane in memory, and calls of depthwise.c."""

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from dcnet.ops.cpu.native.call import addresses, call, longs
from dcnet.ops.cpu.native.compiler import compiled, included
from dcnet.ops.cpu.native.lanes import BYTES, HEADERS, lanes_of
from dcnet.ops.geometry import Geometry

Sizes = tuple[int, ...]
_BAND = 1024  # places that a loop processes at once: few, so that all intermediate results stay in the fastest cache
_ROWS = 3  # computed at once in rows.h; a band has a multiple of them
_WASTE = 1.5  # rows are processed together if that takes at most this many places per result
_HEADERS = ("elementary.h", "parallel.h", "vectors.h", "kernels.h", "planes.h", "rows.h", "spread.h")


class _Along(NamedTuple):
    """One dimension: its sizes, the zeros before the map, and the taps that reach the map, with their places."""

    size: int
    out: int
    step: int
    before: int
    taps: list[tuple[int, int]]

    @property
    def read(self) -> int:
        """How far results reach, counted from the zeros before the map."""
        return (self.out - 1) * self.step + (self.taps[-1][1] if self.taps else 0) + 1

    @property
    def length(self) -> int:
        """The places of a phase."""
        return max(-(-max(self.read, self.size + self.before) // self.step), self.out)

    @property
    def spacing(self) -> int:
        """The places of a phase from one map to the next, which share the zeros in between."""
        return max(-(-max(self.read - self.before, self.size + self.before) // self.step), self.out)


def _along(size: int, kernel: int, step: int, apart: int, before: int, after: int) -> _Along:
    out = (size + before + after - apart * (kernel - 1) - 1) // step + 1
    offsets = [(j, j * apart - before) for j in range(kernel)]
    # with a large dilation, most taps reach only zeros
    met = [(j, at) for j, at in offsets if any(0 <= at + o * step < size for o in range(out))]
    start = max(0, -met[0][1]) if met else 0
    return _Along(size, out, step, start, [(j, at + start) for j, at in met])


def _in_a_band(rows: int, most: int, stack: int) -> int:
    """Return how many rows are processed together: all of a stack of images, or a part of one image."""
    rows = max(1, min(rows, most))
    return rows if stack > 1 or rows < _ROWS else rows // _ROWS * _ROWS


@lru_cache(maxsize=1024)
def layout_of(geometry: Geometry, shape: tuple[int, ...], kernels: int) -> tuple[Sizes, Any, Any]:
    """Return the sizes of results for x of this shape, `struct layout` of planes.h, and the taps.

    For each tap, C gets its number, its phase and its place.
    """
    images, channels, *sizes = shape
    g, before, after = geometry, *zip(*geometry.padding, strict=True)
    along = [_along(*row) for row in zip(sizes, g.kernel_size, g.stride, g.dilation, before, after, strict=True)]
    y, x = (_Along(1, 1, 1, 0, [(0, 0)]), *along)[-2:]
    pitch, width = x.length, geometry.kernel_size[-1]
    taps = [
        (j * width + i, (v % y.step) * x.step + u % x.step, v // y.step * pitch + u // x.step)
        for j, v in y.taps
        for i, u in x.taps
    ]
    most = _BAND // pitch if pitch <= _WASTE * x.out else 1  # rows processed together
    stack = max(1, min(images, most // y.spacing))
    rows, in_rows = (y.out, -(-y.size // y.step)) if stack == 1 else (stack * y.spacing, stack * y.spacing)
    layout = {  # in the order of the struct
        "images": images,
        "channels": channels,
        "multiplier": kernels // channels,
        "height": y.size,
        "width": x.size,
        "read_height": min(y.size, y.read - y.before),
        "read_width": min(x.size, x.read - x.before),
        "out_height": y.out,
        "out_width": x.out,
        "step_y": y.step,
        "step_x": x.step,
        "before_y": y.before,
        "before_x": x.before,
        "pitch": pitch,
        "plane": pitch * ((stack - 1) * y.spacing + y.length),
        "stack": stack,
        "spacing": y.spacing,
        "band": _in_a_band(rows, most, stack),
        "in_band": _in_a_band(in_rows, most, stack),
        "kernel": math.prod(g.kernel_size),
        "taps": len(taps),
        "margin": max((place for _, _, place in taps), default=0),
    }
    in_columns = [number for column in zip(*taps, strict=True) for number in column]
    return tuple(a.out for a in along), longs([*layout.values()]), longs(in_columns)


class Depthwise:
    """The value and the gradients of an operator in a depthwise layer.

    layout_of: returns the sizes of results, and the layout and taps that the library takes.
    radius: which vector is to be multiplied by the mean norm of the channel, or −1.
    """

    def __init__(self, library: ctypes.CDLL, layout_of: Callable[..., tuple[Sizes, Any, Any]]) -> None:
        self._layout_of = layout_of
        self._forward, self._backward = library.forward, library.backward
        pointer, number = ctypes.c_void_p, ctypes.c_long
        start: list[Any] = [pointer, pointer, ctypes.c_float, number, *[pointer] * 4]
        self._forward.argtypes = [*start, *[pointer] * 2, number]
        self._backward.argtypes = [*start, *[pointer] * 6, number]

    def forward(
        self, x: Tensor, kernels: Tensor, geometry: Geometry, eps: float, vectors: Sequence[Tensor], radius: int
    ) -> tuple[Tensor, Tensor]:
        """Return y, and the mean norms of the channels, which are only set if a radius is relative to them."""
        out, layout, taps = self._layout_of(geometry, x.shape, len(kernels))
        y = x.new_empty((len(x), len(kernels), *out))
        means = x.new_empty(x.shape[1])
        given = (x.data_ptr(), kernels.data_ptr(), addresses(vectors), means.data_ptr())
        call(self._forward, layout, taps, eps, radius, *given, y.data_ptr())
        return y, means

    def backward(
        self,
        x: Tensor,
        kernels: Tensor,
        geometry: Geometry,
        eps: float,
        vectors: Sequence[Tensor],
        radius: int,
        means: Tensor,
        y: Tensor | None,
        e: Tensor,
        of_x: Tensor | None,
        of_kernels: Tensor | None,
        sums: Sequence[Tensor],
    ) -> None:
        """Write the gradients in x, in the kernels and in the vectors, `sums`."""
        _, layout, taps = self._layout_of(geometry, x.shape, len(kernels))
        given = (x.data_ptr(), kernels.data_ptr(), addresses(vectors), means.data_ptr())
        others = (None if t is None else t.data_ptr() for t in (y, e, of_x, of_kernels))
        call(self._backward, layout, taps, eps, radius, *given, *others, addresses(sums))


def compiled_depthwise(rows: str, lanes: bool) -> Depthwise | None:
    """Return the functions for an operator whose rows are computed by this C text (`source.row_functions`).

    lanes: whether channels lie side by side, as in lanes.c.
    """
    headers, text = (HEADERS, "lanes.c") if lanes else (_HEADERS, "depthwise.c")
    first = [f"#define BYTES {BYTES}"] if lanes else []
    library = compiled("\n".join([*first, *map(included, headers), rows, included(text)]))
    return None if library is None else Depthwise(library, lanes_of if lanes else layout_of)
