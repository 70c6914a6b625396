"""The mean patch norm E{‖x‖} of a batch: over all ranks, and not counted twice."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def recomputing() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing doing again what has been counted."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class _SumOverRanks(torch.autograd.Function):
    """The sum over all ranks; the gradient is the sum over all ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _SumOverRanks.apply(grad.contiguous())


def distributed() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def mean_over_ranks(norms: Tensor) -> Tensor:
    """E{‖x‖} of each group over the batches of all ranks, with gradient: (groups,)."""
    sums = norms.sum([0, *range(2, norms.dim())])
    count = torch.full_like(sums[:1], norms[:, 0].numel())
    both = torch.cat([sums, count])
    if distributed():
        both = _SumOverRanks.apply(both)
    return both[:-1] / both[-1]
