"""A decoupled convolution with what follows it, as launches.

Kernels normalised, PyTorch's convolution, patch norms, epilogue. With BatchNorm the epilogue reads the dot product twice
(statistics; normalised output) and writes once; the decoupled map itself is never stored.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from dcnet.ops.fused import launch
from dcnet.ops.fused.fast import Piece
from dcnet.ops.fused.launch import either
from dcnet.ops.fused.operands import OF_BATCH, OF_RANKS, STATISTICS, Effects, Kept, Operands, Options, epilogue, norm_plan, places_of
from dcnet.ops.fused.plan import ForwardFlags, Plan, operator_named
from dcnet.ops.mean_norm import BatchMean, distributed, recomputing


def convolution(x: Tensor, unit: Tensor, options: Options) -> Tensor:
    """⟨w, x⟩/‖w‖."""
    if not options.stride:  # no dimensions: a linear map
        return x @ unit.t()
    zeros = (0,) * len(options.stride)
    return torch.convolution(x, unit, None, options.stride, options.padding, options.dilation, False, zeros, options.groups)


def forward(t: Operands, o: Options, effects: Effects, keep: bool = True) -> tuple[Tensor, Kept]:
    """act(BatchNorm(s·h·g + b) + residual), or s·h·g + b alone; and, if it is to be kept, what backward needs."""
    at = places_of(t, o)
    vectors = torch.empty(at.size, dtype=torch.float32, device=t.x.device)
    unit = launch.unit_kernel(t.weight, (vectors, 0), o.eps, t.x.dtype)
    dot = launch.dense(convolution(t.x, unit, o))
    plan = norm_plan(t, o)
    how, tensors, pieces = epilogue(t, dot, vectors, o)
    scratch = torch.empty(plan.scratch + 2 * how.programs * dot.shape[1], dtype=torch.float32, device=dot.device)
    norms = launch.patch_norms(t.x, plan, o.eps, scratch, o.mean_kind == OF_BATCH)
    if o.mean_kind == OF_RANKS:
        _mean_over_ranks(norms, vectors[at.mean : at.mean + o.groups + 1], plan.count, effects.tracked)
    if o.weighting == "separate":
        operator = operator_named(o.magnitude, o.angular, o.weighting)
        h = operator.magnitude_one(vectors[: dot.shape[1]], *rho_and_learned(t, o))[0]
        torch.mul(h, operator.magnitude.value("alpha", 1.0), out=vectors[at.factor : at.factor + dot.shape[1]])
    out = torch.empty_like(dot) if keep else dot  # each element is read before it is written
    if dot.numel():
        residual = dot if t.residual is None else launch.like(t.residual, dot)
        _launch(t, o, effects, how, plan, (dot, norms, out, residual, *tensors), [*pieces, (scratch, plan.scratch), (scratch, plan.squares)])
    elif o.mean_kind == OF_BATCH:
        vectors[at.mean :].fill_(torch.nan)  # as the mean of nothing is
    return out, Kept(dot, norms, unit, vectors)


def _launch(t: Operands, o: Options, effects: Effects, how: Plan, plan: launch.NormPlan, tensors: tuple[Tensor, ...], pieces: list[Piece]) -> None:
    """The epilogue: once, or for BatchNorm with this batch's statistics twice."""
    some = tensors[0]
    tracked, momentum, batches = effects
    track, mean_momentum = 0, 0.0
    running_norm = mean_batches = some
    if o.mean_kind == OF_BATCH and tracked is not None and tracked.running_norm is not None and not recomputing():
        assert tracked.running_norm.dtype == torch.float32
        running_norm, mean_batches = tracked.running_norm, either(tracked.num_batches_tracked, some)
        track, mean_momentum = (2, 0.0) if tracked.momentum is None else (1, tracked.momentum)
    averages = t.running_mean is not None and t.running_var is not None
    moves = o.follows == STATISTICS and averages and momentum is not None
    if moves and batches is None:  # nobody counts
        batches = torch.zeros((), dtype=torch.int64, device=some.device)
    parameters = (either(t.gamma, some), either(t.beta, some), either(t.running_mean, some), either(t.running_var, some))
    everything = (*tensors, *parameters, either(batches, some), running_norm, mean_batches)
    count = float(how.count)
    floats = (count, count / max(1.0, count - 1.0), momentum or 0.0, o.norm_eps, float(plan.count), mean_momentum)

    flags = ForwardFlags(plan.programs, o.groups == 1, 2 if o.mean_kind == OF_BATCH else int(how.mean), track)
    if o.follows == STATISTICS:
        how.launcher("forward", flags._replace(statistics=True, centre=averages))(everything, pieces, *floats)
        flags = flags._replace(mean=int(how.mean), track=0)  # now it is known and has been tracked
    flags = flags._replace(
        norm=o.follows,
        has_gamma=t.gamma is not None,
        has_beta=t.beta is not None,
        move=moves,
        residual=t.residual is not None,
        activation=o.activation,
    )
    how.launcher("forward", flags)(everything, pieces, *floats)
    if o.mean_kind == OF_BATCH and running_norm is not some and o.groups > 1:
        mean_batches.add_(1)


def _mean_over_ranks(norms: Tensor, total: Tensor, count: int, tracked: BatchMean | None) -> None:
    """E{‖x‖} over the batches of all ranks into `total`, followed by the number of norms; moves the running average."""
    total[:-1] = norms.sum([0, *range(2, norms.dim())])
    total[-1] = count
    if distributed():
        dist.all_reduce(total)
    total[:-1] /= total[-1]
    if tracked is not None:
        tracked.track(total[:-1])


def rho_and_learned(t: Operands, o: Options) -> tuple[Tensor | None, dict[str, Tensor]]:
    """ρ and the learned parameters by name, for what is computed outside the kernels."""
    assert o.radius_kind == 1  # then ρ comes as it is
    names = operator_named(o.magnitude, o.angular, o.weighting).learned
    return t.radius, {} if t.learned is None else dict(zip(names, t.learned, strict=True))
