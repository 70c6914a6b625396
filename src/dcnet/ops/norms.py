"""Norms of patches and kernels, ‖v‖ = sqrt(Σv² + eps), in float32 at least."""

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from dcnet.ops.chunks import pieces
from dcnet.ops.geometry import Geometry, Sizes, geometry

EPS = 1e-4  # inside the root of every norm, for patches and kernels alike


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of norms, angles and magnitudes for this input: float64 for float64, else float32."""
    return torch.promote_types(x.dtype, torch.float32)


def recorded_by_jit() -> bool:
    """Tell whether torch.jit.trace writes down what is computed; sizes are then tensors, not to be looked at."""
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


def plain_autograd() -> bool:
    """Whether ordinary operations must do, without autograd functions of our own.

    Some back ends of torch.compile lose the second derivative of an autograd function without a word; function
    transforms (vmap, jvp, …) and forward-mode differentiation need rules that ordinary operations have; torch.jit.trace and
    what is made of it (TensorBoard's graphs, counts by fvcore, the old ONNX exporter) cannot look into a function.
    """
    if recorded_by_jit():
        return True
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    modes = torch._C._TorchDispatchModeKey  # make_fx records, and fake tensors have no numbers to look at
    return any(torch._C._get_dispatch_mode(key) is not None for key in (modes.PROXY, modes.FAKE))


def squares_in_pieces(x: Tensor, groups: int) -> Tensor:
    """Σ over each group's channels of x², in the compute dtype; not for autograd."""
    squares = torch.empty((x.shape[0], groups, *x.shape[2:]), dtype=compute_dtype(x), device=x.device)
    for part, sums in pieces(x, squares):
        torch.sum(part.to(squares.dtype).square().unflatten(1, (groups, -1)), 2, out=sums)
    return squares if x.numel() else squares.zero_()


class _SumOfSquares(torch.autograd.Function):
    """Σ over each group's channels of x², in the compute dtype; keeps x alone, which the convolution keeps anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int) -> Tensor:
        ctx.save_for_backward(x)
        return squares_in_pieces(x, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        groups = grad.shape[1]
        product = x.unflatten(1, (groups, -1)) * (2.0 * grad).unsqueeze(2)
        return product.reshape(x.shape).to(x.dtype), None


def sum_of_squares(x: Tensor, groups: int = 1) -> Tensor:
    """Σ over each group's channels of x²; (N, C, …) gives (N, groups, …)."""
    if plain_autograd():
        return x.to(compute_dtype(x)).square().unflatten(1, (groups, -1)).sum(2)
    return _SumOfSquares.apply(x, groups)


def root(squares: Tensor, eps: float) -> Tensor:
    """sqrt(squares + eps), with gradient 0 where that is 0."""
    if eps > 0.0:
        return (squares + eps).sqrt()
    nonzero = squares > 0.0
    return torch.where(nonzero, torch.where(nonzero, squares, 1.0).sqrt(), 0.0)


def never_zero(eps: float, dtype: torch.dtype) -> bool:
    """Whether eps keeps a norm from 0; one that is 0 itself to the dtype does not."""
    return eps > torch.finfo(dtype).tiny


def inverse(norm: Tensor, eps: float) -> Tensor:
    """1/norm, and 0 where the norm is 0."""
    if never_zero(eps, norm.dtype):
        return norm.reciprocal()
    nonzero = norm > 0.0
    return torch.where(nonzero, torch.where(nonzero, norm, 1.0).reciprocal(), 0.0)


def kernel_norm(weight: Tensor, eps: float = EPS) -> Tensor:
    """‖w‖ of every kernel: (out_channels,)."""
    return root(weight.to(compute_dtype(weight)).square().flatten(1).sum(1), eps)


def box_sum(maps: Tensor, where: Geometry) -> Tensor:
    """The sum over the window of every patch, each channel by itself.

    Pooling and slices, not a convolution with ones: a convolution may round to bf16 under autocast, or to TF32.
    """
    maps = where.pad(maps)
    if all(
        size == step == 1 for size, step in zip(where.kernel_size, where.stride, strict=True)
    ):  # no dimensions included
        return maps
    if (
        maps.device.type == "cpu"
        and all(step == 1 for step in where.stride)
        and max(where.kernel_size) <= 7
        and not plain_autograd()
    ):
        return _BoxSum.apply(maps, where.kernel_size, where.dilation)
    # torch.compile fuses the slices; its own pooling trips over maps with one channel and unknown sizes
    # and the old ONNX exporter, which follows torch.jit.trace, divides by the size of the window whatever it is told
    if all(d == 1 for d in where.dilation) and not torch.compiler.is_compiling() and not recorded_by_jit():
        if where.dims == 3:
            return F.avg_pool3d(maps, where.kernel_size, where.stride, divisor_override=1)
        if where.dims == 2:
            return F.avg_pool2d(maps, where.kernel_size, where.stride, divisor_override=1)
        return F.avg_pool2d(maps.unsqueeze(2), (1, *where.kernel_size), (1, *where.stride), divisor_override=1).squeeze(
            2
        )
    return _sum_of_slices(maps, where.kernel_size, where.stride, where.dilation)


class _BoxSum(torch.autograd.Function):
    """The sum over every window, one step apart: slices, one dimension after another, which a CPU does five times faster than pooling."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, kernel_size: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
        ctx.windows = kernel_size, dilation
        return _sum_of_slices(maps, kernel_size, (1,) * len(kernel_size), dilation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # as many windows hold a value as values are in a window: the same sums again, of the gradient with zeros around
        spans = [(size - 1) * dilation for size, dilation in zip(*ctx.windows, strict=True)]
        return (
            _BoxSum.apply(F.pad(grad, [span for span in reversed(spans) for _ in range(2)]), *ctx.windows),
            None,
            None,
        )


def _sum_of_slices(
    maps: Tensor, kernel_size: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    for i, (size, step, apart) in enumerate(zip(kernel_size, stride, dilation, strict=True)):
        lead = (slice(None),) * (maps.dim() - len(kernel_size) + i)
        # ends counted from the end: what is recorded then holds for maps of any size
        ends = [(j + 1 - size) * apart or None for j in range(size)]
        maps = reduce(torch.add, [maps[*lead, slice(j * apart, end, step)] for j, end in enumerate(ends)])
    return maps


def norm_map(x: Tensor, where: Geometry, eps: float) -> Tensor:
    """‖x‖ of every patch and group: (N, groups, …). Padding the small map is padding x: both copy or mirror."""
    return root(box_sum(sum_of_squares(x, where.groups), where), eps)


def patch_norm(
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: str | Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    eps: float = EPS,
) -> Tensor:
    """‖x‖ of every patch: (N, groups, H, W) for an input (N, C, H, W); one and three dimensions alike.

    The first dimension is always the batch: (N, C, L) is read as one-dimensional.

    >>> patch_norm(torch.ones(1, 3, 4, 4), 2, eps=0.0).shape
    torch.Size([1, 1, 3, 3])
    """
    check_input(x, "input")
    check_eps(eps)
    if x.dim() not in (3, 4, 5):
        raise ValueError(
            f"input must be (N, C, …) with one to three spatial dimensions, got the shape {tuple(x.shape)}"
        )
    where = geometry(kernel_size, stride, padding, dilation, groups, padding_mode, x.dim() - 2)
    if x.shape[1] % groups:
        raise ValueError(f"groups={groups} does not divide the {x.shape[1]} channels of the input")
    where.check_fits(x.shape[2:])
    return norm_map(x, where, eps)


def check_input(x: Tensor, name: str) -> None:
    """Raises unless x is a tensor of real floating-point numbers."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} has dtype {x.dtype}; decoupled operators take float64, float32, bfloat16 and float16")


def check_eps(eps: float) -> None:
    """Raises unless eps may stand inside a norm."""
    if not isinstance(eps, int | float) or not 0.0 <= eps < float("inf"):
        raise ValueError(f"eps must be a finite number ≥ 0, got {eps!r}")
