"""Depthwise layers on small maps in C, channels side by side: sizes for lanes.c, and which layers it is for."""

from functools import lru_cache
from typing import Any

from dcnet.ops.cpu.native.call import longs
from dcnet.ops.geometry import Geometry

HEADERS = ("elementary.h", "parallel.h", "vectors.h", "kernels.h", "lanes.h", "lanes_spread.h")
BYTES = 32  # of a vector: eight channels side by side
_FARTHEST, _MOST_STEPS = 16, 4  # of a kernel in one dimension; lanes_spread.h has room for that
_WIDEST = 64  # of maps; rows of wider ones are long enough for loops along them
_FEWEST = 8  # channels: fewer leave lanes empty


def for_lanes(geometry: Geometry, shape: tuple[int, ...]) -> bool:
    """Tell whether a layer is faster with channels side by side; the layout of `lanes_of` is made for these only."""
    channels, *sizes = shape[1:]
    if geometry.dims != 2 or max(sizes) > _WIDEST or channels < _FEWEST:
        return False
    reach = [(k - 1) * apart + 1 for k, apart in zip(geometry.kernel_size, geometry.dilation, strict=True)]
    near = max(*reach, *map(sum, geometry.padding)) <= _FARTHEST  # large dilations have few taps that reach a map
    return near and max(geometry.stride) <= _MOST_STEPS


@lru_cache(maxsize=1024)
def lanes_of(geometry: Geometry, shape: tuple[int, ...], kernels: int) -> tuple[tuple[int, ...], Any, None]:
    """Return the sizes of results for x of this shape, and the numbers of `struct layout` of lanes.h, in its order."""
    images, channels, *sizes = shape
    reach = [(k - 1) * a for k, a in zip(geometry.kernel_size, geometry.dilation, strict=True)]
    steps, before = geometry.stride, [pair[0] for pair in geometry.padding]
    out = [
        (size + sum(padding) - r - 1) // step + 1
        for size, padding, r, step in zip(sizes, geometry.padding, reach, steps, strict=True)
    ]
    read = [(o - 1) * step + r + 1 for o, step, r in zip(out, steps, reach, strict=True)]
    whole = [max(r, b + size) for r, b, size in zip(read, before, sizes, strict=True)]
    margin = -(-reach[1] // steps[1])
    pitch = margin + max(out[1], (before[1] + sizes[1] - 1) // steps[1] + 1)
    met = [max(0, min(size, r - b)) for size, r, b in zip(sizes, read, before, strict=True)]
    of_kernels = (*geometry.kernel_size, *steps, *geometry.dilation)
    counts = (images, channels, kernels // channels)
    return tuple(out), longs([*counts, *sizes, *met, *out, *of_kernels, *before, *whole, margin, pitch]), None
