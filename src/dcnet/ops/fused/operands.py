"""What goes into the fused operator, what forward leaves for backward, and what comes out of that."""

from ast import literal_eval
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, starmap
from typing import NamedTuple

import torch
from torch import Tensor

from dcnet.ops.fused.launcher import aligned
from dcnet.ops.mean_norm import BatchMean

NO_MEAN, GIVEN, OF_BATCH, OF_RANKS = range(
    4
)  # what multiplies ρ: nothing, a tensor, E{‖x‖} of this batch, or of all ranks' batches
ALONE, AVERAGES, STATISTICS = range(
    3
)  # what follows: no BatchNorm, one with its running averages, one with this batch's statistics


class Options(NamedTuple):
    """What is fixed for a layer at its place in a network."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
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
    leaves: bool  # whether to leave the energy of the output


def as_arguments(o: Options) -> tuple[str, float, float]:
    """How options go through a graph: one text instead of many arguments, each of which takes time in every call, and what may be symbolic."""
    return str(tuple(o._replace(eps=0.0, norm_eps=0.0))), o.eps, o.norm_eps


@lru_cache(4096)
def _options_named(text: str) -> Options:
    return Options(*literal_eval(text))


def as_options(text: str, eps: float, norm_eps: float) -> Options:
    """The options that make these arguments."""
    return _options_named(text)._replace(eps=eps, norm_eps=norm_eps)


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
    energy: Tensor | None  # of x, as the layer before has left it: see `Carry`


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


class Gradients(NamedTuple):
    """The gradients in the operands; None for those that are not wanted, or not there (a registered operator gives empty ones)."""

    x: Tensor | None
    products: (
        Tensor | None
    )  # (N, groups, …): the gradient in x's energy; times x it is still to be added to the one in x, if it has not been
    weight: Tensor | None
    vectors: Tensor  # rows of out_channels: those of factor, gain, radius and bias that are there, learned; BatchNorm's: `vector_places`
    mean: Tensor | None  # of a given one: (groups, parts), to be added up
    residual: Tensor | None  # if it is not the incoming gradient itself


class VectorPlaces(NamedTuple):
    """Where in `Gradients.vectors` each starts and ends; the start is the end for those that are not there."""

    w_norm: slice
    radius: slice
    bias: slice
    learned: slice
    beta: slice
    gamma: slice
    slope: slice


def vector_places(t: Operands, o: Options) -> VectorPlaces:
    """The places of the vectors' gradients."""
    rows = [
        int(bool(o.weighting)),
        int(t.radius is not None),
        int(t.bias is not None),
        0 if t.learned is None else t.learned.shape[0],
    ]
    kernels, norm = t.weight.shape[0], int(o.follows != ALONE)
    ends = [end * kernels for end in accumulate(rows, initial=0)]
    start = aligned(ends[-1])  # BatchNorm's are written by another kernel
    ends_of_norm = [
        start + end * kernels for end in accumulate((norm, norm, int(norm and o.activation == 2)), initial=0)
    ]
    return VectorPlaces(*starmap(slice, [*pairwise(ends), *pairwise(ends_of_norm)]))


def wanted_output(out: Tensor, t: Operands, o: Options) -> Tensor | None:
    """The output where backward may need it; elsewhere it is computed again."""
    return out if t.residual is not None and (o.activation != 0 or o.leaves) else None


def arrived(
    e: Tensor | None, of_left: Tensor | None, out: Tensor | None, dot: Tensor, o: Options
) -> tuple[Tensor, Tensor | None]:
    """The gradient that came in for the output, zeros if none came; and the output, if the gradient in front of a residual depends on it."""
    depends = o.activation != 0 or of_left is not None
    return torch.zeros_like(dot) if e is None else e, out if depends else None


def operand_gradients(
    gradients: Gradients, e: Tensor, places: VectorPlaces, t: Operands, o: Options, wanted: Sequence[bool], maps: int
) -> tuple[Tensor | None, ...]:
    """The gradients by operand, in the order of `Operands`, None for those that are not wanted. maps: how many x's energy came in."""
    x, weight, bias, radius, mean_norm, learned, gamma, beta, _, _, residual, slope, energy = wanted
    vectors = gradients.vectors
    return (
        gradients.x if x else None,
        gradients.weight if weight else None,
        vectors[places.bias] if bias else None,
        vectors[places.radius] if radius else None,
        gradients.mean.view(o.groups, -1).sum(1) if mean_norm and gradients.mean is not None else None,
        vectors[places.learned].view_as(t.learned) if learned and t.learned is not None else None,
        vectors[places.gamma] if gamma else None,
        vectors[places.beta] if beta else None,
        None,
        None,
        (e if gradients.residual is None else gradients.residual) if residual else None,
        vectors[places.slope] if slope else None,
        gradients.products.expand(maps, *gradients.products.shape)
        if energy and gradients.products is not None
        else None,
    )
