"""A decoupled convolution with what follows it, as launches.

Kernels normalised, patch norms, PyTorch's convolution, epilogue. With BatchNorm the epilogue reads the dot product twice
(statistics; normalised output) and writes once; the decoupled map itself is never stored.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from dcnet.ops.fused.call import FORWARD, Call, convolution
from dcnet.ops.fused.launcher import Memory
from dcnet.ops.fused.operands import OF_BATCH, OF_RANKS, Effects, Kept, Operands
from dcnet.ops.mean_norm import BatchMean, distributed, recomputing

_DOT, _OUT, _RESIDUAL = map(FORWARD.index, ("dot", "out", "residual"))


def forward(call: Call, t: Operands, effects: Effects, keep: bool = True) -> tuple[Tensor, Tensor | None, Kept]:
    """act(BatchNorm(s·h·g + b) + residual), or s·h·g + b alone; its energy if that is to be left; what backward needs if it is to be kept."""
    o, x = call.options, t.x
    device, single = x.device, torch.float32
    tracked, momentum, batches = effects
    running_norm = mean_batches = None
    track, mean_momentum = 0, 0.0
    if o.mean_kind == OF_BATCH and tracked is not None and tracked.running_norm is not None and not recomputing():
        running_norm, mean_batches = tracked.running_norm, tracked.num_batches_tracked
        track, mean_momentum = (2, 0.0) if tracked.momentum is None else (1, tracked.momentum)
    if momentum is not None and batches is None:  # nobody counts
        batches = torch.zeros((), dtype=torch.int64, device=device)

    vectors = torch.empty(call.at.size, dtype=single, device=device)
    norms = torch.empty(call.norm_plan.output, dtype=single, device=device)
    scratch = torch.empty(call.scratch, dtype=single, device=device)
    unit = torch.empty_like(t.weight, dtype=x.dtype)
    left = None if call.left is None else torch.empty(call.left, dtype=single, device=device)
    memory = Memory([*t, batches, running_norm, mean_batches, vectors, unit, norms, scratch, left, None, None])
    call.normalise(memory)
    if call.has_norms:
        if t.energy is None:
            call.energies(memory)
        call.box(memory)
    dot = call.ordered(convolution(x, unit, o))
    out = torch.empty_like(dot) if keep else dot  # each element is read before it is written
    memory.put(_DOT, dot)
    memory.put(_OUT, out)
    if o.mean_kind == OF_RANKS:
        _mean_over_ranks(norms, vectors[call.at.mean : call.at.mean + o.groups + 1], call.norm_plan.count, tracked)
    if o.weighting == "separate":
        h = call.operator.magnitude_one(vectors[: call.kernels], *rho_and_learned(call, t))[0]
        torch.mul(
            h, call.operator.magnitude.value("alpha", 1.0), out=vectors[call.at.factor : call.at.factor + call.kernels]
        )
    if t.residual is not None and t.residual.stride() != call.stride:
        memory.put(_RESIDUAL, call.ordered(t.residual))
    if call.has_output:
        for launcher in call.epilogue(track, momentum is not None):
            launcher(memory, momentum or 0.0, mean_momentum)
        if mean_batches is not None and o.groups > 1:
            mean_batches.add_(vectors[call.at.mean : call.at.mean + o.groups].isfinite().all())
    elif o.mean_kind == OF_BATCH:
        vectors[call.at.mean :].fill_(torch.nan)  # as the mean of nothing is
    return out, left, Kept(dot, norms, unit, vectors)


def _mean_over_ranks(norms: Tensor, total: Tensor, count: int, tracked: BatchMean | None) -> None:
    """E{‖x‖} over the batches of all ranks into `total`, followed by the number of norms; moves the running average."""
    total[:-1] = norms.sum([0, *range(2, norms.dim())])
    total[-1] = count
    if distributed():
        dist.all_reduce(total)
    total[:-1] /= total[-1]
    if tracked is not None:
        tracked.track(total[:-1])


def rho_and_learned(call: Call, t: Operands) -> tuple[Tensor | None, dict[str, Tensor]]:
    """ρ and the learned parameters by name, for what is computed outside the kernels."""
    assert call.options.radius_kind == 1  # then ρ comes as it is
    return t.radius, {} if t.learned is None else dict(zip(call.operator.learned, t.learned, strict=True))
