"""From tensors to kernel launches: memory orders and block sizes; kernels normalised, patch norms and their gradients."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from dcnet.ops.fused import norm_kernels
from dcnet.ops.fused.launcher import Launcher, Place, aligned

Sizes = tuple[int, ...]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


MOST_KERNELS = 32  # of a tile


def energy_maps(kernels: int, groups: int) -> int:
    """How many maps the energy of an output would come in, one for each block of kernels; 0 where there would be many for few kernels."""
    if groups > 1 or (kernels % MOST_KERNELS and kernels not in (8, 16)):
        return 0
    return cdiv(kernels, MOST_KERNELS)


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
        if (
            self.rows_first
        ):  # the widest block that wastes little of itself, but no wider than the others' (fewer variants to compile)
            wastes = {bk: cdiv(self.kernels, bk) * bk for bk in (MOST_KERNELS, 16, 8, 4, 2, 1)}
            bk = next(bk for bk, covered in wastes.items() if covered <= 1.1 * self.kernels)
        else:
            bk = min(triton.next_power_of_2(self.kernels), MOST_KERNELS)
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


def elsewhere(x: Tensor) -> bool:
    """Whether x is not on the current device, where kernels run."""
    return x.is_cuda and x.get_device() != torch.cuda.current_device()


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of x the current one."""
    return torch.cuda.device(x.device) if elsewhere(x) else _HERE


_HERE: AbstractContextManager[Any] = nullcontext()


def kernel_launchers(
    kernels: int, size: int, forward: Sequence[Place], backward: Sequence[Place], eps: float, has_norm: bool
) -> tuple[Launcher, Launcher]:
    """Kernels of so many elements normalised, and the gradient: w/‖w‖ and ‖w‖ of w; w's gradient of w, w/‖w‖'s, ‖w‖ and ‖w‖'s."""
    block = min(1024, triton.next_power_of_2(size))
    return (
        Launcher(norm_kernels.normalise, (kernels,), forward, (eps, size, block)),
        Launcher(norm_kernels.normalise_backward, (kernels,), backward, (size, has_norm, block)),
    )


class NormPlan:
    """How the kernels of patch norms go over an input."""

    def __init__(
        self,
        shape: Sizes,
        strides: Sizes,
        kernel: Sizes,
        stride: Sizes,
        padding: Sizes,
        dilation: Sizes,
        groups: int,
    ) -> None:
        self.groups, self.shape = groups, shape
        sizes = shape[2:]
        positions = [
            (i + 2 * p - d * (k - 1) - 1) // s + 1
            for i, p, d, k, s in zip(sizes, padding, dilation, kernel, stride, strict=True)
        ]
        self.output = (shape[0], groups, *positions)
        self.count = shape[0] * math.prod(positions)  # of the norms of one group
        self.view = View(shape, strides, groups)
        self.geometry = (*_three(stride, 1), *_three(padding, 0), *_three(dilation, 1), *_three(kernel, 1))
        self.sizes = (*_three(sizes, 1), *_three(positions, 1))
        self.programs = cdiv(self.count, _BLOCK)
        self.rows = shape[0] * groups * math.prod(sizes)
        # scratch: ½·Σ x² over channels (in backward, what multiplies x), then sums of norms
        self.energies = aligned(self.rows)
        self.scratch = self.energies + aligned(groups * self.programs)

    def energies_launcher(self, table: Sequence[Place]) -> Launcher:
        """½·Σ x² over channels."""
        view = self.view
        bp, bc = view.channel_blocks()
        blocks = cdiv(view.positions, bp)
        sizes = (self.groups, view.kernels, view.positions, blocks, view.stride, view.channel, view.position)
        return Launcher(norm_kernels.energies, (view.batch * self.groups * blocks,), table, (*sizes, bp, bc))

    def box_launcher(self, table: Sequence[Place], eps: float, maps: int, sums: bool) -> Launcher:
        """Patch norms of ½·Σ x², which comes as so many maps to be added up; with `sums`, also each program's sum of norms."""
        fixed = (
            eps,
            maps,
            self.rows,
            self.groups,
            self.count,
            *self.sizes,
            *self.geometry,
            self.count > _SHORT,
            sums,
            _BLOCK,
        )
        return Launcher(norm_kernels.box, (self.programs, self.groups), table, fixed, _BOX_WARPS)

    def box_gradient_launcher(self, table: Sequence[Place], maps: int, means: int, share: float) -> Launcher:
        """What multiplied by x is the gradient in x, (N, groups, …), of ‖x‖ and of ‖x‖'s gradient.

        That comes as so many maps, to be added up, and as so many numbers a group, to be added up too: the gradient of something of
        which every norm has that share.
        """
        total = self.shape[0] * math.prod(self.shape[2:])
        rows = math.prod(self.output)
        sizes = (share, self.groups, total, rows, *self.sizes, *self.geometry)
        fixed = (*sizes, total > _SHORT, maps, means, triton.next_power_of_2(max(1, means)), _BLOCK)
        return Launcher(norm_kernels.box_backward, (cdiv(total, _BLOCK), self.groups), table, fixed, _BOX_WARPS)

    def product_launcher(self, table: Sequence[Place]) -> Launcher:
        """Adds x times that to the gradient in x, in place."""
        view = self.view
        bp, bc = view.channel_blocks()
        blocks = cdiv(view.positions, bp)
        strides = (view.stride, view.channel, view.position)
        grid = (view.batch * self.groups * blocks, cdiv(view.kernels, bc))
        return Launcher(
            norm_kernels.add_product,
            grid,
            table,
            (self.groups, view.kernels, view.positions, blocks, *strides, *strides, bp, bc),
        )


_BLOCK, _BOX_WARPS = 512, 4  # of the box kernels
_SHORT = 2**31 - 2**16  # what 32-bit indices reach


def _three(values: Any, missing: int) -> list[int]:
    return [missing] * (3 - len(values)) + list(values)
