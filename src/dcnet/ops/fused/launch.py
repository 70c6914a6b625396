"""From tensors to kernel launches: memory orders and block sizes; kernels normalised, patch norms and their gradients."""

import math
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from dcnet.ops.fused import norm_kernels
from dcnet.ops.fused.fast import Launcher, Launchers, Piece, aligned

Sizes = tuple[int, ...]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class View:
    """A map (N, groups·kernels, …) as (batch, groups, kernels, positions) with strides; one batch of all positions where the layout allows."""

    def __init__(self, shape: Sizes, stride: Sizes, groups: int) -> None:
        batch, channels = shape[:2]
        positions = math.prod(shape[2:])
        self.groups, self.kernels = groups, channels // groups
        by_channel = len(shape) == 2 or (channels > 1 and stride[1] == 1 and positions > 1)
        self.channel, self.position = (1, channels) if by_channel else (positions, 1)
        self.rows_first = by_channel
        if groups == 1 and (by_channel or positions == 1 or batch == 1):
            if not by_channel and positions == 1:
                self.channel, self.position, self.rows_first = 1, channels, True
            self.batch, self.positions, self.stride = 1, batch * positions, 0
        else:
            self.batch, self.positions, self.stride = batch, positions, channels * positions

    def blocks(self, size: int) -> tuple[int, int]:
        """How a tile of that many elements is made up, positions × kernels."""
        if self.rows_first:  # the widest block that wastes little of itself: 96 kernels are 3 × 32, not 1 × 128
            wastes = {bk: cdiv(self.kernels, bk) * bk for bk in (128, 64, 32, 16, 8, 4, 2, 1)}
            bk = next(bk for bk, covered in wastes.items() if covered <= 1.1 * self.kernels)
        else:
            bk = min(triton.next_power_of_2(self.kernels), 32)
        bp = max(1, min(size // bk, triton.next_power_of_2(self.positions)))
        return bp, bk

    def channel_blocks(self) -> tuple[int, int]:
        """Sizes of a tile for kernels that go over x, positions × channels."""
        bc = min(triton.next_power_of_2(self.kernels), 128 if self.rows_first else 16)
        return max(1, min(4096 // bc, triton.next_power_of_2(self.positions))), bc

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


@lru_cache(1024)
def _kernel_launchers(kernels: int, size: int, has_norm: bool, *_for: torch.dtype | torch.device) -> tuple[Launcher, Launcher]:
    block = min(1024, triton.next_power_of_2(size))
    forward = Launcher(norm_kernels.normalise, (kernels,), (size, block))
    return forward, Launcher(norm_kernels.normalise_backward, (kernels,), (size, has_norm, block))


def unit_kernel(weight: Tensor, norm: Piece, eps: float, dtype: torch.dtype) -> Tensor:
    """w/‖w‖ in the dtype asked for, in the memory order of w; and ‖w‖ into `norm`."""
    unit = torch.empty_like(weight, dtype=dtype)
    _kernel_launchers(weight.shape[0], weight.numel() // weight.shape[0], False, weight.dtype, dtype, weight.device)[0]((weight, unit), (norm,), eps)
    return unit


def unit_kernel_backward(weight: Tensor, norm: Piece, e: Tensor, e_norm: Piece | None) -> Tensor:
    """The gradient in w of `unit_kernel`."""
    grad = torch.empty_like(weight)
    launcher = _kernel_launchers(weight.shape[0], weight.numel() // weight.shape[0], e_norm is not None, weight.dtype, e.dtype, weight.device)[1]
    launcher((weight, like(e, weight), grad), (norm, norm if e_norm is None else e_norm))
    return grad


class NormPlan(Launchers):
    """How the kernels of patch norms go over an input."""

    def __init__(
        self,
        shape: Sizes,
        strides: Sizes,
        dtype: torch.dtype,  # this and the device are for the launchers
        device: torch.device,
        kernel: Sizes,
        stride: Sizes,
        padding: Sizes,
        dilation: Sizes,
        groups: int,
    ) -> None:
        super().__init__()
        self.groups, self.shape = groups, shape
        sizes = shape[2:]
        positions = [(i + 2 * p - d * (k - 1) - 1) // s + 1 for i, p, d, k, s in zip(sizes, padding, dilation, kernel, stride, strict=True)]
        self.output = (shape[0], groups, *positions)
        self.count = shape[0] * math.prod(positions)  # of the norms of one group
        self.view = View(shape, strides, groups)
        self.geometry = (*_three(stride, 1), *_three(padding, 0), *_three(dilation, 1), *_three(kernel, 1))
        self.sizes = (*_three(sizes, 1), *_three(positions, 1))
        self.programs = cdiv(self.count, _BLOCK)
        # scratch: sums of squares over channels (in backward, what multiplies x), then sums of norms
        self.squares = aligned(shape[0] * groups * math.prod(sizes))
        self.scratch = self.squares + aligned(groups * self.programs)

    def _of_squares(self) -> Launcher:
        view = self.view
        bp, bc = view.channel_blocks()
        blocks = cdiv(view.positions, bp)
        sizes = (self.groups, view.kernels, view.positions, blocks, view.stride, view.channel, view.position)
        return Launcher(norm_kernels.squares, (view.batch * self.groups * blocks,), (*sizes, bp, bc))

    def _of_box(self, sums: bool) -> Launcher:
        long = self.count > _SHORT
        return Launcher(
            norm_kernels.box, (self.programs, self.groups), (self.groups, self.count, *self.sizes, *self.geometry, long, sums, _BLOCK), _BOX_WARPS
        )

    def _of_box_gradient(self, maps: int, means: int) -> Launcher:
        total = self.shape[0] * math.prod(self.shape[2:])
        rows = math.prod(self.output)
        fixed = (self.groups, total, rows, *self.sizes, *self.geometry, total > _SHORT, maps, means, triton.next_power_of_2(max(1, means)), _BLOCK)
        return Launcher(norm_kernels.box_backward, (cdiv(total, _BLOCK), self.groups), fixed, _BOX_WARPS)

    def _of_product(self) -> Launcher:
        view = self.view
        bp, bc = view.channel_blocks()
        blocks = cdiv(view.positions, bp)
        strides = (view.stride, view.channel, view.position)
        grid = (view.batch * self.groups * blocks, cdiv(view.kernels, bc))
        return Launcher(norm_kernels.add_product, grid, (self.groups, view.kernels, view.positions, blocks, *strides, *strides, bp, bc))


_BLOCK, _BOX_WARPS = 512, 4  # of the box kernels
_SHORT = 2**31 - 2**16  # what 32-bit indices reach

norm_plan = lru_cache(1024)(NormPlan)


def _three(values: Any, missing: int) -> list[int]:
    return [missing] * (3 - len(values)) + list(values)


def patch_norms(x: Tensor, plan: NormPlan, eps: float, scratch: Tensor, wants_sums: bool) -> Tensor:
    """‖x‖ of every patch and group, (N, groups, …); sums of them stay in the scratch if they are wanted."""
    n = torch.empty(plan.output, dtype=torch.float32, device=x.device)
    if n.numel():
        plan.launcher("of_squares")((x,), ((scratch, 0),))
        plan.launcher("of_box", wants_sums)((n,), ((scratch, 0), (scratch, plan.squares)), eps)
    return n


def patch_norms_backward(e: Piece, maps: int, e_mean: Piece | None, means: int, share: float, n: Tensor, plan: NormPlan, products: Piece) -> None:
    """What multiplied by x is the gradient in x, (N, groups, …), into `products`.

    e is so many maps like n, to be added up. e_mean, so many numbers a group, to be added up too, is the gradient of something of
    which every norm has that share.
    """
    plan.launcher("of_box_gradient", maps, means)((n,), (e, e if e_mean is None else e_mean, products), share)
