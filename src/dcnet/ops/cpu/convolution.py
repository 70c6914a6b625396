"""The gradients of a plain convolution."""

import torch
from torch import Tensor

from dcnet.ops.geometry import Geometry


def convolution_gradients(
    of_dot: Tensor, x: Tensor, kernels: Tensor, geometry: Geometry, want_x: bool, want_kernels: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients in x and in the kernels; the geometry has zero padding, the same on both sides."""
    g = geometry
    if g.dims == 0:
        return of_dot.mm(kernels) if want_x else None, of_dot.t().mm(x) if want_kernels else None
    options = (g.stride, g.symmetric_padding, g.dilation, False, [0] * g.dims, g.groups)
    of_x, of_kernels, _ = torch.ops.aten.convolution_backward(
        of_dot, x, kernels, None, *options, (want_x, want_kernels, False)
    )
    return of_x, of_kernels


def exact_convolutions() -> bool:
    """Tell whether convolutions have full float32 precision, which is PyTorch's default."""
    return torch.backends.mkldnn.conv.fp32_precision in ("none", "ieee")  # type: ignore[attr-defined]


def autocast(x: Tensor) -> bool:
    """Tell whether autocast is active; it chooses the dtype of convolutions."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
