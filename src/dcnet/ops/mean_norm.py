"""The mean patch norm E{‖x‖} of a batch, on request over all ranks, and its running average."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dcnet.util.compat import function_transform_active, recomputing


def _track_norm(mean: Tensor, running_norm: Tensor, num_batches_tracked: Tensor, momentum: float | None) -> None:
    """Move the running average toward the mean of a new batch, unless this forward is a recomputation.

    If the mean of a group is not finite, its average stays as it is and the batch is not counted: a NaN would never
    leave the average.
    """
    if recomputing():
        return
    seen = num_batches_tracked + 1
    share = 1.0 / seen  # the first batch is taken as it is
    if momentum is not None:
        share = torch.where(seen == 1, share, momentum)
    finite = mean.isfinite()
    running_norm.lerp_(torch.where(finite, mean.to(running_norm.dtype), running_norm), share.to(running_norm.dtype))
    num_batches_tracked.add_(finite.all())


# An operator, so that a compiled graph checks for a recomputation at every run instead of once, when it is compiled.
# It is not defined by `torch.library.custom_op`, whose checks take longer than the arithmetic.
_LIBRARY = torch.library.Library("dcnet", "FRAGMENT")
_LIBRARY.define(
    "track_norm(Tensor mean, Tensor(a!) running_norm, Tensor(b!) num_batches_tracked, float? momentum) -> ()"
)
_LIBRARY.impl("track_norm", _track_norm, "CompositeExplicitAutograd")
torch.library.register_fake("dcnet::track_norm", lambda *_: None, lib=_LIBRARY)


class BatchMean(NamedTuple):
    """E{‖x‖} of this batch, one per group, with gradient; running averages are updated if they are given."""

    running_norm: Tensor | None = None
    num_batches_tracked: Tensor | None = None
    momentum: float | None = 0.1  # None for a cumulative average
    sync: bool = False  # over the batches of all ranks

    def of(self, norms: Tensor) -> Tensor:
        """Return E{‖x‖} of a map of patch norms (N, groups, …): (groups,). Move the running average."""
        mean = mean_over_ranks(norms) if self.sync else norms.mean([0, *range(2, norms.dim())])
        self.track(mean.detach())
        return mean

    def track(self, mean: Tensor) -> None:
        """Move the running average, if there is one, unless this forward is a recomputation."""
        if self.running_norm is None or self.num_batches_tracked is None:
            return
        where = mean, self.running_norm, self.num_batches_tracked, self.momentum
        with torch.no_grad():
            if torch.compiler.is_compiling():
                torch.ops.dcnet.track_norm(*where)
                return
            try:
                _track_norm(*where)
            except RuntimeError as error:
                if not function_transform_active():
                    raise
                raise RuntimeError(
                    "a decoupled layer in training mode moves the running average of E{‖x‖}, which this transform of "
                    "torch.func (vmap, grad, …) does not allow, as for BatchNorm's averages; call model.eval() first"
                ) from error


class _SumOverRanks(torch.autograd.Function):
    """Computes the sum over all ranks; the gradient is the sum over all ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _SumOverRanks.apply(grad.contiguous())


def distributed() -> bool:
    """Tell whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def mean_over_ranks(norms: Tensor) -> Tensor:
    """Return E{‖x‖} of each group over the batches of all ranks, with gradient: (groups,)."""
    sums = norms.sum([0, *range(2, norms.dim())])
    count = torch.full_like(sums[:1], norms[:, 0].numel())
    both = torch.cat([sums, count])
    if distributed():
        both = _SumOverRanks.apply(both)
    return both[:-1] / both[-1]
