"""What C computes in a layer besides h·g: calls of layer.c."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from dcnet.ops.cpu.native.call import call, longs
from dcnet.ops.cpu.native.compiler import compiled, included
from dcnet.ops.inputs import RADIUS_FLOOR

Windows = Sequence[int]  # `box_sum.Windows`: size, step, apart, before, inputs, outputs
_ONE = (1, 1, 1, 0, 1, 1)
_NUMBERS = 8192  # of kernels in a chunk of work


class Sizes(NamedTuple):
    """The sizes of a layer as a C array, and how many numbers the functions of layer.c compute with."""

    in_c: Any
    of_weight: int
    in_all: int


def sizes_of(shape: tuple[int, ...], groups: int, windows: tuple[Windows, ...], weight: tuple[int, int]) -> Sizes:
    """Return the sizes for x of this shape, over up to two dimensions, and (kernels, numbers of each)."""
    images, channels, *_ = shape
    y, x = (_ONE, _ONE, *windows)[-2:]
    of_weight, of_x = weight[0] * weight[1], images * channels * y[4] * x[4]
    block = max(1, _NUMBERS // max(1, weight[1]))
    return Sizes(longs([images, groups, channels // groups, *y, *x, *weight, block]), of_weight, of_weight + of_x)


class Radius(NamedTuple):
    """The radius of every kernel: ρ, or its raw parameter if it is learned, and what multiplies it."""

    rho: Tensor | None
    learned: bool = False
    of_batch: bool = False  # E{‖x‖} of this batch
    means: Tensor | None = None  # E{‖x‖} as it is given


class Average(NamedTuple):
    """The running average of E{‖x‖}, and its momentum, negative for a cumulative average."""

    running: Tensor
    batches: Tensor
    momentum: float


class Layer:
    """Normalized kernels, norms of patches, radii and the running average of E{‖x‖}; all tensors are contiguous.

    `numbers` holds ‖w‖ and the radius of every kernel, and E{‖x‖} of every group, one after the other.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._before, self._kernels, self._after = library.before, library.kernels, library.after
        pointer, number, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
        of_radius: list[Any] = [pointer, number, number]
        self._before.argtypes = [pointer, real, *[pointer] * 5, *of_radius, *[pointer] * 3, real, pointer, number]
        self._kernels.argtypes = [*[pointer] * 5, number]
        self._after.argtypes = [*[pointer] * 9, *of_radius, *[pointer] * 2, number]

    def before(
        self,
        sizes: Sizes,
        eps: float,
        x: Tensor,
        weight: Tensor,
        unit: Tensor,
        norms: Tensor,
        numbers: Tensor,
        radius: Radius,
        average: Average | None,
    ) -> None:
        """Write the normalized kernels, the norms and the numbers, and move the running average."""
        tensors = (x.data_ptr(), weight.data_ptr(), unit.data_ptr(), norms.data_ptr(), numbers.data_ptr())
        rho, learned, of_batch, means = radius
        relative = of_batch or means is not None
        of_radius = (
            None if rho is None else rho.data_ptr(),
            learned,
            relative,
            None if means is None else means.data_ptr(),
        )
        moved: tuple[Any, ...] = (None, None, 0.0)
        if average is not None:
            moved = average.running.data_ptr(), average.batches.data_ptr(), average.momentum
        call(self._before, sizes.in_c, eps, *tensors, *of_radius, *moved, numbers=sizes.in_all)

    def kernels(self, sizes: Sizes, weight: Tensor, numbers: Tensor, unit: Tensor) -> None:
        """Write the normalized kernels again."""
        tensors = (weight.data_ptr(), numbers.data_ptr(), unit.data_ptr())
        call(self._kernels, sizes.in_c, *tensors, numbers=sizes.of_weight)

    def after(
        self,
        sizes: Sizes,
        x: Tensor,
        norms: Tensor,
        of_norms: Tensor,
        of_x: Tensor | None,
        weight: Tensor,
        numbers: Tensor,
        of_unit: Tensor | None,
        of_w_norms: Tensor | None,
        radius: Radius,
        of_radius: Tensor | None,
    ) -> None:
        """Add the part of the norms to the gradient in x.

        Turn the gradients in normalized kernels and in radii into those in kernels and in ρ (or its raw parameter), in
        place.
        """
        tensors = (x, norms, of_norms, of_x, weight, numbers, of_unit, of_w_norms, radius.rho)
        given = (None if t is None else t.data_ptr() for t in tensors)
        last = None if of_radius is None else of_radius.data_ptr()
        call(self._after, sizes.in_c, *given, radius.learned, radius.of_batch, last, numbers=sizes.in_all)


@cache
def compiled_layer() -> Layer | None:
    """Return the functions, None where they cannot be compiled."""
    floor = f"static const float RADIUS_FLOOR = {RADIUS_FLOOR!r}f;"
    texts = [*map(included, ("elementary.h", "parallel.h", "norms.c")), floor, included("layer.c")]
    library = compiled("\n".join(texts))
    return None if library is None else Layer(library)
