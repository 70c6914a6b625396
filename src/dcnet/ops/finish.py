"""What may follow a decoupled convolution in the same pass: BatchNorm, a residual addition, an activation."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = (None, "relu", "prelu")


@dataclass(frozen=True)
class Finish:
    """act(BatchNorm(y) + residual). Without `gamma` and running averages as `F.batch_norm` has it; `slope` is PReLU's."""

    gamma: Tensor | None
    beta: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    training: bool  # whether to normalise with the statistics of this batch
    momentum: float
    eps: float
    residual: Tensor | None = None
    activation: str | None = None
    slope: Tensor | None = None

    def apply(self, y: Tensor) -> Tensor:
        """The same by PyTorch's own operators, one after the other."""
        y = F.batch_norm(y, self.running_mean, self.running_var, self.gamma, self.beta, self.training, self.momentum, self.eps)
        if self.residual is not None:
            y = y + self.residual
        if self.activation == "relu":
            return F.relu(y)
        if self.activation == "prelu":
            assert self.slope is not None
            return F.prelu(y, self.slope)
        return y
