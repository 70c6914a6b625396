"""The inputs of the fused operator, what forward keeps for backward, the gradients, and slots for all of these."""

from ast import literal_eval
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dcnet.formulas import angulars, magnitudes
from dcnet.ops.fused.launcher import Place
from dcnet.ops.fused.layout import Regions
from dcnet.ops.mean_norm import BatchMean
from dcnet.ops.operator import Operator, make_operator
from dcnet.util.provenance import code_hash

# What multiplies ρ: nothing, a given tensor, E{‖x‖} of this batch, or of the batches of all ranks
NO_MEAN, GIVEN, OF_BATCH, OF_RANKS = range(4)
# Whether BatchNorm follows: no, with its running averages, with this batch's statistics
ALONE, AVERAGES, STATISTICS = range(3)
PRELU, OTHER = 2, 3  # indices in ACTIVATIONS; from OTHER on, kernels get the activation as a function
# An argument of every graph operator. PyTorch caches graphs by operator names and arguments; without this hash a new
# version would load a graph compiled for an old one.
CODE = code_hash(Path(__file__).parent)


class Options(NamedTuple):
    """The settings of a layer, which stay the same from call to call."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    eps: float
    radius_kind: int  # 1: `radius` is ρ; 2: it is the raw parameter, ρ = raw² + RADIUS_FLOOR
    mean_kind: int
    follows: int
    norm_eps: float
    activation: int  # which of ACTIVATIONS
    leaves: bool  # whether to return the energy of the output
    recovers: bool  # whether the output overwrites the dot product, which backward recovers from the output
    operator: Operator


def known_to_cpp(o: Options) -> bool:
    """Tell whether C++ supports these options; otherwise op.py runs the layer."""
    return bool(o.stride) and o.mean_kind != OF_RANKS and o.operator.weighting != "separate"


def as_arguments(o: Options) -> tuple[str, float, float]:
    """Return options as arguments in a graph: one string instead of many, and floats that may be symbolic."""
    return str((*o[:4], 0.0, *o[5:8], 0.0, *o[9:-1], *o.operator.names, CODE)), o.eps, o.norm_eps


@lru_cache(4096)
def _parsed(text: str) -> Options:
    values, count = literal_eval(text), len(Options._fields) - 1
    magnitude, angular, weighting = values[count : count + 3]
    return Options._make([*values[:count], make_operator(magnitude, angular, weighting or None)])


def as_options(text: str, eps: float, norm_eps: float) -> Options:
    """Return the options that `as_arguments` turned into these arguments.

    A graph stores formulas by name, and another formula may have been registered by that name since.
    """
    options = _parsed(text)
    h, g = options.operator.magnitude, options.operator.angular
    if magnitudes().get(h.name) is not h.formula or angulars().get(g.name) is not g.formula:
        _parsed.cache_clear()
        options = _parsed(text)
    return options._replace(eps=eps, norm_eps=norm_eps)


def convolution(x: Tensor, unit: Tensor, options: Options) -> Tensor:
    """Return ⟨w, x⟩/‖w‖, given the normalized kernels."""
    if not options.stride:  # no dimensions: a linear map
        return x @ unit.t()
    zeros = (0,) * len(options.stride)
    shape = (options.stride, options.padding, options.dilation, False, zeros, options.groups)
    return torch.convolution(x, unit, None, *shape)


class Operands(NamedTuple):
    """The input tensors, all on one device, each in a dense memory order."""

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
    energy: Tensor | None  # of x, as the layer before returned it


def output_sizes(sizes: Sequence[int], kernel: Sequence[int], o: Options) -> list[int]:
    """Return the sizes of the output's positions, given those of x and of the kernel."""
    return [
        (i + 2 * p - d * (k - 1) - 1) // s + 1
        for i, p, d, k, s in zip(sizes, o.padding, o.dilation, kernel, o.stride, strict=True)
    ]


