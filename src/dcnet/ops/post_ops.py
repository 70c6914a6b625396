"""What may follow a decoupled convolution in the same pass: BatchNorm, a residual addition, an activation."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = (None, "relu", "prelu")


class Carry:
    """Hands the energy of a layer's output, ½·Σ x² over channels, to the layer that takes it as input: a pass over that map less each way.

    An energy is (maps, N, 1, …) in float32, to be added up over its first dimension (a map by itself has no gradient), and differentiable:
    its gradient times x belongs to the gradient in x. Half the sum of squares, so that this needs no factor. Only the fused kernels leave one.
    """

    def __init__(self) -> None:
        self.energy: Tensor | None = None  # of the input of the layer that is at work
        self.of: Tensor | None = None  # that input
        self.left: Tensor | None = None  # the energy of its output
        self.left_of: Tensor | None = None  # that output
        self.wanted = False  # whether somebody will take it

    def enter(self, wanted: bool) -> None:
        """The next layer begins: what the last one has left is now its input's."""
        self.energy, self.of = self.left, self.left_of
        self.left, self.left_of, self.wanted = None, None, wanted


class Finish(NamedTuple):
    """act(BatchNorm(y) + residual), or with `normalise=False` act(y + residual).

    Without `gamma` and running averages as `F.batch_norm` has it; `slope` is PReLU's.
    """

    gamma: Tensor | None
    beta: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    training: bool  # whether to normalise with the statistics of this batch
    momentum: float
    eps: float
    batches: Tensor | None = (
        None  # the number of batches the running averages have seen, if this one is still to be counted
    )
    residual: Tensor | None = None
    activation: str | None = None
    slope: Tensor | None = None
    normalise: bool = True
    carry: Carry | None = None  # where energies come from and go to

    @property
    def is_relu(self) -> bool:
        """Whether a ReLU follows and nothing else."""
        return self.activation == "relu" and self.residual is None and not self.normalise

    def apply(self, y: Tensor) -> Tensor:
        """The same by PyTorch's own operators, one after the other."""
        if self.normalise:
            self.count_batch()
            y = F.batch_norm(
                y, self.running_mean, self.running_var, self.gamma, self.beta, self.training, self.momentum, self.eps
            )
        if self.residual is not None:
            y = y + self.residual
        if self.activation == "relu":
            return F.relu(y)
        if self.activation == "prelu":
            assert self.slope is not None
            return F.prelu(y, self.slope)
        return y

    def count_batch(self) -> None:
        """Counts this batch, as `nn.BatchNorm2d` does; the kernels do it themselves."""
        if self.batches is not None:
            with torch.no_grad():
                self.batches.add_(1)


NOTHING = Finish(None, None, None, None, training=False, momentum=0.0, eps=0.0, normalise=False)
ONLY_RELU = NOTHING._replace(activation="relu")
