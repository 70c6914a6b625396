"""Launches of the epilogue's kernels: alone, or as a block with BatchNorm, a residual addition and an activation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dcnet.formulas import Choice
from dcnet.ops.fused import formulas, gradient_kernel, kernels
from dcnet.ops.fused.launch import View, cdiv, either, like
from dcnet.ops.operator import Operator

FIXED_SUMS = 4  # rows of sums for factor, gain, radius and bias; those of learned parameters follow


@dataclass(frozen=True)
class Epilogue:
    """s·h·g + b over the whole output: what all its kernels are given. `vectors` are factor, gain, radius and bias."""

    dot: Tensor
    norms: Tensor
    operator: Operator
    vectors: Sequence[Tensor | None]
    learned: Tensor | None

    @cached_property
    def view(self) -> View:
        return View(self.dot, self.norms.shape[1])

    @property
    def pointers(self) -> list[Tensor]:
        return [either(v, self.dot) for v in (*self.vectors, self.learned)]

    @property
    def kernel_blocks(self) -> int:
        return cdiv(self.view.kernels, self.view.blocks()[1])

    @property
    def tiles(self) -> int:
        return self.view.batch * cdiv(self.view.positions, self.view.blocks()[0])

    def programs(self) -> int:
        """How many programs share the tiles where sums are kept: enough to fill the device, few enough to add up."""
        if not self.dot.is_cuda:
            return min(self.tiles, 2)
        wanted = 8 * torch.cuda.get_device_properties(self.dot.device).multi_processor_count
        return max(1, min(self.tiles, cdiv(wanted, self.view.groups * self.kernel_blocks)))

    def grid(self, programs: int) -> tuple[int, int]:
        return programs, self.view.groups * self.kernel_blocks

    @property
    def sizes(self) -> tuple[int, ...]:
        view = self.view
        return view.groups, view.kernels, view.positions, cdiv(view.positions, view.blocks()[0]), self.tiles, self.kernel_blocks

    @property
    def strides(self) -> tuple[int, ...]:
        return *self.view.strides, *self.view.norm_strides

    @property
    def formulas(self) -> tuple[Any, ...]:
        """What the kernels need to know of the formulas and of the vectors there are."""
        h, g = self.operator.magnitude, self.operator.angular
        alpha_one = dict(self.operator.alpha_one) if self.operator.weighting == "separate" else {}
        count_h, fixed_h, rows_h = formulas.arguments(h, alpha_one, 0)
        count_g, fixed_g, rows_g = formulas.arguments(g, {}, len(h.learned))
        factor, gain, _, bias = (v is not None for v in self.vectors)
        of_h = (formulas.jit(h.formula), h.formula.has_radius, count_h, *fixed_h, *rows_h)
        return *of_h, formulas.jit(g.formula), count_g, *fixed_g, *rows_g, factor, gain, bias

    @property
    def slope_places(self) -> list[int]:
        """Where the slopes of the learned parameters stand among the results of h (three) and g (three), −1 for none."""

        def places(choice: Choice, first: int) -> list[int]:
            found = [first + choice.formula.learnable.index(name) for name in choice.learned]
            return found + [-1] * (formulas.MOST_PARAMETERS - len(found))

        return places(self.operator.magnitude, 2 + self.operator.magnitude.formula.has_radius) + places(self.operator.angular, 2)

    def output(self, affine: tuple[Tensor, Tensor] | None, residual: Tensor | None, slope: Tensor | None, activation: int) -> Tensor:
        """act(scale·y + shift + residual), or y itself, in the order and dtype of the dot product."""
        out = torch.empty_like(self.dot)
        if out.numel():
            scale, shift = affine or (self.dot, self.dot)
            kernels.forward[self.grid(self.tiles)](
                self.dot, self.norms, out, either(residual, self.dot), *self.pointers, scale, shift, either(slope, self.dot), self.dot,
                *self.sizes, *self.strides, *self.formulas, affine is not None, residual is not None, activation, False, *self.view.blocks(),
            )  # fmt: skip
        return out

    def statistics(self, around: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the biased variance of y for each kernel; `around` is a guess of the mean, for accuracy."""
        programs = self.programs()
        sums = torch.empty((programs, 2, self.dot.shape[1]), dtype=torch.float32, device=self.dot.device)
        some = self.dot
        kernels.forward[self.grid(programs)](
            self.dot, self.norms, some, some, *self.pointers, some, around, some, sums,
            *self.sizes, *self.strides, *self.formulas, False, False, 0, True, *self.view.blocks(),
        )  # fmt: skip
        first, second = sums.sum(0) / (self.dot.numel() // self.dot.shape[1])
        return around + first, (second - first.square()).clamp_min_(0.0)

    def reduce(self, e: Tensor, out: Tensor, norm: "Normalisation", residual: bool, slope: Tensor | None, activation: int) -> tuple[Tensor, Tensor]:
        """Σe, Σe·ŷ and the slope's gradient, (3, out_channels); and e behind the activation, where a residual needs it."""
        programs = self.programs()
        sums = torch.empty((programs, 3, self.dot.shape[1]), dtype=torch.float32, device=self.dot.device)
        behind = torch.empty_like(self.dot) if residual else e
        some = self.dot
        gradient_kernel.backward[self.grid(programs)](
            self.dot, self.norms, e, out, some, self.norms, behind, *self.pointers,
            norm.scale, norm.shift, either(slope, some), norm.mean, norm.rstd, some, some, sums,
            *self.sizes, self.norms.numel(), *self.strides, *self.formulas,
            True, residual, activation, True, False, *self.slope_places, len(self.operator.magnitude.learned), 3, *self.view.blocks(),
        )  # fmt: skip
        return sums.sum(0), behind

    def gradients(
        self, e: Tensor, norm: "Normalisation | None" = None, means: Tensor | None = None, slope: Tensor | None = None, activation: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of dot product and norms, and the sums for the vectors, (4 + learned, out_channels).

        `norm` undoes the normalisation (its scale alone, or with `means` of e and e·ŷ BatchNorm's whole gradient).
        """
        rows, programs, some = FIXED_SUMS + len(self.operator.learned), self.programs(), self.dot
        grad_d = torch.empty_like(self.dot)
        grad_n = torch.empty((self.kernel_blocks, *self.norms.shape), dtype=torch.float32, device=self.norms.device)
        sums = torch.empty((programs, rows, self.dot.shape[1]), dtype=torch.float32, device=self.dot.device)
        if not self.dot.numel():
            return grad_d, grad_n.sum(0), sums.new_zeros(sums.shape[1:])
        affine = (norm.scale, norm.shift, either(slope, some), norm.mean, norm.rstd) if norm else (some,) * 5
        gradient_kernel.backward[self.grid(programs)](
            self.dot, self.norms, like(e, self.dot), some, grad_d, grad_n, some, *self.pointers, *affine,
            *((means[0], means[1]) if means is not None else (some, some)),
            sums, *self.sizes, self.norms.numel(), *self.strides, *self.formulas,
            norm is not None, False, activation, False, means is not None, *self.slope_places, len(self.operator.magnitude.learned), rows,
            *self.view.blocks(),
        )  # fmt: skip
        return grad_d, grad_n[0] if self.kernel_blocks == 1 else grad_n.sum(0), sums.sum(0)


@dataclass(frozen=True)
class Normalisation:
    """BatchNorm as vectors (out_channels,): ŷ = (y − mean)·rstd, and γ·ŷ + β = scale·y + shift."""

    mean: Tensor
    rstd: Tensor
    scale: Tensor
    shift: Tensor


def normalisation(mean: Tensor, variance: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Normalisation:
    """BatchNorm with these statistics and parameters."""
    rstd = (variance.float() + eps).rsqrt()
    scale = rstd if gamma is None else rstd * gamma.float()
    shift = -mean.float() * scale
    return Normalisation(mean.float(), rstd, scale, shift if beta is None else shift + beta.float())
