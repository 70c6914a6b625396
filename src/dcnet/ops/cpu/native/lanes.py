"""Depthwise layers on small maps in C, channels side by side: sizes for lanes.c, and which layers it is for."""

from functools import lru_cache
from typing import Any, NamedTuple

from dcnet.ops.cpu.native.call import longs
from dcnet.ops.geometry import Geometry

HEADERS = ("elementary.h", "parallel.h", "vectors.h", "kernels.h", "lanes.h", "lanes_spread.h")
BYTES = 32  # of a vector: eight channels side by side
_FARTHEST, _MOST_STEPS = 16, 4  # of a kernel in one dimension; lanes_spread.h has room for that
_WIDEST = 64  # of maps; rows of wider ones are long enough for loops along them
_FEWEST = 8  # channels: fewer leave lanes empty


class Lanes(NamedTuple):
    """The sizes of a layer, field by field as in `struct layout` of lanes.h, which differs from that of planes.h."""

    images: int
    channels: int
    multiplier: int
    height: int
    width: int
    read_height: int
    read_width: int
    out_height: int
    out_width: int
    taps_y: int
    taps_x: int
    step_y: int
    step_x: int
    apart_y: int
    apart_x: int
    before_y: int
    before_x: int
    rows: int
    columns: int
    margin: int
    pitch: int


def for_lanes(geometry: Geometry, shape: tuple[int, ...]) -> bool:
    """Tell whether a layer is faster with channels side by side; the layout of `lanes_of` is made for these only."""
    channels, *sizes = shape[1:]
    if geometry.dims != 2 or max(sizes) > _WIDEST or channels < _FEWEST:
        return False
    reach = [(k - 1) * apart + 1 for k, apart in zip(geometry.kernel_size, geometry.dilation, strict=True)]
    near = max(*reach, *map(sum, geometry.padding)) <= _FARTHEST  # large dilations have few taps that meet a map
    return near and max(geometry.stride) <= _MOST_STEPS


@lru_cache(maxsize=1024)
def lanes_of(geometry: Geometry, shape: tuple[int, ...], kernels: int) -> tuple[Lanes, Any, None]:
    """Return the layout for x of this shape, and the same as C takes it."""
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
    layout = Lanes._make(
        (
            images,
            channels,
            kernels // channels,
            *sizes,
            *(max(0, min(size, r - b)) for size, r, b in zip(sizes, read, before, strict=True)),
            *out,
            *geometry.kernel_size,
            *steps,
            *geometry.dilation,
            *before,
            *whole,
            margin,
            pitch,
        )
    )
    return layout, longs(layout), None
