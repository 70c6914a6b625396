"""Norms of patches and kernels, ‖v‖ = sqrt(Σv² + eps), in float32 at least, by ordinary operations."""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.ops.geometry import Geometry
from dcnet.util.compat import recorded_by_jit

EPS = 1e-4  # inside the root of every norm, for patches and kernels alike


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of norms, angles and magnitudes for this input: float64 for float64, else float32."""
    return torch.promote_types(x.dtype, torch.float32)


def root(squares: Tensor, eps: float) -> Tensor:
    """Return sqrt(squares + eps), with gradient 0 where the root is 0."""
    if eps > 0.0:
        return (squares + eps).sqrt()
    nonzero = squares > 0.0
    return torch.where(nonzero, torch.where(nonzero, squares, 1.0).sqrt(), 0.0)


def never_zero(eps: float, dtype: torch.dtype) -> bool:
    """Tell whether eps keeps norms above 0; an eps that the dtype rounds to 0 does not."""
    return eps > torch.finfo(dtype).tiny


def inverse(norm: Tensor, eps: float) -> Tensor:
    """Return 1/norm, and 0 where the norm is 0."""
    if never_zero(eps, norm.dtype):
        return norm.reciprocal()
    nonzero = norm > 0.0
    return torch.where(nonzero, torch.where(nonzero, norm, 1.0).reciprocal(), 0.0)


def kernel_norm(weight: Tensor, eps: float = EPS) -> Tensor:
    """Return ‖w‖ of every kernel: (out_channels,)."""
    return root(weight.to(compute_dtype(weight)).square().flatten(1).sum(1), eps)


def per_kernel(values: Tensor, weight: Tensor) -> Tensor:
    """Return values (out_channels,) in a shape that goes with the weight's."""
    return values.reshape(-1, *[1] * (weight.dim() - 1))


def normalized(weight: Tensor, one_over_norm: Tensor) -> Tensor:
    """Return w/‖w‖ in the dtype of w."""
    return (weight.to(one_over_norm.dtype) * per_kernel(one_over_norm, weight)).to(weight.dtype)


def sum_of_squares(x: Tensor, groups: int = 1) -> Tensor:
    """Return Σ over each group's channels of x², in the compute dtype; (N, C, …) gives (N, groups, …)."""
    return x.to(compute_dtype(x)).square().unflatten(1, (groups, -1)).sum(2)


def box_sum(maps: Tensor, geometry: Geometry) -> Tensor:
    """Return the sum over the window of every patch, for each channel separately.

    Pooling and slices, not a convolution with ones: a convolution may round to bf16 under autocast, or to TF32.
    """
    maps = geometry.pad(maps)
    if geometry.is_pointwise:
        return maps
    # torch.compile fuses the slices, while its pooling fails for maps with one channel and unknown sizes. The old ONNX
    # exporter, which uses torch.jit.trace, ignores divisor_override.
    if any(d > 1 for d in geometry.dilation) or torch.compiler.is_compiling() or recorded_by_jit():
        return sum_of_slices(maps, geometry.kernel_size, geometry.stride, geometry.dilation)
    if geometry.dims == 3:
        return F.avg_pool3d(maps, geometry.kernel_size, geometry.stride, divisor_override=1)
    if geometry.dims == 2:
        return F.avg_pool2d(maps, geometry.kernel_size, geometry.stride, divisor_override=1)
    window, stride = (1, *geometry.kernel_size), (1, *geometry.stride)
    return F.avg_pool2d(maps.unsqueeze(2), window, stride, divisor_override=1).squeeze(2)


def sum_of_slices(
    maps: Tensor, kernel_size: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """Return the sum over every window of maps without padding, one dimension after another."""
    for i, (size, step, apart) in enumerate(zip(kernel_size, stride, dilation, strict=True)):
        lead = (slice(None),) * (maps.dim() - len(kernel_size) + i)
        # ends are counted from the back, so that a recorded graph holds for maps of any size
        ends = [(j + 1 - size) * apart or None for j in range(size)]
        maps = reduce(torch.add, [maps[*lead, slice(j * apart, end, step)] for j, end in enumerate(ends)])
    return maps
