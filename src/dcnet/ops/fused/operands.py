"""What goes into the fused operator, what forward leaves for backward, and what comes out of that."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from dcnet.ops.fused import launch
from dcnet.ops.fused.fast import Piece, aligned
from dcnet.ops.fused.launch import either
from dcnet.ops.fused.plan import Plan, plan_of
from dcnet.ops.mean_norm import BatchMean

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


class Effects(NamedTuple):
    """What the kernels move on the way."""

    tracked: BatchMean | None = None  # the running average of E{‖x‖}
    momentum: float | None = None  # BatchNorm's averages, with this momentum
    batches: Tensor | None = None  # and its number of batches


class Kept(NamedTuple):
    """What forward leaves for backward."""

    dot: Tensor  # ⟨w, x⟩/‖w‖
    norms: Tensor  # ‖x‖ (N, groups, …)
    unit: Tensor  # w/‖w‖
    vectors: Tensor  # small ones in one, where `places` says


class Places(NamedTuple):
    """Where in `Kept.vectors` they start."""

    w_norm: int
    norm: int  # BatchNorm's mean, variance, rstd, scale, shift and centre (6, out_channels)
    factor: int  # α·h₁(‖w‖) of "separate"
    mean: int  # E{‖x‖} (groups,); over all ranks followed by the number of norms
    size: int


def places(kernels: int, groups: int, mean_kind: int, follows: int, weighting: str) -> Places:
    """The places for so many kernels."""
    factor = kernels if weighting == "separate" else 0
    mean = groups + 1 if mean_kind in (OF_BATCH, OF_RANKS) else 0
    return Places(*accumulate(map(aligned, (kernels, 6 * kernels if follows else 0, factor, mean)), initial=0))


known_places = lru_cache(1024)(places)  # torch.compile follows the function itself


def places_of(t: Operands, o: Options) -> Places:
    """The places for these operands."""
    return known_places(t.weight.shape[0], o.groups, o.mean_kind, o.follows, o.weighting)


class Gradients(NamedTuple):
    """The gradients in the operands; None for those that are not wanted, or not there (a registered operator gives empty ones)."""

    x: Tensor | None
    products: Tensor | None  # (N, groups, …): what times x is still to be added to the gradient in x, if it has not been
    weight: Tensor | None
    vectors: Tensor  # rows of out_channels: those of factor, gain, radius and bias that are there, learned parameters; BatchNorm's from `norm_at`
    mean: Tensor | None  # of a given one: (groups, parts), to be added up
    residual: Tensor | None  # if it is not the incoming gradient itself


def vector_rows(t: Operands, o: Options) -> int:
    """How many per-kernel vectors have a gradient, BatchNorm's apart."""
    return int(bool(o.weighting)) + (t.radius is not None) + (t.bias is not None) + (0 if t.learned is None else t.learned.shape[0])


def norm_at(t: Operands, o: Options) -> int:
    """Where in `Gradients.vectors` those of β, γ and slope start."""
    return aligned(vector_rows(t, o) * t.weight.shape[0])


def gradient_size(t: Operands, o: Options) -> int:
    """Of `Gradients.vectors`."""
    return norm_at(t, o) + ((3 if o.activation == 2 else 2) * t.weight.shape[0] if o.follows else 0)


def norm_plan(t: Operands, o: Options) -> launch.NormPlan:
    """How the kernels of patch norms go over x."""
    return launch.norm_plan(
        t.x.shape, t.x.stride(), t.x.dtype, t.x.device, t.weight.shape[2:], tuple(o.stride), tuple(o.padding), tuple(o.dilation), o.groups
    )


def epilogue(t: Operands, dot: Tensor, vectors: Tensor, o: Options) -> tuple[Plan, list[Tensor], list[Piece]]:
    """How the epilogue's kernels go over this output; the tensors they all take, and the pieces: factor, gain, mean and norm."""
    at = places_of(t, o)
    nothing = (vectors, 0)
    there = (o.weighting in ("linear", "separate"), o.weighting == "joint", t.radius is not None, t.bias is not None)
    dtypes = tuple([None if tensor is None else tensor.dtype for tensor in t])  # fewer in backward, which has launchers of its own
    how = plan_of(dot, o.groups, (o.magnitude, o.angular, o.weighting), there, o.radius_kind, o.mean_kind != NO_MEAN, dtypes)
    mean = (t.mean_norm, 0) if t.mean_norm is not None else (vectors, at.mean) if o.mean_kind != NO_MEAN else nothing
    # ‖w‖ comes first among the vectors: "linear" has it as factor, "joint" as gain
    factor = (vectors, at.factor) if o.weighting == "separate" else nothing
    tensors = [either(t.radius, dot), either(t.bias, dot), either(t.learned, dot), either(t.slope, dot)]
    return how, tensors, [factor, nothing, mean, (vectors, at.norm)]
