"""The decoupled fully connected layer."""

import torch
from torch import Tensor, nn

from dcnet.layers import documentation
from dcnet.layers.decoupled import Decoupled, Device, Spec
from dcnet.ops import EPS, LINEAR, Finish


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
        self._init_decoupling(magnitude, angular, weighting, radius, eps, momentum, sync, impl)

    def _kernels_and_groups(self) -> tuple[int, int]:
        return self.out_features, 1

    def forward(self, input: Tensor, finish: Finish | None = None) -> Tensor:
        """Return the decoupled linear map of the input (…, in_features): (…, out_features); `finish` is for `Block`."""
        return self._decouple(input, LINEAR, finish)
