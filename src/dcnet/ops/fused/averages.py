"""Running averages in compiled graphs: an operator that moves those of one layer, after the operator that computes."""

from functools import lru_cache

import torch
from torch import Tensor

from dcnet.ops.fused import statistics
from dcnet.ops.fused.fast import Launcher, Memory
from dcnet.ops.fused.launch import cdiv
from dcnet.ops.mean_norm import recomputing

_BLOCK = 128


@lru_cache(1024)
def _launcher(mean_at: int, norm_at: int, groups: int, channels: int, track: int, move: bool, *_for: torch.dtype | torch.device) -> Launcher:
    programs = max(groups if track else 1, cdiv(channels, _BLOCK) if move else 1)
    table = [*[(slot, 0) for slot in range(1, 6)], (0, mean_at), (0, norm_at)]
    return Launcher(statistics.move_averages, (programs,), table, (groups, channels, track, groups == 1, move, _BLOCK))


def _move_averages(
    vectors: Tensor,
    mean_at: int,
    norm_at: int,
    channels: int,
    groups: int,
    running_norm: Tensor | None,
    mean_batches: Tensor | None,
    mean_momentum: float | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    norm_batches: Tensor | None,
    norm_momentum: float,
    count: int,
) -> None:
    """Those that are there take a step towards `vectors`; not E{‖x‖}'s in a recomputation, as nobody's else does."""
    track = 0 if running_norm is None or recomputing() else 2 if mean_momentum is None else 1
    move = running_mean is not None
    if not track and not move:
        return
    if move and norm_batches is None:  # nobody counts
        norm_batches = torch.zeros((), dtype=torch.int64, device=vectors.device)
    tensors = [vectors if t is None else t for t in (running_norm, mean_batches, running_mean, running_var, norm_batches)]
    launcher = _launcher(mean_at, norm_at, groups, channels, track, move, vectors.device, *[t.dtype for t in tensors])
    floats = (mean_momentum or 0.0, count / max(1, count - 1), norm_momentum)
    launcher(Memory([vectors, *tensors]), *floats)
    if track and groups > 1 and mean_batches is not None:
        mean_batches.add_(1)


_LIBRARY = torch.library.Library("dcnet", "FRAGMENT")
_LIBRARY.define(
    "move_averages(Tensor vectors, int mean_at, int norm_at, int channels, int groups, Tensor(a!)? running_norm, Tensor(b!)? mean_batches, "
    "float? mean_momentum, Tensor(c!)? running_mean, Tensor(d!)? running_var, Tensor(e!)? norm_batches, float norm_momentum, int count) -> ()"
)
_LIBRARY.impl("move_averages", _move_averages, "CompositeExplicitAutograd")
torch.library.register_fake("dcnet::move_averages", lambda *_: None, lib=_LIBRARY)

move_averages = torch.ops.dcnet.move_averages.default
