"""One decoupled convolution with what follows it, forward and backward, as launches.

Forward: kernels normalised, PyTorch's convolution, patch norms and their mean, epilogue. With BatchNorm the epilogue reads the dot product
twice (statistics; normalised output) and writes once; the decoupled map itself is never stored. Backward reads dot product and
incoming gradient twice, writes the dot product's gradient, and adds the norms' gradient to the convolution's in one pass.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dcnet.ops.fused import launch
from dcnet.ops.fused.fast import Piece, aligned
from dcnet.ops.fused.launch import either
from dcnet.ops.fused.plan import Plan, operator_named, plan_of
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
    """What forward leaves for backward."""

    dot: Tensor
    norms: Tensor  # ‖x‖ (N, groups, …)
    unit: Tensor  # w/‖w‖
    vectors: Tensor  # small ones in one, where `places` says


class Places(NamedTuple):
    """Where in `Kept.vectors` they start."""

    w_norm: int
    norm: int  # BatchNorm's mean, variance, rstd, scale and shift (5, out_channels)
    factor: int  # α·h₁(‖w‖) of "separate"
    mean: int  # E{‖x‖} (groups,); over all ranks followed by the number of norms
    size: int


@lru_cache(1024)
def places(kernels: int, groups: int, mean_kind: int, follows: int, weighting: str) -> Places:
    """The places for so many kernels."""
    sizes = (kernels, 5 * kernels if follows else 0, kernels if weighting == "separate" else 0, groups + 1 if mean_kind in (OF_BATCH, OF_RANKS) else 0)
    return Places(*accumulate(map(aligned, sizes), initial=0))


def _places(t: "Operands", o: "Options") -> Places:
    return places(t.weight.shape[0], o.groups, o.mean_kind, o.follows, o.weighting)


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


def _epilogue(t: Operands, dot: Tensor, vectors: Tensor, o: Options) -> tuple[Plan, list[Tensor], list[Piece]]:
    """How the epilogue's kernels go over this output; the tensors they all take, and the pieces: factor, gain, mean and norm."""
    at = _places(t, o)
    nothing = (vectors, 0)
    there = (o.weighting in ("linear", "separate"), o.weighting == "joint", t.radius is not None, t.bias is not None)
    how = plan_of(dot, o.groups, (o.magnitude, o.angular, o.weighting), there, o.radius_kind, o.mean_kind != NO_MEAN)
    mean = (t.mean_norm, 0) if t.mean_norm is not None else (vectors, at.mean) if o.mean_kind != NO_MEAN else nothing
    # ‖w‖ comes first among the vectors: "linear" has it as factor, "joint" as gain
    factor = (vectors, at.factor) if o.weighting == "separate" else nothing
    tensors = [either(t.radius, dot), either(t.bias, dot), either(t.learned, dot)]
    return how, tensors, [factor, nothing, mean, (vectors, at.norm)]


def forward(t: Operands, o: Options, effects: Effects) -> tuple[Tensor, Kept]:
    """act(BatchNorm(s·h·g + b) + residual), or s·h·g + b alone; and what backward needs."""
    at = _places(t, o)
    vectors = torch.empty(at.size, dtype=torch.float32, device=t.x.device)
    unit = launch.unit_kernel(t.weight, (vectors, 0), o.eps, t.x.dtype)
    dot = launch.dense(convolution(t.x, unit, o))
    plan = _norm_plan(t.x, t.weight, o)
    how, tensors, pieces = _epilogue(t, dot, vectors, o)
    sums_at = plan.scratch
    scratch = torch.empty(sums_at + 2 * how.programs * dot.shape[1], dtype=torch.float32, device=dot.device)
    norms = launch.patch_norms(t.x, plan, o.eps, scratch, o.mean_kind == OF_BATCH)
    if o.mean_kind in (OF_BATCH, OF_RANKS):
        _mean(norms, (vectors, at.mean), plan, scratch, o, effects.tracked)
    if o.weighting == "separate":
        operator = operator_named(o.magnitude, o.angular, o.weighting)
        h = operator.magnitude_one(vectors[: dot.shape[1]], *_rho_and_learned(t, o))[0]
        torch.mul(h, operator.magnitude.value("alpha", 1.0), out=vectors[at.factor : at.factor + dot.shape[1]])
    out = torch.empty_like(dot)
    if dot.numel():
        if o.follows:
            _batch_norm(t, dot, norms, o, how, tensors, pieces, (scratch, sums_at), effects.momentum)
        residual = dot if t.residual is None else launch.like(t.residual, dot)
        launcher = how.launcher("output", o.follows != ALONE, t.residual is not None, o.activation)
        launcher((dot, norms, out, residual, *tensors, dot, either(t.slope, dot)), (*pieces, (scratch, sums_at)))
    return out, Kept(dot, norms, unit, vectors)


