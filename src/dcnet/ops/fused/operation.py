"""One decoupled convolution with what follows it, forward and backward, as launches.

Forward: kernels normalised, PyTorch's convolution, patch norms and their mean, epilogue. With BatchNorm the epilogue reads the dot product
twice (statistics; normalised output) and writes once; the decoupled map itself is never stored. Backward reads dot product and
incoming gradient twice, writes the dot product's gradient, and adds the norms' gradient to the convolution's in one pass.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dcnet.ops.fused import launch
from dcnet.ops.fused.launch import either
from dcnet.ops.fused.plan import VECTORS, Plan, operator_named, plan_of
from dcnet.ops.mean_norm import BatchMean, distributed

NO_MEAN, GIVEN, OF_BATCH, OF_RANKS = range(4)  # what multiplies ρ: nothing, a tensor, E{‖x‖} of this batch, or of all ranks' batches
ALONE, AVERAGES, STATISTICS = range(3)  # what follows: no BatchNorm, one with its running averages, one with this batch's statistics


class Options(NamedTuple):
    """What is fixed for a layer."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    eps: float
    radius_kind: int  # 1: `radius` is ρ; 2: what is learned, ρ = raw² + RADIUS_FLOOR
    mean_kind: int
    follows: int
    norm_eps: float
    activation: int  # which of ACTIVATIONS
    magnitude: str
    angular: str
    weighting: str


class Operands(NamedTuple):
    """The tensors, each in a dense memory order, on one device."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    radius: Tensor | None
    mean_norm: Tensor | None
    learned: Tensor | None  # (learned parameters, out_channels)
    gamma: Tensor | None
    beta: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    residual: Tensor | None
    slope: Tensor | None


class Kept(NamedTuple):
    """What forward leaves for backward; tensors that are not there are empty."""

    dot: Tensor
    norms: Tensor  # ‖x‖ (N, groups, …)
    unit: Tensor  # w/‖w‖
    w_norm: Tensor
    mean: Tensor  # E{‖x‖} (groups,); over all ranks followed by the number of norms
    factor: Tensor  # what multiplies h·g
    norm: Tensor  # BatchNorm's mean, variance, rstd, scale and shift (5, channels)


class Effects(NamedTuple):
    """What the kernels move on the way: the running average of E{‖x‖}, and with this momentum BatchNorm's."""

    tracked: BatchMean | None
    momentum: float | None


def convolution(x: Tensor, unit: Tensor, options: Options) -> Tensor:
    """⟨w, x⟩/‖w‖."""
    if not options.stride:  # no dimensions: a linear map
        return x @ unit.t()
    zeros = [0] * len(options.stride)
    return torch.ops.aten.convolution(x, unit, None, options.stride, options.padding, options.dilation, False, zeros, options.groups)


def _norm_plan(x: Tensor, weight: Tensor, o: Options) -> launch.NormPlan:
    return launch.norm_plan(x.shape, x.stride(), weight.shape[2:], tuple(o.stride), tuple(o.padding), tuple(o.dilation), o.groups)


def _epilogue(t: Operands, kept: Kept, o: Options) -> tuple[Plan, list[Tensor]]:
    """How the epilogue's kernels go over this output, and the vectors they take."""
    dot = kept.dot
    factor = kept.factor if o.weighting in ("linear", "separate") else None
    gain = kept.w_norm if o.weighting == "joint" else None
    mean = (t.mean_norm if o.mean_kind == GIVEN else kept.mean) if o.mean_kind != NO_MEAN else None
    there = (factor is not None, gain is not None, t.radius is not None, t.bias is not None)
    how = plan_of(dot, o.groups, (o.magnitude, o.angular, o.weighting), there, o.radius_kind, mean is not None)
    return how, [either(v, dot) for v in (factor, gain, t.radius, mean, t.bias, t.learned)]


