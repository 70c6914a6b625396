"""What every implementation gets: one checked bundle, so that each says only how it computes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.ops.finish import Finish
from dcnet.ops.geometry import Geometry
from dcnet.ops.operator import Operator

# E{‖x‖}: None (literal radius), a tensor (groups,), or a function of the norm map (N, groups, …) that gives one
MeanNorm = Tensor | Callable[[Tensor], Tensor] | None


def batch_mean(norms: Tensor) -> Tensor:
    """E{‖x‖} of each group over this batch, with gradient: (groups,)."""
    return norms.mean([0, *range(2, norms.dim())])


@dataclass(frozen=True)
class Inputs:
    """The operands of one decoupled convolution; x is (N, C, …), learned values are (out_channels,)."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    geometry: Geometry
    operator: Operator
    radius: Tensor | None
    mean_norm: MeanNorm
    learned: Mapping[str, Tensor]
    eps: float
    finish: Finish | None = None

    def radii(self, norms: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """ρ of each kernel, and the radius used for patches, ρ·E{‖x‖}; both (out_channels,), or None without a radius."""
        if self.radius is None:
            return None, None
        rho = self.radius.to(norms.dtype)
        if self.mean_norm is None:
            return rho, rho
        mean = self.mean_norm(norms) if callable(self.mean_norm) else self.mean_norm
        scaled = (rho.unflatten(0, (self.geometry.groups, -1)) * mean.to(norms.dtype).unsqueeze(1)).flatten()
        if self.eps == 0.0:  # without eps a group of nothing but zeros has E = 0, and any radius will do for it
            scaled = torch.where(scaled > 0.0, scaled, 1.0)
        return rho, scaled
