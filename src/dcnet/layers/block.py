"""A convolution with what follows it: BatchNorm, a residual addition, an activation, fused where they can be."""

import torch
from torch import Tensor, nn

from dcnet.layers.decoupled import Decoupled
from dcnet.ops import ACTIVATIONS, Finish


class Block(nn.Module):
    """act(norm(conv(x)) + residual); one pass less over memory where the convolution is decoupled and the norm a BatchNorm.

    activation: None, "relu", or "prelu" (one slope, starting at 0).
    """

    def __init__(self, conv: nn.Module, norm: nn.Module | None = None, activation: str | None = "relu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; possible: None, 'relu', 'prelu'")
        self.conv = conv
        self.norm = norm
        self.activation = activation
        self.slope = nn.Parameter(torch.zeros(1)) if activation == "prelu" else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The finished convolution of x."""
        if isinstance(self.conv, Decoupled) and type(self.norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            return self.conv(x, finish=self._finish(residual))
        y = self.conv(x)
        if self.norm is not None:
            y = self.norm(y)
        if residual is not None:
            y = y + residual
        if self.activation == "relu":
            return torch.relu(y)
        return y if self.slope is None else nn.functional.prelu(y, self.slope)

    def _finish(self, residual: Tensor | None) -> Finish:
        norm = self.norm
        assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
        momentum = 0.0 if norm.momentum is None else norm.momentum
        batches = norm.num_batches_tracked if norm.training and norm.track_running_stats else None
        if batches is not None and norm.momentum is None:  # a cumulative average, for which nn.BatchNorm2d too waits for the device
            momentum = 1.0 / (float(batches) + 1.0)
        return Finish(
            gamma=norm.weight,
            beta=norm.bias,
            running_mean=norm.running_mean if not norm.training or norm.track_running_stats else None,
            running_var=norm.running_var if not norm.training or norm.track_running_stats else None,
            training=norm.training or norm.running_mean is None,
            momentum=momentum,
            eps=norm.eps,
            batches=batches,
            residual=residual,
            activation=self.activation,
            slope=self.slope,
        )
