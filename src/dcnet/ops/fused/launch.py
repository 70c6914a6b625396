"""From tensors to kernel launches: memory orders and block sizes; kernels normalised, patch norms and their gradients."""

import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from dcnet.ops.fused import norm_kernels
from dcnet.ops.fused.fast import launch


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class View:
    """A map (N, groups·kernels, …) as (batch, groups, kernels, positions) with strides; one batch of all positions where the layout allows."""

    def __init__(self, x: Tensor, groups: int) -> None:
        batch, channels = x.shape[:2]
        positions = math.prod(x.shape[2:])
        self.groups, self.kernels = groups, channels // groups
        by_channel = x.dim() == 2 or (channels > 1 and x.stride(1) == 1 and positions > 1)
        self.channel, self.position = (1, channels) if by_channel else (positions, 1)
        self.rows_first = by_channel
        if groups == 1 and (by_channel or positions == 1 or batch == 1):
            if not by_channel and positions == 1:
                self.channel, self.position, self.rows_first = 1, channels, True
            self.batch, self.positions, self.stride = 1, batch * positions, 0
        else:
            self.batch, self.positions, self.stride = batch, positions, channels * positions

    def blocks(self) -> tuple[int, int]:
        """Sizes of a tile, positions × kernels."""
        if self.rows_first:  # the widest block that wastes little of itself: 96 kernels are 3 × 32, not 1 × 128
            wastes = {bk: cdiv(self.kernels, bk) * bk for bk in (128, 64, 32, 16, 8, 4, 2, 1)}
            bk = next(bk for bk, covered in wastes.items() if covered <= 1.1 * self.kernels)
        else:
            bk = min(triton.next_power_of_2(self.kernels), 32)
        bp = max(1, min(4096 // bk, triton.next_power_of_2(self.positions)))
        return bp, bk

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Of batch, group, kernel and position."""
        return self.stride, self.kernels * self.channel, self.channel, self.position

    @property
    def norm_strides(self) -> tuple[int, int, int]:
        """Of batch, group and position in a map (N, groups, …) without gaps."""
        return self.groups * self.positions, self.positions, 1


def dense(x: Tensor) -> Tensor:
    """x in contiguous or channels_last order, copied only if it is in neither."""
    if x.is_contiguous() or x.dim() == 2:
        return x.contiguous()
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    if x.dim() == 3:  # (N, C, L) with channels last has no name of its own
        return x if x.transpose(1, 2).is_contiguous() else x.contiguous()
    return x if x.is_contiguous(memory_format=order) else x.contiguous()


def like(x: Tensor, other: Tensor) -> Tensor:
    """x in the memory order of the other."""
    if x.stride() == other.stride():
        return x
    return torch.empty_like(other, dtype=x.dtype).copy_(x)


def either(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def unit_kernel(weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """w/‖w‖ in the dtype asked for, in the memory order of w, and ‖w‖ in float32."""
    unit = torch.empty_like(weight, dtype=dtype)
    norm = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    size = weight[0].numel()
    launch(norm_kernels.normalise, (weight.shape[0],), (weight, unit, norm), (size, eps, min(1024, triton.next_power_of_2(size))))
    return unit, norm


def unit_kernel_backward(weight: Tensor, norm: Tensor, e: Tensor | None, e_norm: Tensor | None) -> Tensor:
    """The gradient in w of `unit_kernel`."""
    grad = torch.empty_like(weight)
    size = weight[0].numel()
    e = None if e is None else like(e, weight)
    there = (e is not None, e_norm is not None)
    pointers = (weight, norm, either(e, weight), either(e_norm, norm), grad)
    launch(norm_kernels.normalise_backward, (weight.shape[0],), pointers, (size, *there, min(1024, triton.next_power_of_2(size))))
    return grad


def _three(values: Sequence[int], missing: int) -> list[int]:
    return [missing] * (3 - len(values)) + list(values)


def _channel_tiles(view: View) -> tuple[int, int]:
    bc = min(triton.next_power_of_2(view.kernels), 128 if view.rows_first else 16)
    return max(1, min(4096 // bc, triton.next_power_of_2(view.positions))), bc


def patch_norms(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, eps: float
) -> Tensor:
    """‖x‖ of every patch and group: (N, groups, …)."""
    sizes = x.shape[2:]
    out = [(i + 2 * p - d * (k - 1) - 1) // s + 1 for i, p, d, k, s in zip(sizes, padding, dilation, kernel, stride, strict=True)]
    q = torch.empty((x.shape[0], groups, *sizes), dtype=torch.float32, device=x.device)
    n = torch.empty((x.shape[0], groups, *out), dtype=torch.float32, device=x.device)
    if n.numel() == 0:
        return n
    view = View(x, groups)
    bp, bc = _channel_tiles(view)
    blocks = cdiv(view.positions, bp)
    sizes_of_x = (groups, view.kernels, view.positions, blocks, view.stride, view.channel, view.position)
    launch(norm_kernels.squares, (view.batch * groups * blocks,), (x, q), (*sizes_of_x, bp, bc))
    geometry = (*_three(stride, 1), *_three(padding, 0), *_three(dilation, 1), *_three(kernel, 1))
    launch(norm_kernels.box, (cdiv(n.numel(), 256),), (q, n), (n.numel(), *_three(sizes, 1), *_three(out, 1), *geometry, eps, 256))
    return n


def patch_norms_backward(
    e: Tensor,
    x: Tensor,
    n: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    grad: Tensor | None,
) -> Tensor:
    """The gradient in x, added to `grad` in place where one is given."""
    groups = n.shape[1]
    t = torch.empty((x.shape[0], groups, *x.shape[2:]), dtype=torch.float32, device=x.device)
    total = grad if grad is not None else torch.empty_like(x)
    if x.numel() == 0:
        return total
    geometry = (*_three(stride, 1), *_three(padding, 0), *_three(dilation, 1), *_three(kernel, 1))
    sizes = (t.numel(), *_three(x.shape[2:], 1), *_three(n.shape[2:], 1))
    launch(norm_kernels.box_backward, (cdiv(t.numel(), 256),), (e.contiguous(), n, t), (*sizes, *geometry, 256))
    total = like(total, x)
    view = View(x, groups)
    bp, bc = _channel_tiles(view)
    blocks = cdiv(view.positions, bp)
    strides = (view.stride, view.channel, view.position)
    grid = (view.batch * groups * blocks, cdiv(view.kernels, bc))
    others = (groups, view.kernels, view.positions, blocks, *strides, *strides, grad is not None, bp, bc)
    launch(norm_kernels.add_product, grid, (total, x, t), others)
    return total
