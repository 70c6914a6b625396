"""Where a convolution's patches lie: kernel size, stride, padding, dilation and groups, checked and made explicit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index

import torch
import torch.nn.functional as F
from torch import Tensor

Sizes = int | Sequence[int]
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


@dataclass(frozen=True)
class Geometry:
    """The patches of a convolution over `len(kernel_size)` spatial dimensions."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # before and after, each dimension
    dilation: tuple[int, ...]
    groups: int = 1
    padding_mode: str = "zeros"

    @property
    def dims(self) -> int:
        return len(self.kernel_size)

    @property
    def is_pointwise(self) -> bool:
        """Whether each position is a patch by itself: in 1×1 convolutions of stride 1, and linear layers."""
        return all(size == step == 1 for size, step in zip(self.kernel_size, self.stride, strict=True))

    @property
    def pads(self) -> list[int]:
        """The padding as F.pad takes it: last dimension first."""
        return [side for sides in reversed(self.padding) for side in sides]

    @property
    def symmetric_padding(self) -> tuple[int, ...] | None:
        """The zeros that PyTorch's convolution can add on both sides itself; None where x has to be padded first."""
        if self.padding_mode != "zeros" or any(before != after for before, after in self.padding):
            return None
        return tuple(before for before, _ in self.padding)

    def check_fits(self, sizes: Sequence[int]) -> None:
        """Raise where a window is larger than the padded map."""
        for i, size in enumerate(sizes):
            span, room = self.dilation[i] * (self.kernel_size[i] - 1) + 1, size + sum(self.padding[i])
            if span > room:
                raise ValueError(
                    f"the kernel spans {span} in dimension {i + 2}, but the input with its padding has {room} "
                    f"(sizes {tuple(sizes)})"
                )

    def output_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the output for an input of these sizes."""
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        rooms = [size + sum(sides) for size, sides in zip(sizes, self.padding, strict=True)]
        return tuple((room - span) // step + 1 for room, span, step in zip(rooms, spans, self.stride, strict=True))

    def pad(self, x: Tensor) -> Tensor:
        """Return x with the padding written out, in this geometry's padding mode."""
        if not any(self.pads):
            return x
        return F.pad(x, self.pads, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)


def sizes(name: str, value: Sizes, dims: int, least: int) -> tuple[int, ...]:
    """Return `value` as one whole number per dimension; `name` is for the error."""
    try:
        values = tuple(index(v) for v in value) if isinstance(value, Sequence) else (index(value),)
    except TypeError:
        values = ()
    if len(values) == 1:
        values *= dims
    if len(values) != dims or any(v < least for v in values):
        raise ValueError(f"{name} must be a whole number ≥ {least}, or {dims} of them, got {value!r}")
    return values


def make_geometry(
    kernel_size: Sizes,
    stride: Sizes,
    padding: str | Sizes,
    dilation: Sizes,
    groups: int,
    padding_mode: str,
    dims: int,
) -> Geometry:
    """Return the geometry that these arguments of `nn.Conv2d` (1d and 3d alike) describe."""
    kernel_size, stride, dilation = (
        sizes("kernel_size", kernel_size, dims, 1),
        sizes("stride", stride, dims, 1),
        sizes("dilation", dilation, dims, 1),
    )
    if not isinstance(groups, int) or groups < 1:
        raise ValueError(f"groups must be a whole number ≥ 1, got {groups!r}")
    if padding_mode not in PADDING_MODES:
        raise ValueError(f"unknown padding_mode {padding_mode!r}; possible: {', '.join(PADDING_MODES)}")
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(f"unknown padding {padding!r}; possible: 'same', 'valid', or numbers")
        if padding == "same" and any(s != 1 for s in stride):
            raise ValueError(f"padding='same' needs stride 1, got stride={stride}")
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel_size, strict=True)]
        sides = tuple((t // 2, t - t // 2) for t in total)  # as nn.Conv2d: an odd rest goes to the end
    else:
        sides = tuple((p, p) for p in sizes("padding", padding, dims, 0))
    return Geometry(kernel_size, stride, sides, dilation, groups, padding_mode)


LINEAR = Geometry((), (), (), ())  # the patch of a linear layer is its input vector

# cached for layers, which ask for the same geometry in every forward pass; torch.compile traces past the cache
known_geometry = lru_cache(1024)(make_geometry)

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def convolution_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype PyTorch's convolution would compute in: autocast's where it is on."""
    kind = x.device.type
    # torch.compile of PyTorch 2.11 cannot ask whether a device has autocast; "meta" has none
    if x.dtype == torch.float64 or not (torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)):
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return the plain convolution over this geometry; over no dimensions, the linear map."""
    if x.dtype != weight.dtype and convolution_dtype(x) != convolution_dtype(weight):
        raise TypeError(f"input has dtype {x.dtype}, the weight {weight.dtype}; convert one of them")
    if geometry.dims == 0:
        return F.linear(x, weight, bias)
    padding = geometry.symmetric_padding
    if padding is None:
        x, padding = geometry.pad(x), (0,) * geometry.dims
    return _CONVOLUTIONS[geometry.dims](x, weight, bias, geometry.stride, padding, geometry.dilation, geometry.groups)
