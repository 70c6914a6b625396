"""The checked inputs that every implementation gets, so that each has only to compute."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dcnet.ops.geometry import Geometry
from dcnet.ops.mean_norm import BatchMean
from dcnet.ops.norms import compute_dtype
from dcnet.ops.operator import Operator
from dcnet.ops.post_ops import PostOps

RADIUS_FLOOR = 1e-4

# What multiplies ρ: nothing (the literal radius), E{‖x‖} as a tensor (groups,), or the mean of this batch
MeanNorm = Tensor | BatchMean | None


class LearnedRadius(NamedTuple):
    """ρ of each kernel as it is learned: raw² + 1e-4, which cannot reach 0."""

    raw: Tensor

    @property
    def rho(self) -> Tensor:
        """ρ of each kernel: (out_channels,), in float32 at least."""
        return self.raw.to(compute_dtype(self.raw)).square() + RADIUS_FLOOR


class Inputs(NamedTuple):
    """The operands of one decoupled convolution; x is (N, C, …), radius and learned values are (out_channels,).

    An energy is ½·Σ x² over channels, (maps, N, 1, …) in float32, to be added up over its first dimension, and
    differentiable: its gradient times x belongs to the gradient in x (half the sum of squares, so that this needs no
    factor). The layer that makes a map can compute it on the way and hand it to the layer that takes the map: one pass
    over the map less in each direction. Only the fused kernels do; others ignore one and leave none.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    geometry: Geometry
    operator: Operator
    radius: Tensor | LearnedRadius | None
    mean_norm: MeanNorm
    learned: Mapping[str, Tensor]
    eps: float
    post_ops: PostOps | None = None
    energy: Tensor | None = None  # of x
    leave_energy: bool = False  # whether the energy of the output is wanted

    @property
    def rho(self) -> Tensor | None:
        """ρ of each kernel, or None without a radius."""
        return self.radius.rho if isinstance(self.radius, LearnedRadius) else self.radius

    def radii(self, norms: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return ρ of each kernel, and the radius used for patches, ρ·E{‖x‖}: each (out_channels,), or None."""
        rho = self.rho
        if rho is None:
            return None, None
        rho = rho.to(norms.dtype)
        if self.mean_norm is None:
            return rho, rho
        mean = self.mean_norm.of(norms) if isinstance(self.mean_norm, BatchMean) else self.mean_norm
        scaled = (rho.unflatten(0, (self.geometry.groups, -1)) * mean.to(norms.dtype).unsqueeze(1)).flatten()
        if self.eps == 0.0:  # without eps a group of nothing but zeros has E = 0, and any radius will do for it
            scaled = torch.where(scaled > 0.0, scaled, 1.0)
        return rho, scaled
