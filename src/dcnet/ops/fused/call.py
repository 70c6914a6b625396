"""What stays the same between calls with operands of the same kinds: sizes, and launchers that know where their pointers are.

Python's share in a training step was larger than the kernels'. So everything that can be is worked out once, when a combination of
shapes, memory orders, dtypes and options is first seen.
"""

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcnet.ops.fused.launcher import Launcher, Place
from dcnet.ops.fused.layout import NormPlan, dense, energy_maps, kernel_launchers
from dcnet.ops.fused.operands import (
    ALONE,
    GIVEN,
    NO_MEAN,
    OF_BATCH,
    OF_RANKS,
    STATISTICS,
    Operands,
    Options,
    places,
    vector_places,
)
from dcnet.ops.fused.plan import ForwardFlags, GradientFlags, Plan, operator_named

READ_BY_BACKWARD = ("x", "weight", "bias", "radius", "mean_norm", "learned", "slope")

# The slots of a call's memory, in the order in which `forward` and `backward` fill them
FORWARD = (
    *Operands._fields,
    "batches",
    "running_norm",
    "mean_batches",
    "vectors",
    "unit",
    "norms",
    "scratch",
    "left",
    "dot",
    "out",
)
BACKWARD = (
    *READ_BY_BACKWARD,
    *("e", "of_left", "out", "dot", "norms", "unit", "vectors"),
    *(
        "grad_d",
        "of_vectors",
        "behind",
        "scratch",
        "products",
        "of_mean",
        "of_w_norm",
        "grad_x",
        "grad_unit",
        "grad_weight",
    ),
)


def convolution(x: Tensor, unit: Tensor, options: Options) -> Tensor:
    """⟨w, x⟩/‖w‖."""
    if not options.stride:  # no dimensions: a linear map
        return x @ unit.t()
    zeros = (0,) * len(options.stride)
    return torch.convolution(
        x, unit, None, options.stride, options.padding, options.dilation, False, zeros, options.groups
    )


class Backward(NamedTuple):
    """The launchers of a backward pass."""

    epilogue: list[Launcher]
    box: Launcher
    product: Launcher
    scratch: int


