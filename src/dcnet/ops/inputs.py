"""The checked inputs that every implementation gets."""

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
    """A learned ρ of each kernel, raw² + 1e-4, which cannot reach 0."""

    raw: Tensor

    @property
    def rho(self) -> Tensor:
        """ρ of each kernel: (out_channels,), in float32 at least."""
        return self.raw.to(compute_dtype(self.raw)).square() + RADIUS_FLOOR


class Inputs(NamedTuple):
    """The operands of one decoupled convolution; x is (N, C, …), radius and learned values are (out_channels,).

    The energy of x is ½·Σ x² over channels, as maps (maps, N, 1, …) in float32 whose sum over the first dimension it
    is. The layer that makes a map can compute its energy in the same pass and hand it to the next layer, which saves
    one pass over the map in each direction. The energy is differentiable, and its gradient times x is a part of the
    gradient of x. The ½ makes this exactly energy_grad·x. Only the fused kernels use energies; the other
    implementations ignore them and return none.
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
        if self.eps == 0.0:  # without eps, E = 0 for a group of zeros; any radius will do there
            scaled = torch.where(scaled > 0.0, scaled, 1.0)
        return rho, scaled
