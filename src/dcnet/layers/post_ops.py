"""A BatchNorm module, a residual and an activation as the operations that follow a convolution."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dcnet.ops import PostOps
from dcnet.util.compat import BatchNorm, buffer, parameter, recomputing

if TYPE_CHECKING:
    from dcnet.layers.decoupled import Decoupled

FUSED_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # not their subclasses, which compute something else


def is_norm_of(norm: nn.Module, conv: "Decoupled", x: Tensor) -> bool:
    """Tell whether a BatchNorm normalizes the channels that the convolution of x has.

    In inputs that are not a batch, or have tokens, it takes another dimension for the channels.
    """
    dims = conv._dims
    return type(norm) is FUSED_NORMS[max(dims, 1) - 1] and x.dim() == dims + 2


def post_ops_of(
    norm: nn.Module | None, residual: Tensor | None, activation: str | None, slope: Tensor | None
) -> PostOps:
    """Return act(norm(y) + residual) as data for the convolution's pass, with the averages that the norm would move.

    They move once in a step, as E{‖x‖} does, also where activation checkpointing computes the convolution again: the
    norm itself may lie outside of the checkpoint.
    """
    assert isinstance(norm, BatchNorm)
    training, momentum = norm.training, 0.0 if norm.momentum is None else norm.momentum
    tracks = not training or norm.track_running_stats
    running_mean, running_var = (buffer(norm, "running_mean"), buffer(norm, "running_var")) if tracks else (None, None)
    batches = buffer(norm, "num_batches_tracked") if training and tracks else None
    if batches is not None and norm.momentum is None:
        momentum = 1.0 / (float(batches) + 1.0)  # cumulative; nn.BatchNorm2d too waits for the device here
    if batches is not None and not torch.compiler.is_compiling() and recomputing():
        # a checkpoint wants the same tensors saved as before, so copies are moved
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