def _mean(norms: Tensor, mean: Piece, plan: launch.NormPlan, scratch: Tensor, o: Options, tracked: BatchMean | None) -> None:
    """E{‖x‖} into its place."""
    vectors, at = mean
    if o.mean_kind == OF_RANKS:
        total = vectors[at : at + o.groups + 1]
        total[:-1] = norms.sum([0, *range(2, norms.dim())])
        total[-1] = plan.count
        if distributed():
            dist.all_reduce(total)
        total[:-1] /= total[-1]
        if tracked is not None:
            tracked.track(total[:-1])
    elif norms.numel():
        launch.batch_mean(mean, plan, scratch, tracked)
    else:
        vectors[at:].fill_(torch.nan)  # as the mean of nothing is


def _rho_and_learned(t: Operands, o: Options) -> tuple[Tensor | None, dict[str, Tensor]]:
    assert o.radius_kind == 1  # where ρ is needed outside the kernels, it comes as it is
    names = operator_named(o.magnitude, o.angular, o.weighting).learned
    return t.radius, {} if t.learned is None else dict(zip(names, t.learned, strict=True))


def _batch_norm(
    t: Operands, dot: Tensor, norms: Tensor, o: Options, how: Plan, tensors: list[Tensor], pieces: list[Piece], sums: Piece, momentum: float | None
) -> None:
    """What BatchNorm normalises with, into its place; with a momentum its running averages move."""
    averages = t.running_mean is not None and t.running_var is not None
    if o.follows == STATISTICS:
        how.launcher("statistics", averages)((dot, norms, dot, dot, *tensors, either(t.running_mean, dot), dot), (*pieces, sums))
    launcher = how.launcher("batch_norm", o.follows == STATISTICS, t.gamma is not None, t.beta is not None, averages, momentum is not None)
    count = float(how.count)
    parameters = (either(t.gamma, dot), either(t.beta, dot), either(t.running_mean, dot), either(t.running_var, dot))
    launcher(parameters, (sums, pieces[-1]), count, count / max(1.0, count - 1.0), 0.0 if momentum is None else momentum, o.norm_eps)


class Gradients(NamedTuple):
    """The gradients in the operands; those that are not wanted, or not there, are None or empty."""

    x: Tensor | None
    weight: Tensor | None
    vectors: Tensor  # rows of out_channels: those of factor, gain, radius and bias that are there, learned parameters, then from `norm_at`
    mean: Tensor  # (groups, parts), to be added up
    residual: Tensor  # empty if it is the incoming gradient itself


