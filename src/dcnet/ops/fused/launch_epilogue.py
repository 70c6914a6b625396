"""Launches of the epilogue's kernels: alone, or as a block with BatchNorm, a residual addition and an activation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dcnet.formulas import Choice, angulars, magnitudes
from dcnet.ops.fused import formulas, gradient_kernel, kernels
from dcnet.ops.fused.fast import launch
from dcnet.ops.fused.launch import View, cdiv, either, like
from dcnet.ops.operator import Operator, make_operator

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
    def plan(self) -> "Plan":
        """What depends on shapes, orders and formulas alone."""
        h, g = self.operator.magnitude.formula, self.operator.angular.formula
        there = tuple([v is not None for v in self.vectors])
        key = (self.dot.shape, self.dot.stride(), self.dot.device, self.norms.shape[1], self.operator.names, id(h), id(g), there)
        found = _PLANS.get(key)
        if found is None:
            found = _PLANS[key] = Plan(self)
        return found

    @property
    def pointers(self) -> list[Tensor]:
        return [either(v, self.dot) for v in (*self.vectors, self.learned)]

    def sums(self, rows: int) -> Tensor:
        """A buffer for sums over positions, a row of them from every program."""
        return torch.empty((self.plan.programs, rows, self.dot.shape[1]), dtype=torch.float32, device=self.dot.device)

    def output(self, affine: tuple[Tensor, Tensor] | None, residual: Tensor | None, slope: Tensor | None, activation: int) -> Tensor:
        """act(scale·y + shift + residual), or y itself, in the order and dtype of the dot product."""
        out, some, plan = torch.empty_like(self.dot), self.dot, self.plan
        if out.numel():
            scale, shift = affine or (some, some)
            pointers = (self.dot, self.norms, out, either(residual, some), *self.pointers, scale, shift, either(slope, some), some)
            flags = (affine is not None, residual is not None, activation, False)
            launch(kernels.forward, (plan.tiles, plan.columns), pointers, (*plan.arguments, *flags, *plan.blocks))
        return out

    def statistics(self, around: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the biased variance of y for each kernel; `around` is a guess of the mean, for accuracy."""
        sums, some, plan = self.sums(2), self.dot, self.plan
        pointers = (self.dot, self.norms, some, some, *self.pointers, some, around, some, sums)
        launch(kernels.forward, (plan.programs, plan.columns), pointers, (*plan.arguments, False, False, 0, True, *plan.blocks))
        first, second = sums.sum(0) / (self.dot.numel() // self.dot.shape[1])
        return around + first, (second - first.square()).clamp_min_(0.0)

    def reduce(self, e: Tensor, out: Tensor, norm: "Normalisation", residual: bool, slope: Tensor | None, activation: int) -> tuple[Tensor, Tensor]:
        """Σe, Σe·ŷ and the slope's gradient, (3, out_channels); and e behind the activation, where a residual needs it."""
        sums, some, plan = self.sums(3), self.dot, self.plan
        behind = torch.empty_like(self.dot) if residual else e
        affine = (norm.scale, norm.shift, either(slope, some), norm.mean, norm.rstd, some, some)
        pointers = (self.dot, self.norms, e, out, some, self.norms, behind, *self.pointers, *affine, sums)
        flags = (True, residual, activation, True, False)
        launch(
            gradient_kernel.backward, (plan.programs, plan.columns), pointers, (*plan.gradient_arguments, *flags, *plan.slope_places, 3, *plan.blocks)
        )
        return sums.sum(0), behind

    def gradients(
        self, e: Tensor, norm: "Normalisation | None" = None, means: Tensor | None = None, slope: Tensor | None = None, activation: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of dot product and norms, and the sums for the vectors, (4 + learned, out_channels).

        `norm` undoes the normalisation (its scale alone, or with `means` of e and e·ŷ BatchNorm's whole gradient).
        """
        rows, some, plan = FIXED_SUMS + len(self.operator.learned), self.dot, self.plan
        grad_d, sums = torch.empty_like(self.dot), self.sums(rows)
        grad_n = torch.empty((plan.kernel_blocks, *self.norms.shape), dtype=torch.float32, device=self.norms.device)
        if not self.dot.numel():
            return grad_d, grad_n.sum(0), sums.new_zeros(sums.shape[1:])
        affine = (norm.scale, norm.shift, either(slope, some), norm.mean, norm.rstd) if norm else (some,) * 5
        of_e = (means[0], means[1]) if means is not None else (some, some)
        pointers = (self.dot, self.norms, like(e, self.dot), some, grad_d, grad_n, some, *self.pointers, *affine, *of_e, sums)
        flags = (norm is not None, False, activation, False, means is not None)
        launch(
            gradient_kernel.backward,
            (plan.programs, plan.columns),
            pointers,
            (*plan.gradient_arguments, *flags, *plan.slope_places, rows, *plan.blocks),
        )
        return grad_d, grad_n[0] if plan.kernel_blocks == 1 else grad_n.sum(0), sums.sum(0)


class Plan:
    """How the kernels go over an output, and those of their arguments that stay the same from call to call."""

    def __init__(self, epilogue: Epilogue) -> None:
        dot, operator = epilogue.dot, epilogue.operator
        view = View(dot, epilogue.norms.shape[1])
        bp, bk = view.blocks()
        self.blocks = (bp, bk, view.positions % bp == 0 and view.kernels % bk == 0)
        self.kernel_blocks = cdiv(view.kernels, bk)
        self.columns = view.groups * self.kernel_blocks
        position_blocks = cdiv(view.positions, bp)
        self.tiles = view.batch * position_blocks
        # Where sums are kept, programs share the tiles: enough of them to fill the device, few enough to add up.
        wanted = 8 * torch.cuda.get_device_properties(dot.device).multi_processor_count if dot.is_cuda else 2
        self.programs = max(1, min(self.tiles, cdiv(wanted, self.columns)))

        h, g = operator.magnitude, operator.angular
        alpha_one = dict(operator.alpha_one) if operator.weighting == "separate" else {}
        count_h, fixed_h, rows_h = formulas.arguments(h, alpha_one, 0)
        count_g, fixed_g, rows_g = formulas.arguments(g, {}, len(h.learned))
        factor, gain, _, bias = (v is not None for v in epilogue.vectors)
        of_h = (formulas.jit(h.formula), h.formula.has_radius, count_h, *fixed_h, *rows_h)
        of_g = (formulas.jit(g.formula), count_g, *fixed_g, *rows_g)
        sizes = (view.groups, view.kernels, view.positions, position_blocks, self.tiles, self.kernel_blocks)
        rest = (*view.strides, *view.norm_strides, *of_h, *of_g, factor, gain, bias)
        self.arguments: tuple[Any, ...] = (*sizes, *rest)
        self.gradient_arguments: tuple[Any, ...] = (*sizes, epilogue.norms.numel(), *rest)
        # where the slopes of the learned parameters stand among the results of h (three) and g (three), −1 for none
        places = [*_places(h, 2 + h.formula.has_radius), *_places(g, 2)]
        self.slope_places = (*places, len(h.learned))


_PLANS: dict[Any, Plan] = {}


def _places(choice: Choice, first: int) -> list[int]:
    found = [first + choice.formula.learnable.index(name) for name in choice.learned]
    return found + [-1] * (formulas.MOST_PARAMETERS - len(found))


_OPERATORS: dict[tuple[str, str, str], Operator] = {}


def operator_named(magnitude: str, angular: str, weighting: str) -> Operator:
    """The operator of these names, parsed once as long as the formulas stay what they are."""
    key = (magnitude, angular, weighting)
    known = _OPERATORS.get(key)
    if (
        known is None
        or magnitudes().get(known.magnitude.name) is not known.magnitude.formula
        or angulars().get(known.angular.name) is not known.angular.formula
    ):
        known = _OPERATORS[key] = make_operator(magnitude, angular, weighting or None)
    return known


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