class Call:
    """Sizes and launchers for operands of these kinds, and an output in the order of `dot`."""

    def __init__(self, t: Operands, o: Options, dot: Tensor) -> None:
        self.options = o
        self.operator = operator_named(o.magnitude, o.angular, o.weighting)
        self.kernels, self.stride, self.has_output = dot.shape[1], dot.stride(), dot.numel() > 0
        self.norm_plan = NormPlan(
            t.x.shape, t.x.stride(), t.weight.shape[2:], o.stride, o.padding, o.dilation, o.groups
        )
        self.has_norms = self.norm_plan.count > 0
        there = (
            o.weighting in ("linear", "separate"),
            o.weighting == "joint",
            t.radius is not None,
            t.bias is not None,
        )
        mean = o.mean_kind != NO_MEAN
        self.epilogue_plan = Plan(
            dot.shape, dot.stride(), dot.dtype, dot.device, o.groups, self.operator, there, o.radius_kind, mean
        )
        self.at = places(self.kernels, o.groups, o.mean_kind, o.follows, o.weighting)
        self.of_vectors = vector_places(t, o)
        self.scratch = self.norm_plan.scratch + 2 * self.epilogue_plan.programs * self.kernels
        self.has = {name: tensor is not None for name, tensor in zip(Operands._fields, t, strict=True)}
        self._epilogues: dict[tuple[int, bool], list[Launcher]] = {}
        self._backwards: dict[tuple[bool, bool, bool], Backward] = {}
        self.maps = 0 if t.energy is None else t.energy.shape[0]
        self.left = (self.epilogue_plan.kernel_blocks, *self.norm_plan.output) if o.leaves else None
        assert not o.leaves or self.epilogue_plan.kernel_blocks == energy_maps(self.kernels, o.groups)

        place, back = FORWARD.index, BACKWARD.index
        size = t.weight.numel() // max(1, t.weight.shape[0])
        # the gradient of ‖w‖: as factor or gain it comes first among the vectors'; that of "separate" is computed from them
        e_norm = (back("of_w_norm" if o.weighting == "separate" else "of_vectors" if o.weighting else "vectors"), 0)
        self.normalise, self.normalise_backward = kernel_launchers(
            self.kernels,
            size,
            [(place("weight"), 0), (place("unit"), 0), (place("vectors"), 0)],
            [(back("weight"), 0), (back("grad_unit"), 0), (back("grad_weight"), 0), (back("vectors"), 0), e_norm],
            o.eps,
            bool(o.weighting),
        )
        energy, sums = (place("energy" if self.maps else "scratch"), 0), (place("scratch"), self.norm_plan.energies)
        self.energies = self.norm_plan.energies_launcher([(place("x"), 0), energy])
        self.box = self.norm_plan.box_launcher(
            [(place("norms"), 0), energy, sums], o.eps, self.maps or 1, o.mean_kind == OF_BATCH
        )

    def ordered(self, dot: Tensor) -> Tensor:
        """An output in the order that is expected."""
        return (
            dot
            if dot.stride() == self.stride
            else torch.empty_strided(dot.shape, self.stride, dtype=dot.dtype, device=dot.device).copy_(dot)
        )

    def _operand(self, slots: tuple[str, ...], name: str, there: bool | None = None) -> Place:
        """Where an operand is; kernels get something else in place of one that is not there, and do not look at it."""
        return slots.index(name if (self.has[name] if there is None else there) else "dot"), 0

    def _mean(self, slots: tuple[str, ...]) -> Place:
        given = self.options.mean_kind == GIVEN
        return (
            (slots.index("mean_norm"), 0)
            if given
            else (slots.index("vectors"), 0 if self.options.mean_kind == NO_MEAN else self.at.mean)
        )

    def _vectors(self, slots: tuple[str, ...]) -> list[Place]:
        """Factor, gain, mean and norm. ‖w‖ comes first among the vectors: "linear" has it as factor, "joint" as gain."""
        vectors = slots.index("vectors")
        factor = self.at.factor if self.options.weighting == "separate" else 0
        return [(vectors, factor), (vectors, 0), self._mean(slots), (vectors, self.at.norm)]

    def epilogue(self, track: int, moves: bool) -> list[Launcher]:
        """The epilogue: once, or for BatchNorm with this batch's statistics twice. track and moves as `ForwardFlags` has them."""
        found = self._epilogues.get((track, moves))
        if found is None:
            found = self._epilogues[track, moves] = self._epilogue(track, moves)
        return found

    def _epilogue(self, track: int, moves: bool) -> list[Launcher]:
        o, how, plan, scratch = self.options, self.epilogue_plan, self.norm_plan, FORWARD.index("scratch")
        names = ("residual", "radius", "bias", "learned", "slope", "gamma", "beta", "running_mean", "running_var")
        table = [(FORWARD.index(name), 0) for name in ("dot", "norms", "out", "left" if o.leaves else "dot")]
        table += [self._operand(FORWARD, name) for name in names]
        table += [
            self._operand(FORWARD, "batches", moves),
            *[self._operand(FORWARD, name, track > 0) for name in ("running_norm", "mean_batches")],
        ]
        table += [*self._vectors(FORWARD), (scratch, plan.scratch), (scratch, plan.energies)]
        floats = (float(how.count), how.count / max(1.0, how.count - 1.0), o.norm_eps, float(plan.count))
        flags = ForwardFlags(plan.programs, o.groups == 1, 2 if o.mean_kind == OF_BATCH else int(how.mean), track)
        launchers = []
        if o.follows == STATISTICS:
            centre = self.has["running_mean"] and self.has["running_var"]
            launchers.append(how.forward_launcher(table, floats, flags._replace(statistics=True, centre=centre)))
            flags = flags._replace(mean=int(how.mean), track=0)  # now it is known and has been tracked
        flags = flags._replace(
            norm=o.follows,
            has_gamma=self.has["gamma"],
            has_beta=self.has["beta"],
            move=moves,
            residual=self.has["residual"],
            activation=o.activation,
            energy=o.leaves,
        )
        return [*launchers, how.forward_launcher(table, floats, flags)]

    def backward(self, behind: bool, energy: bool, add: bool) -> Backward:
        """The launchers of the backward pass. behind: whether a residual was added and the gradient in front of that is another; energy: whether
        the output's energy has a gradient; add: whether `product` is to be launched too."""
        found = self._backwards.get((behind, energy, add))
        if found is None:
            found = self._backwards[behind, energy, add] = self._backward(behind, energy, add)
        return found

    def _backward(self, behind: bool, energy: bool, add: bool) -> Backward:
        o, how, back = self.options, self.epilogue_plan, BACKWARD.index
        scratch, activation, follows, slope = back("scratch"), o.activation, o.follows != ALONE, o.activation == 2
        dot, sums = (back("dot"), 0), (scratch, how.sums_at)
        of_norm = (back("of_vectors"), self.of_vectors.beta.start)
        vectors = [self._operand(BACKWARD, name) for name in ("radius", "bias", "learned", "slope")] + self._vectors(
            BACKWARD
        )
        rest = [*vectors, (scratch, how.norms_at), (scratch, how.reduced_at), of_norm]
        epilogue, e = [], (back("e"), 0)
        norms, of_left = (back("norms"), 0), (back("of_left"), 0) if energy else dot
        if follows:
            flags = GradientFlags(
                affine=True,
                residual=behind,
                activation=activation,
                reduce=True,
                centred=False,
                energy=energy,
                slope=slope,
            )
            maps = [
                dot,
                norms,
                e,
                of_left,
                (back("out"), 0) if behind else dot,
                dot,
                (back("behind"), 0) if behind else dot,
            ]
            epilogue.append(how.backward_launcher([*maps, *rest, (scratch, how.reduced_at)], flags))
            if behind:
                e, activation, energy = (back("behind"), 0), 0, False
        centred = o.follows == STATISTICS
        flags = GradientFlags(
            affine=follows,
            residual=False,
            activation=activation,
            reduce=False,
            centred=centred,
            energy=energy,
            slope=slope,
        )
        epilogue.append(
            how.backward_launcher([dot, norms, e, of_left, dot, (back("grad_d"), 0), dot, *rest, sums], flags)
        )
        if how.rows:
            table = [
                self._operand(BACKWARD, "radius"),
                sums,
                self._mean(BACKWARD),
                (back("of_vectors"), 0),
                (scratch, how.mean_at),
            ]
            epilogue.append(how.vector_gradients_launcher(table))

        of_norms, products = (scratch, how.norms_at), (scratch, how.scratch) if add else (back("products"), 0)
        of_mean, parts, share = of_norms, 0, 0.0
        if o.mean_kind == OF_BATCH:
            of_mean, parts, share = (scratch, how.mean_at), how.mean_parts, 1.0 / max(1, self.norm_plan.count)
        elif o.mean_kind == OF_RANKS:
            of_mean, parts, share = (back("of_mean"), 0), 1, 1.0
        box = self.norm_plan.box_gradient_launcher(
            [norms, of_norms, of_mean, products], how.kernel_blocks, parts, share
        )
        product = self.norm_plan.product_launcher([(back("grad_x"), 0), (back("x"), 0), products])
        return Backward(epilogue, box, product, how.scratch + (self.norm_plan.energies if add else 0))

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The shape of what multiplies x in the gradient: x's, with groups for channels."""
        return (self.norm_plan.shape[0], self.options.groups, *self.norm_plan.shape[2:])


_CALLS: dict[Any, Call] = {}


def call_of(t: Operands, o: Options, dot: Tensor | None = None) -> Call:
    """The call for such operands, made once; `dot` where there is one already."""
    x, weight = t.x, t.weight
    kinds = [None if tensor is None else (tensor.dtype, tensor.device) for tensor in t]
    key = (o, x.shape, x.stride(), weight.shape, weight.stride(), 0 if t.energy is None else t.energy.shape[0], *kinds)
    found = _CALLS.get(key)
    if found is None or found.operator is not operator_named(
        o.magnitude, o.angular, o.weighting
    ):  # whose formulas may be others by now
        for tensor, name in zip(t, Operands._fields, strict=True):
            if tensor is not None and tensor.device != x.device:  # kernels read whatever address they are given
                raise ValueError(f"the input is on {x.device}, but its {name} is on {tensor.device}")
        if dot is None:  # a convolution for nothing, but it knows best in which order its results come
            dot = dense(convolution(x, torch.empty_like(weight, dtype=x.dtype), o))
        if len(_CALLS) >= 4096:  # shapes that never come again
            _CALLS.clear()
        found = _CALLS[key] = Call(t, o, dot)
    return found