def _floats(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def forward(t: Operands, o: Options, effects: Effects) -> tuple[Tensor, Kept]:
    """act(BatchNorm(s·h·g + b) + residual), or s·h·g + b alone; and what backward needs."""
    unit, w_norm = launch.unit_kernel(t.weight, o.eps, t.x.dtype)
    dot = launch.dense(convolution(t.x, unit, o))
    plan = _norm_plan(t.x, t.weight, o)
    norms, sums = launch.patch_norms(t.x, plan, o.eps, o.mean_kind == OF_BATCH)
    mean = _mean(norms, sums, plan, o, effects.tracked)
    factor = _factor(t, w_norm, o)
    kept = Kept(dot, norms, unit, w_norm, mean, factor, _floats(dot, 5 if o.follows else 0, dot.shape[1]))
    out = torch.empty_like(dot)
    if not dot.numel():
        return out, kept
    how, vectors = _epilogue(t, kept, o)
    if o.follows:
        _batch_norm(t, kept, o, how, vectors, effects.momentum)
    launcher = how.launcher("output", o.follows != ALONE, t.residual is not None, o.activation)
    residual = dot if t.residual is None else launch.like(t.residual, dot)
    launcher((dot, norms, out, residual, *vectors, kept.norm, dot, either(t.slope, dot), dot))
    return out, kept


def _mean(norms: Tensor, sums: Tensor | None, plan: launch.NormPlan, o: Options, tracked: BatchMean | None) -> Tensor:
    if sums is not None and norms.numel():
        return launch.batch_mean(sums, plan, tracked)
    if o.mean_kind == OF_RANKS:
        total = torch.cat([norms.sum([0, *range(2, norms.dim())]), norms.new_tensor([float(plan.count)])])
        if distributed():
            dist.all_reduce(total)
        total[:-1] /= total[-1]
        if tracked is not None:
            tracked.track(total[:-1])
        return total
    return norms.new_full((o.groups if o.mean_kind == OF_BATCH else 0,), torch.nan)  # as the mean of nothing is


def _factor(t: Operands, w_norm: Tensor, o: Options) -> Tensor:
    """What multiplies h(‖x‖)·g for each kernel; empty stands for 1."""
    if o.weighting == "linear":
        return w_norm
    if o.weighting == "separate":
        operator = operator_named(o.magnitude, o.angular, o.weighting)
        return operator.magnitude.value("alpha", 1.0) * operator.magnitude_one(w_norm, *_rho_and_learned(t, o))[0]
    return w_norm.new_empty(0)


def _rho_and_learned(t: Operands, o: Options) -> tuple[Tensor | None, dict[str, Tensor]]:
    assert o.radius_kind == 1  # where ρ is needed outside the kernels, it comes as it is
    names = operator_named(o.magnitude, o.angular, o.weighting).learned
    return t.radius, {} if t.learned is None else dict(zip(names, t.learned, strict=True))


def _batch_norm(t: Operands, kept: Kept, o: Options, how: Plan, vectors: list[Tensor], momentum: float | None) -> None:
    """What BatchNorm normalises with, into `kept.norm`; with a momentum its running averages move."""
    dot = sums = kept.dot
    averages = t.running_mean is not None and t.running_var is not None
    if o.follows == STATISTICS:
        sums = _floats(dot, how.programs, 2, dot.shape[1])
        how.launcher("statistics", averages)((dot, kept.norms, dot, dot, *vectors, kept.norm, either(t.running_mean, dot), dot, sums))
    launcher = how.launcher("batch_norm", o.follows == STATISTICS, t.gamma is not None, t.beta is not None, averages, momentum is not None)
    count = float(how.count)
    pointers = (sums, either(t.gamma, dot), either(t.beta, dot), either(t.running_mean, dot), either(t.running_var, dot), kept.norm)
    launcher(pointers, count, count / max(1.0, count - 1.0), 0.0 if momentum is None else momentum, o.norm_eps)


class Gradients(NamedTuple):
    """The gradients in the operands; those that are not wanted, or not there, are None or empty."""

    x: Tensor | None
    weight: Tensor | None
    vectors: Tensor  # rows for those of factor, gain, radius and bias that are there, then learned parameters: (rows, out_channels)
    mean: Tensor  # (groups, parts), to be added up
    norm: Tensor  # of β, γ and slope (2 or 3, out_channels)
    residual: Tensor  # empty if it is the incoming gradient itself


def backward(e: Tensor, t: Operands, kept: Kept, out: Tensor | None, o: Options, residual: bool, want_x: bool, want_weight: bool) -> Gradients:
    """The gradients of `forward`; t as `saved` leaves it, `out` where a residual is followed by an activation."""
    dot = kept.dot
    how, vectors = _epilogue(t, kept, o)
    of_vectors = _floats(dot, how.rows, dot.shape[1])
    of_mean = _floats(dot, o.groups if o.mean_kind != NO_MEAN else 0, how.mean_parts)
    of_norm = _floats(dot, how.reduced(o.activation) if o.follows else 0, dot.shape[1])
    behind_activation = residual and o.activation != 0
    behind = torch.empty_like(dot) if behind_activation else dot.new_empty(0)
    grad_d = torch.empty_like(dot)
    if dot.numel():
        grad_n = _epilogue_backward(launch.like(e, dot), t, kept, out, o, how, vectors, (grad_d, of_vectors, of_mean, of_norm, behind))
    else:
        grad_n = torch.empty_like(kept.norms)
        for empty in (of_vectors, of_mean, of_norm):
            empty.zero_()
    if o.weighting == "separate":
        of_vectors, of_w_norm = _factor_backward(t, kept.w_norm, of_vectors, o)
    else:
        of_w_norm = of_vectors[0] if o.weighting else None  # of the factor, or of the gain
    grad_x, grad_weight = _convolution_backward(grad_d, grad_n, of_mean, of_w_norm, t, kept, o, want_x, want_weight)
    return Gradients(grad_x, grad_weight, of_vectors, of_mean, of_norm, behind)


def _epilogue_backward(
    e: Tensor, t: Operands, kept: Kept, out: Tensor | None, o: Options, how: Plan, vectors: list[Tensor], results: tuple[Tensor, ...]
) -> Tensor:
    """Fills the results; gives the gradient of the norms as maps to be added up."""
    dot, norms, norm = kept.dot, kept.norms, kept.norm
    grad_d, of_vectors, of_mean, of_norm, behind = results
    slope, activation, coefficients = either(t.slope, dot), o.activation, kept.norm
    if o.follows:
        sums = _floats(dot, how.programs, of_norm.shape[0], dot.shape[1])
        how.launcher("reduce", behind.numel() > 0, activation)((dot, norms, e, either(out, dot), dot, norms, behind, *vectors, norm, norm, slope, sums))
        coefficients = _floats(dot, 2, dot.shape[1])
        how.launcher("batch_norm_gradient", activation)((sums, norm, of_norm, coefficients), float(how.count))
        if behind.numel():
            e, activation = behind, 0
    sums = _floats(dot, how.programs, how.rows, dot.shape[1])
    grad_n = _floats(dot, how.kernel_blocks, *norms.shape)
    launcher = how.launcher("gradients", o.follows != ALONE, activation, o.follows == STATISTICS)
    launcher((dot, norms, e, dot, grad_d, grad_n, dot, *vectors, norm, coefficients, slope, sums))
    if how.rows:
        how.launcher("vector_gradients")((sums, either(t.radius, dot), vectors[3], of_vectors, of_mean))
    return grad_n


def _factor_backward(t: Operands, w_norm: Tensor, of_vectors: Tensor, o: Options) -> tuple[Tensor, Tensor]:
    """The rows of gradients with those of the factor, α·h₁(‖w‖), passed on to ρ and the learned parameters; and the gradient in ‖w‖."""
    operator = operator_named(o.magnitude, o.angular, o.weighting)
    e = of_vectors[0] * operator.magnitude.value("alpha", 1.0)
    _, of_norm, *slopes = operator.magnitude_one(w_norm, *_rho_and_learned(t, o))
    of_vectors = of_vectors.clone()
    if t.radius is not None:
        of_vectors[1] += e * slopes.pop(0)
    first = len(of_vectors) - len(operator.learned)
    for name, slope in zip(operator.magnitude.formula.learnable, slopes, strict=True):
        if name in operator.magnitude.learned:
            of_vectors[first + operator.magnitude.learned.index(name)] += e * slope
    return of_vectors, e * of_norm


def _convolution_backward(
    e: Tensor, e_norms: Tensor, e_mean: Tensor, e_w_norm: Tensor | None, t: Operands, kept: Kept, o: Options, want_x: bool, want_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients in x and in the weight."""
    if not o.stride:
        grad_x = e @ kept.unit if want_x else None
        grad_unit = e.t() @ t.x if want_weight else None
    else:
        shape = (o.stride, o.padding, o.dilation, False, [0] * len(o.stride), o.groups)
        grad_x, grad_unit, _ = torch.ops.aten.convolution_backward(e, t.x, kept.unit, None, *shape, (want_x, want_weight, False))
    plan = _norm_plan(t.x, t.weight, o)
    if grad_x is not None:
        of_mean, share = (e_mean, 1.0 / max(1, plan.count)) if o.mean_kind == OF_BATCH else (None, 0.0)
        if o.mean_kind == OF_RANKS:
            of_mean, share = e_mean.sum(1, keepdim=True), 1.0
            if distributed():
                dist.all_reduce(of_mean)
            of_mean /= kept.mean[-1]
        grad_x = launch.patch_norms_backward(e_norms, of_mean, share, t.x, kept.norms, plan, grad_x)
    return grad_x, None if grad_unit is None else launch.unit_kernel_backward(t.weight, kept.w_norm, grad_unit, e_w_norm)


def saved(t: Operands) -> Operands:
    """The operands backward reads."""
    return t._replace(gamma=None, beta=None, running_mean=None, running_var=None, residual=None)


def operand_gradients(gradients: Gradients, e: Tensor, t: Operands, o: Options, wanted: Sequence[bool]) -> Operands:
    """The gradients by operand, None for those that are not wanted."""
    want = Operands(*wanted)  # type: ignore[arg-type]
    present = {"factor": o.weighting in ("linear", "separate"), "gain": o.weighting == "joint", "radius": t.radius is not None}
    present["bias"] = t.bias is not None
    rows = iter(gradients.vectors)
    of = {name: next(rows) if present[name] else None for name in VECTORS}
    learned = None if t.learned is None else gradients.vectors[len(gradients.vectors) - len(t.learned) :]
    of_mean = gradients.mean.sum(1) if want.mean_norm else None
    beta, gamma, slope = (gradients.norm[i] if wants else None for i, wants in enumerate((want.beta, want.gamma, want.slope)))
    residual = (gradients.residual if o.activation != 0 else e) if want.residual else None
    # autograd drops what is not wanted of those that come anyhow
    return Operands(gradients.x, gradients.weight, of["bias"], of["radius"], of_mean, learned, gamma, beta, None, None, residual, slope)  # type: ignore[arg-type]
