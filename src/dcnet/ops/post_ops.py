"""What may follow a decoupled convolution in the same pass: BatchNorm, a residual addition, an activation."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.ops.activations import ACTIVATIONS, activate


class PostOps(NamedTuple):
    """act(BatchNorm(y) + residual), or with `normalize=False` act(y + residual).

    `gamma`, `beta` and the running averages may be None, as in `F.batch_norm`. `slope` is PReLU's.
    """

    gamma: Tensor | None
    beta: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    training: bool  # whether to normalize with the statistics of this batch
    momentum: float
    eps: float
    batches: Tensor | None = None  # BatchNorm's count of batches, if this batch still has to be counted
    residual: Tensor | None = None
    activation: str | None = None
    slope: Tensor | None = None
    normalize: bool = True

    @property
    def is_relu(self) -> bool:
        """Whether a ReLU follows and nothing else."""
        return self.activation == "relu" and self.residual is None and not self.normalize

    def apply(self, y: Tensor) -> Tensor:
        """Apply the post-ops by PyTorch's own operators, one after the other."""
        if self.normalize:
            if self.batches is not None:
                with torch.no_grad():
                    self.batches.add_(1)
            averages = self.running_mean, self.running_var
            y = F.batch_norm(y, *averages, self.gamma, self.beta, self.training, self.momentum, self.eps)
        if self.residual is not None:
            y = y + self.residual
        return activate(y, self.activation, self.slope)


NOTHING = PostOps(None, None, None, None, training=False, momentum=0.0, eps=0.0, normalize=False)
# a single activation, by name; not PReLU, whose slope is not known here
ONLY = {name: NOTHING._replace(activation=name) for name in ACTIVATIONS if name not in (None, "prelu")}
