"""The gradients of a plain convolution."""

import torch
from torch import Tensor

from dcnet.ops.geometry import Geometry


def convolution_gradients(
    of_dot: Tensor, x: Tensor, kernels: Tensor, geometry: Geometry, want_x: bool, want_kernels: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients in x and in the kernels; the geometry has zeros for padding, as many on both sides."""
    g = geometry
    options = (g.stride, g.symmetric_padding, g.dilation, False, [0] * g.dims, g.groups)
    of_x, of_kernels, _ = torch.ops.aten.convolution_backward(
        of_dot, x, kernels, None, *options, (want_x, want_kernels, False)
    )
    return of_x, of_kernels


def exact_convolutions() -> bool:
    """Tell whether convolutions have all digits of float32, as they do unless PyTorch is told otherwise."""
    return torch.backends.mkldnn.conv.fp32_precision in ("none", "ieee")  # type: ignore[attr-defined]