def backward(e: Tensor, t: Operands, kept: Kept, out: Tensor | None, o: Options, residual: bool, want_x: bool, want_weight: bool) -> Gradients:
    """The gradients of `forward`; t as `saved` leaves it, `out` where a residual is followed by an activation."""
    dot = kept.dot
    how, tensors, pieces = _epilogue(t, dot, kept.vectors, o)
    of_vectors = torch.empty(gradient_size(t, o), dtype=torch.float32, device=dot.device)
    behind_activation = residual and o.activation != 0
    behind = torch.empty_like(dot) if behind_activation else dot.new_empty(0)
    grad_d = torch.empty_like(dot)
    plan = _norm_plan(t.x, t.weight, o)
    scratch = torch.empty(how.scratch + plan.squares, dtype=torch.float32, device=dot.device)
    if dot.numel():
        _epilogue_backward(launch.like(e, dot), t, kept, out, o, how, tensors, pieces, (grad_d, of_vectors, behind, scratch))
    else:
        of_vectors.zero_()
        scratch.zero_()
    of_w_norm = (of_vectors, 0) if o.weighting else None  # the gradient of the factor, or of the gain
    if o.weighting == "separate":
        of_w_norm = (_factor_backward(t, kept.vectors[: dot.shape[1]], of_vectors, o), 0)
    grad_x, grad_weight = _convolution_backward(grad_d, scratch, of_w_norm, t, kept, o, how, plan, want_x, want_weight)
    of_mean = scratch[how.mean_at : how.mean_at + o.groups * how.mean_parts].clone() if o.mean_kind == GIVEN else scratch.new_empty(0)
    return Gradients(grad_x, grad_weight, of_vectors, of_mean, behind)


