"""Turn a BatchNorm module, a residual and an activation into the post-ops of a convolution."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dcnet.ops import PostOps
from dcnet.util.compat import BatchNorm, buffer, parameter, recomputing

if TYPE_CHECKING:
    from dcnet.layers.decoupled import Decoupled

FUSED_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # not their subclasses, which compute something else


def is_norm_of(norm: nn.Module, conv: "Decoupled", x: Tensor) -> bool:
    """Tell whether a BatchNorm normalizes the channels of the convolution of x.

    In inputs that are not a batch, or have tokens, it sees another dimension as the channels.
    """
    dims = conv._dims
    return type(norm) is FUSED_NORMS[max(dims, 1) - 1] and x.dim() == dims + 2


def post_ops_of(
    norm: nn.Module | None, residual: Tensor | None, activation: str | None, slope: Tensor | None
) -> PostOps:
    """Return act(norm(y) + residual) as post-ops, with the running averages that the norm would update.

    They are updated once in a step, as E{‖x‖} is, even if activation checkpointing computes the convolution again: the
    norm itself may be outside the checkpoint.
    """
    assert isinstance(norm, BatchNorm)
    training, momentum = norm.training, 0.0 if norm.momentum is None else norm.momentum
    tracks = not training or norm.track_running_stats
    running_mean, running_var = (buffer(norm, "running_mean"), buffer(norm, "running_var")) if tracks else (None, None)
    batches = buffer(norm, "num_batches_tracked") if training and tracks else None
    if batches is not None and norm.momentum is None:
        momentum = 1.0 / (float(batches) + 1.0)  # cumulative; this waits for the device, as in nn.BatchNorm2d
    if batches is not None and not torch.compiler.is_compiling() and recomputing():
        # a checkpoint requires the same tensors to be saved as before, so copies are updated
        running_mean, running_var, batches = (
            None if t is None else t.clone() for t in (running_mean, running_var, batches)
        )
    return PostOps(
        parameter(norm, "weight"),
        parameter(norm, "bias"),
        running_mean,
        running_var,
        training or running_mean is None,
        momentum,
        norm.eps,
        batches,
        residual,
        activation,
        slope,
    )
