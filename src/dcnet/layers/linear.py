"""The decoupled fully connected layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.layers import documentation
from dcnet.layers.decoupled import Decoupled
from dcnet.layers.options import Device, LayerOptions, Spec
from dcnet.ops import EPS, LINEAR, Geometry, compute_dtype, root


class DecoupledLinear(Decoupled, nn.Linear):
    __doc__ = documentation.LINEAR

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        magnitude: Spec = "tanh",
        angular: Spec = "cosine",
        weighting: str | None = None,
        radius: str | float = "learned",
        eps: float = EPS,
        momentum: float | None = 0.1,
        sync: bool = False,
        impl: str = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._init_decoupling(LayerOptions(magnitude, angular, weighting, radius, eps, momentum, sync, impl))

    def _kernels_and_groups(self) -> tuple[int, int]:
        return self.out_features, 1

    @property
    def _dims(self) -> int:
        return 0

    def _geometry(self) -> Geometry:
        return LINEAR

    def _plain(self, x: Tensor, kernel: Tensor) -> Tensor:
        return F.linear(x, kernel)

    def _patch_norms(self, x: Tensor) -> Tensor:
        return root(x.to(compute_dtype(x)).square().sum(-1, keepdim=True), self.eps)