def _epilogue_backward(
    e: Tensor,
    t: Operands,
    kept: Kept,
    out: Tensor | None,
    o: Options,
    how: Plan,
    tensors: list[Tensor],
    pieces: list[Piece],
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Fills the results: the gradients of dot product and vectors, that behind the activation, and the rest in the scratch."""
    dot, norms = kept.dot, kept.norms
    grad_d, of_vectors, behind, scratch = results
    slope, activation = either(t.slope, dot), o.activation
    grad_n, sums, coefficients = (scratch, how.norms_at), (scratch, how.reduced_at), (scratch, how.coefficients_at)
    if o.follows:
        reduce = how.launcher("reduce", behind.numel() > 0, activation)
        reduce((dot, norms, e, either(out, dot), dot, behind, *tensors, slope), (*pieces, grad_n, coefficients, sums))
        norm_gradients = (sums, pieces[-1], (of_vectors, norm_at(t, o)), coefficients)
        how.launcher("batch_norm_gradient", activation)((), norm_gradients, float(how.count))
        if behind.numel():
            e, activation = behind, 0
    sums = (scratch, how.sums_at)
    launcher = how.launcher("gradients", o.follows != ALONE, activation, o.follows == STATISTICS)
    launcher((dot, norms, e, dot, grad_d, dot, *tensors, slope), (*pieces, grad_n, coefficients, sums))
    if how.rows:
        how.launcher("vector_gradients")(tensors[:1], (sums, pieces[2], (of_vectors, 0), (scratch, how.mean_at)))


def _rows(t: Operands, o: Options) -> int:
    """How many per-kernel vectors have a gradient, BatchNorm's apart."""
    return int(bool(o.weighting)) + (t.radius is not None) + (t.bias is not None) + (0 if t.learned is None else t.learned.shape[0])


def norm_at(t: Operands, o: Options) -> int:
    """Where in `Gradients.vectors` those of β, γ and slope start."""
    return aligned(_rows(t, o) * t.weight.shape[0])


def gradient_size(t: Operands, o: Options) -> int:
    """Of `Gradients.vectors`."""
    return norm_at(t, o) + (Plan.reduced(o.activation) * t.weight.shape[0] if o.follows else 0)


def _factor_backward(t: Operands, w_norm: Tensor, of_vectors: Tensor, o: Options) -> Tensor:
    """The gradient in ‖w‖ of the factor, α·h₁(‖w‖); those in ρ and the learned parameters are added to theirs."""
    operator = operator_named(o.magnitude, o.angular, o.weighting)
    rows = of_vectors[: _rows(t, o) * len(w_norm)].view(-1, len(w_norm))
    e = rows[0] * operator.magnitude.value("alpha", 1.0)
    _, of_norm, *slopes = operator.magnitude_one(w_norm, *_rho_and_learned(t, o))
    if t.radius is not None:
        rows[1] += e * slopes.pop(0)
    first = len(rows) - len(operator.learned)
    for name, slope in zip(operator.magnitude.formula.learnable, slopes, strict=True):
        if name in operator.magnitude.learned:
            rows[first + operator.magnitude.learned.index(name)] += e * slope
    return e * of_norm


def _convolution_backward(
    e: Tensor,
    scratch: Tensor,
    e_w_norm: Piece | None,
    t: Operands,
    kept: Kept,
    o: Options,
    how: Plan,
    plan: launch.NormPlan,
    want_x: bool,
    want_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients in x and in the weight; those of norms and mean are in the scratch."""
    if not o.stride:
        grad_x = e @ kept.unit if want_x else None
        grad_unit = e.t() @ t.x if want_weight else None
    else:
        shape = (o.stride, o.padding, o.dilation, False, [0] * len(o.stride), o.groups)
        grad_x, grad_unit, _ = torch.ops.aten.convolution_backward(e, t.x, kept.unit, None, *shape, (want_x, want_weight, False))
    if grad_x is not None and t.x.numel() and kept.norms.numel():
        of_mean: Piece | None = (scratch, how.mean_at) if o.mean_kind in (OF_BATCH, OF_RANKS) else None
        parts, share = how.mean_parts if of_mean else 0, 1.0 / plan.count
        if o.mean_kind == OF_RANKS:
            of_mean, parts, share = (_over_ranks(scratch, t, kept, o, how), 0), 1, 1.0
        products = (scratch, how.scratch)
        e_norms = (scratch, how.norms_at)
        grad_x = launch.patch_norms_backward(e_norms, how.kernel_blocks, of_mean, parts, share, t.x, kept.norms, plan, products, grad_x)
    elif grad_x is not None and o.mean_kind == OF_RANKS:
        _over_ranks(scratch, t, kept, o, how)  # the other ranks are waiting
    return grad_x, None if grad_unit is None else launch.unit_kernel_backward(t.weight, (kept.vectors, 0), grad_unit, e_w_norm)


def _over_ranks(scratch: Tensor, t: Operands, kept: Kept, o: Options, how: Plan) -> Tensor:
    """What every norm of every rank gets of the gradient of E{‖x‖}: (groups,)."""
    of_mean = scratch[how.mean_at : how.mean_at + o.groups * how.mean_parts].view(o.groups, -1).sum(1)
    if distributed():
        dist.all_reduce(of_mean)
    return of_mean / kept.vectors[_places(t, o).mean + o.groups]


def saved(t: Operands) -> Operands:
    """The operands backward reads."""
    return t._replace(gamma=None, beta=None, running_mean=None, running_var=None, residual=None)


def operand_gradients(gradients: Gradients, e: Tensor, t: Operands, o: Options, wanted: Sequence[bool]) -> Operands:
    """The gradients by operand, None for those that are not wanted."""
    want = Operands(*wanted)  # type: ignore[arg-type]
    kernels, row = t.weight.shape[0], int(bool(o.weighting))

    def rows(first: int, count: int = 1) -> Tensor:
        return gradients.vectors[first * kernels : (first + count) * kernels]

    radius = rows(row) if want.radius else None
    row += t.radius is not None
    bias = rows(row) if want.bias else None
    row += t.bias is not None
    learned = rows(row, t.learned.shape[0]).view_as(t.learned) if want.learned and t.learned is not None else None
    start = norm_at(t, o)
    beta, gamma, slope = (
        gradients.vectors[start + i * kernels : start + (i + 1) * kernels] if wants else None for i, wants in enumerate((want.beta, want.gamma, want.slope))
    )
    of_mean = gradients.mean.view(o.groups, -1).sum(1) if want.mean_norm else None
    residual = (gradients.residual if o.activation != 0 else e) if want.residual else None
    return Operands(gradients.x, gradients.weight, bias, radius, of_mean, learned, gamma, beta, None, None, residual, slope)  # type: ignore[arg-type]