def is_depthwise(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Tell whether each channel of x has one kernel, and channels lie next to each other in memory.

    Such layers have kernels of their own, which compute the dot product too.
    """
    return x.dim() > 2 and groups == weight.shape[0] == x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous()


READ_BY_BACKWARD = ("x", "weight", "bias", "radius", "mean_norm", "learned", "slope")
# The slots of a call's memory, which `forward`, `backward` and `recompute` in op.py fill in this order
FORWARD = (
    *Operands._fields,
    *("batches", "running_norm", "mean_batches"),
    *("vectors", "unit", "norms", "scratch", "left", "dot", "out"),
)
BACKWARD = (
    *READ_BY_BACKWARD,
    *("e", "e_more", "of_left", "out", "dot", "norms", "unit", "vectors"),
    *("grad_d", "of_vectors", "behind", "scratch"),
    *("products", "of_mean", "of_w_norm", "grad_x", "grad_unit", "grad_weight"),
)


def places_of(slots: tuple[str, ...]) -> dict[str, Place]:
    """Return the places of slots by name."""
    return {name: Place(i) for i, name in enumerate(slots)}


def for_backward(t: Operands) -> Operands:
    """Return the operands with None in place of those that backward does not read."""
    return Operands(
        t.x, t.weight, t.bias, t.radius, t.mean_norm, t.learned, None, None, None, None, None, t.slope, None
    )


class Effects(NamedTuple):
    """What the kernels update besides their outputs."""

    tracked: BatchMean | None = None  # the running average of E{‖x‖}
    momentum: float | None = None  # BatchNorm's averages, with this momentum
    batches: Tensor | None = None  # BatchNorm's count of batches


def tracking(effects: Effects, o: Options) -> tuple[int, float]:
    """Tell how kernels update the running average of E{‖x‖}: 0 not at all, 1 with a momentum, 2 cumulatively.

    Return the momentum too.
    """
    tracked = effects.tracked
    if o.mean_kind != OF_BATCH or tracked is None or tracked.running_norm is None:
        return 0, 0.0
    return (2, 0.0) if tracked.momentum is None else (1, tracked.momentum)


class Results(NamedTuple):
    """What forward returns."""

    out: Tensor
    energy: Tensor | None  # of the output, if the options ask for it


class Kept(NamedTuple):
    """What forward keeps for backward."""

    dot: Tensor  # ⟨w, x⟩/‖w‖
    norms: Tensor  # ‖x‖ (N, groups, …)
    unit: Tensor  # w/‖w‖; of a depthwise layer with the taps first
    vectors: Tensor  # the small vectors in one buffer; `vector_regions` says where


def vector_regions(kernels: int, o: Options) -> Regions:
    """Return the regions of `Kept.vectors`."""
    return Regions(
        w_norm=kernels,
        norm=6 * kernels if o.follows else 0,  # BatchNorm's mean, variance, rstd, scale, shift and center
        factor=kernels if o.operator.weighting == "separate" else 0,  # α·h₁(‖w‖)
        # E{‖x‖}, then the number of norms of all ranks (with OF_RANKS)
        mean=o.groups + 1 if o.mean_kind in (OF_BATCH, OF_RANKS) else 0,
    )


class Gradients(NamedTuple):
    """The gradients of the operands; None for those that are not wanted or do not exist.

    Operators in a graph cannot return None: they return empty tensors instead.
    """

    x: Tensor | None
    products: Tensor | None  # of x's energy, (N, groups, …); times x, a part of the gradient of x, added yet or not
    weight: Tensor | None
    vectors: Tensor  # of the small vectors; `gradient_regions` says where
    mean: Tensor | None  # of a given E{‖x‖}: (groups, parts), to be summed over parts
    residual: Tensor | None  # if it is not the incoming gradient itself


def gradient_regions(t: Operands, o: Options) -> Regions:
    """Return the regions of `Gradients.vectors`: first those that one Triton kernel writes, then BatchNorm's."""
    kernels, norm = t.weight.shape[0], int(o.follows != ALONE)
    rows = Regions(
        packed=True,
        w_norm=kernels * bool(o.operator.weighting),
        radius=kernels * (t.radius is not None),
        bias=kernels * (t.bias is not None),
        learned=kernels * (0 if t.learned is None else t.learned.shape[0]),
    )
    of_norm = Regions(
        start=rows.size,
        packed=True,
        beta=kernels * norm,
        gamma=kernels * norm,
        slope=kernels * (norm and o.activation == PRELU),
    )
    of_norm.slices = rows.slices | of_norm.slices
    return of_norm


def wanted_output(out: Tensor, t: Operands, o: Options) -> Tensor | None:
    """Return the output if backward may need it, else None; backward can often compute it again."""
    return out if o.recovers or (t.residual is not None and (o.activation != 0 or o.leaves)) else None


def arrived(
    e: Tensor | None, of_left: Tensor | None, out: Tensor | None, dot: Tensor, o: Options
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of the output (zeros if there is none), and the output if backward depends on it."""
    depends = o.activation != 0 or of_left is not None
    return torch.zeros_like(dot) if e is None else e, out if depends else None


def operand_gradients(
    gradients: Gradients, e: Tensor, regions: Regions, t: Operands, o: Options, wanted: Sequence[bool], maps: int
) -> tuple[Tensor | None, ...]:
    """Return the gradients in the order of `Operands`, None for those not wanted; maps: number of energy maps of x."""
    want = Operands(*wanted)  # type: ignore[arg-type]
    views = regions.views(gradients.vectors)

    def vector(name: str) -> Tensor | None:
        return views[name] if getattr(want, name) else None

    learned, products = vector("learned"), gradients.products
    return Operands(
        x=gradients.x if want.x else None,  # type: ignore[arg-type]
        weight=gradients.weight if want.weight else None,  # type: ignore[arg-type]
        bias=vector("bias"),
        radius=vector("radius"),
        mean_norm=gradients.mean.view(o.groups, -1).sum(1) if want.mean_norm and gradients.mean is not None else None,
        learned=learned.view_as(t.learned) if learned is not None and t.learned is not None else None,
        gamma=vector("gamma"),
        beta=vector("beta"),
        running_mean=None,
        running_var=None,
        residual=(e if gradients.residual is None else gradients.residual) if want.residual else None,
        slope=vector("slope"),
        energy=products.expand(maps, *products.shape) if want.energy and products is not None else None,
    )
