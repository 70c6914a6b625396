"""Plans: sizes and launchers, which stay the same between calls with operands of the same kinds.

Otherwise Python would take more time than the kernels. So everything that can be prepared is computed once, when a
combination of shapes, memory orders, dtypes and options is first seen.
"""

import math
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcnet.ops.fused.depthwise_plan import DepthwisePlan
from dcnet.ops.fused.kernels import statistics
from dcnet.ops.fused.kernels.backward import backward as backward_kernel
from dcnet.ops.fused.kernels.forward import forward as forward_kernel
from dcnet.ops.fused.launcher import Changing, Launcher, Place
from dcnet.ops.fused.layout import channels_last_strides, dense, energy_maps
from dcnet.ops.fused.native import Launches
from dcnet.ops.fused.norm_plan import KernelPlan, NormPlan
from dcnet.ops.fused.operands import (
    ALONE,
    BACKWARD,
    FORWARD,
    GIVEN,
    NO_MEAN,
    OF_BATCH,
    OF_RANKS,
    OTHER,
    STATISTICS,
    Operands,
    Options,
    convolution,
    gradient_regions,
    is_depthwise,
    places_of,
    vector_regions,
)
from dcnet.ops.fused.tiles import CHANNELS, Tiles, mean_parts

NORM_MOMENTUM, MEAN_MOMENTUM = Changing(0), Changing(1)  # the floats given at each forward launch


class Backward(NamedTuple):
    """The launchers of a backward pass, and the size of its scratch memory."""

    epilogue: Launches
    ends: Launches  # what follows the convolution's backward: the gradients of x and of the weight
    scratch: int


class Plan:
    """Sizes and launchers for operands of these kinds, with an output in the memory order of `dot`."""

    def __init__(self, t: Operands, o: Options, dot: Tensor) -> None:
        self.options, self.operator, self.groups = o, o.operator, o.groups
        self.kernels, self.stride, self.has_output = dot.shape[1], dot.stride(), dot.numel() > 0
        self.has = {name: tensor is not None for name, tensor in zip(Operands._fields, t, strict=True)}
        self.maps = 0 if t.energy is None else t.energy.shape[0]  # number of energy maps of x
        self.vectors = vector_regions(self.kernels, o)
        self.of_vectors = gradient_regions(t, o)
        sizes = (t.x.shape, t.x.stride(), t.weight.shape[2:], o)
        self.depthwise = is_depthwise(t.x, t.weight, o.groups)
        self.norms = DepthwisePlan(*sizes, t.x.device) if self.depthwise else NormPlan(*sizes)
        self.tiles = Tiles(dot, self.has, self.norms, o)
        self._launchers(t)
        # passes already compiled: forward (with or without gradient), and backward by key
        self.used: set[bool | tuple[bool, ...]] = set()
        self._epilogues: dict[tuple[int, bool], Launches] = {}
        self._backwards: dict[tuple[bool, ...], Backward] = {}
        self.left = (self.tiles.kernel_blocks, *self.norms.output) if o.leaves else None
        assert not o.leaves or self.tiles.kernel_blocks == energy_maps(self.kernels, o.groups)

    def _launchers(self, t: Operands) -> None:
        """Make the launchers that do not depend on the pass."""
        o, ahead, back = self.options, places_of(FORWARD), places_of(BACKWARD)
        # ‖w‖ is the factor or the gain, whose gradient is the first of those of the vectors. With "separate", the
        # gradient of ‖w‖ is computed from that.
        separate = self.operator.weighting == "separate"
        e_norm = (back["of_w_norm"] if separate else back["of_vectors"]) if self.operator.weighting else None
        self.weights = KernelPlan(
            self.kernels,
            math.prod(t.weight.shape[1:]),
            {"w_ptr": ahead["weight"], "unit_ptr": ahead["unit"], "w_norm_ptr": ahead["vectors"]},
            {
                "w_ptr": back["weight"],
                "e_unit_ptr": back["grad_unit"],
                "grad_ptr": back["grad_weight"],
                "w_norm_ptr": back["vectors"],
                "e_norm_ptr": e_norm,
            },
            o.eps,
            self.depthwise,
        )
        scratch, regions = ahead["scratch"].slot, self.tiles.scratch
        places = {
            **{name: ahead[name] for name in ("x", "unit", "dot", "norms")},
            "energy": ahead["energy"] if self.maps else Place(scratch, regions.at("energies")),
            "sums": Place(scratch, regions.at("norm_sums")) if o.mean_kind == OF_BATCH else None,
        }
        self.ahead = Launches(*self.norms.forward(places, self.maps, self.weights))
        # a depthwise layer's backward pass computes dot products and norms again, instead of keeping them
        again = {**back, "energy": None, "sums": None}
        self.again = Launches(*self.norms.windows(again)) if isinstance(self.norms, DepthwisePlan) else Launches()

    def ordered(self, dot: Tensor) -> Tensor:
        """Return a tensor of the output's shape in the memory order of this plan, copied only if it differs."""
        if dot.stride() == self.stride:
            return dot
        return torch.empty_strided(dot.shape, self.stride, dtype=dot.dtype, device=dot.device).copy_(dot)

    def _vectors(self, slots: tuple[str, ...]) -> dict[str, Place | None]:
        """Return the places of the vectors that both epilogue kernels read; None for those that are absent."""
        o, at, weighting = self.options, places_of(slots), self.operator.weighting
        places = {name: at[name] if self.has[name] else None for name in ("radius", "bias", "learned", "slope")}

        def among_vectors(name: str) -> Place:
            return Place(at["vectors"].slot, self.vectors.at(name))

        # ‖w‖ is the factor of "linear" and the gain of "joint"
        factor = {"linear": "w_norm", "separate": "factor"}.get(weighting or "")
        places["factor"] = None if factor is None else among_vectors(factor)
        places["gain"] = among_vectors("w_norm") if weighting == "joint" else None
        places["mean"] = at["mean_norm"] if o.mean_kind == GIVEN else among_vectors("mean") if o.mean_kind else None
        places["norm"] = among_vectors("norm") if o.follows != ALONE else None
        return places

    def epilogue(self, track: int, moves: bool) -> Launches:
        """Return the launchers of the epilogue: one, or two for BatchNorm with this batch's statistics.

        track: how to update the running average of E{‖x‖}: 0 not at all, 1 with the momentum, 2 cumulatively.
        moves: whether to update BatchNorm's running averages.
        """
        found = self._epilogues.get((track, moves))
        if found is None:
            found = self._epilogues[track, moves] = self._epilogue(track, moves)
        return found

    def _epilogue(self, track: int, moves: bool) -> Launches:
        o, at, has, tiles = self.options, places_of(FORWARD), self.has, self.tiles
        known = int(o.mean_kind != NO_MEAN)
        scratch = at["scratch"].slot
        nothing = dict.fromkeys(("y_ptr", "energy_ptr", "residual_ptr", "gamma", "beta", "running_var", "norm_batches"))
        arguments = {
            "d_ptr": at["dot"],
            "n_ptr": at["norms"],
            **nothing,
            **self._vectors(FORWARD),
            "running_mean": None,
            "running_norm": at["running_norm"] if track else None,
            "mean_batches": at["mean_batches"] if track else None,
            "sums": Place(scratch, tiles.scratch.at("sums")),
            "norm_sums": Place(scratch, tiles.scratch.at("norm_sums")),
            "norm_momentum": NORM_MOMENTUM,
            "mean_momentum": MEAN_MOMENTUM,
            "norm_eps": o.norm_eps,
            "unbiased": tiles.count / max(1.0, tiles.count - 1.0),
            "mean_parts": self.norms.programs,
            "MEAN": 2 if o.mean_kind == OF_BATCH else known,
            "TRACK": track,
            "TALLY": o.groups == 1,
            "NORM": 0,
            "ACTIVATION": 0,
            "STATISTICS": False,
        }
        launchers = []
        if o.follows == STATISTICS:
            centered = {"running_mean": at["running_mean"] if has["running_mean"] and has["running_var"] else None}
            summed = arguments | centered | {"STATISTICS": True}
            launchers.append(tiles.launcher(forward_kernel, summed, tiles.statistics, tiles.statistics))
            # now E{‖x‖} is known, and its running average updated
            arguments |= {"MEAN": known, "TRACK": 0, "running_norm": None, "mean_batches": None}
        there = {name: at[name] if has[name] else None for name in ("gamma", "beta", "running_mean", "running_var")}
        last = {
            "y_ptr": at["out"],
            "energy_ptr": at["left"] if o.leaves else None,
            "residual_ptr": at["residual"] if has["residual"] else None,
            "norm_batches": at["batches"] if moves else None,
            "NORM": o.follows,
            "ACTIVATION": min(o.activation, OTHER),
        }
        launchers.append(tiles.launcher(forward_kernel, arguments | there | last, tiles.output, tiles.statistics))
        if track and o.groups > 1:
            count = {"mean": arguments["mean"], "batches": at["mean_batches"], "groups": o.groups, "BLOCK": 256}
            launchers.append(Launcher(statistics.count_batch, (1,), count))
        return Launches(*launchers)

    def backward(
        self, behind: bool, energy: bool, add: bool, want_x: bool, want_weight: bool, more: bool = False
    ) -> Backward:
        """Return the launchers of the backward pass.

        behind: whether a residual was added whose gradient is not the incoming gradient itself. energy: whether the
        output's energy has a gradient. add: whether to add the gradient of the norms to that of x. more: whether the
        incoming gradient is the sum of two.
        """
        key = (behind, energy, add, want_x, want_weight, more)
        found = self._backwards.get(key)
        if found is None:
            found = self._backwards[key] = self._backward(*key)
        return found

    def _backward(self, behind: bool, energy: bool, add: bool, want_x: bool, want_weight: bool, more: bool) -> Backward:
        o, at, tiles = self.options, places_of(BACKWARD), self.tiles

        def scratch(name: str) -> Place:
            return Place(at["scratch"].slot, tiles.back_scratch.at(name))

        arguments = {
            "d_ptr": at["dot"],
            "n_ptr": at["norms"],
            "e_ptr": at["e"],
            "e_more": at["e_more"] if more else None,
            "e_energy": at["of_left"] if energy else None,
            **dict.fromkeys(("out_ptr", "grad_d", "grad_residual")),
            **self._vectors(BACKWARD),
            "grad_n": scratch("norms"),
            "norm_sums": scratch("reduced"),
            "norm_gradients": Place(at["of_vectors"].slot, self.of_vectors.at("beta")),
            **tiles.slopes,
            "ACTIVATION": min(o.activation, OTHER),
            "CENTERED": False,
            "RECOVERS": o.recovers,
            "NORM_SUMS": tiles.reduced,
        }
        epilogue = []
        if o.follows != ALONE:
            out = {"out_ptr": at["out"], "grad_residual": at["behind"]} if behind else {}
            reduces = {"sums": scratch("reduced"), "REDUCE": True, "SUMS": tiles.reduced}
            reduction = arguments | out | reduces
            epilogue.append(tiles.launcher(backward_kernel, reduction, tiles.reduction, tiles.reduction))
            if behind:
                arguments |= {"e_ptr": at["behind"], "e_more": None, "ACTIVATION": 0, "e_energy": None}
        centered = {"CENTERED": o.follows == STATISTICS, "grad_d": at["grad_d"]}
        gradients: dict[str, Any] = {"sums": scratch("sums"), "REDUCE": False, "SUMS": tiles.rows}
        gradients |= arguments | centered
        epilogue.append(tiles.launcher(backward_kernel, gradients, tiles.gradients, tiles.reduction))
        if tiles.rows:
            epilogue.append(self._vector_gradients(arguments, scratch("sums"), scratch("mean"), at["of_vectors"]))

        of_mean, parts, share = {
            OF_BATCH: (scratch("mean"), tiles.mean_parts, 1.0 / max(1, self.norms.count)),
            OF_RANKS: (at["of_mean"], 1, 1.0),
        }.get(o.mean_kind, (None, 0, 0.0))
        places = {
            **{name: at[name] for name in ("x", "unit", "norms", "grad_d", "grad_x")},
            "of_norms": scratch("norms"),
            "of_mean": of_mean,
            "columns": scratch("columns"),
            "products": scratch("products") if add else at["products"],
        }
        if want_x:
            maps = tiles.kernel_blocks
            ends = self.norms.backward(places, self.weights, maps, parts, share, add, want_weight)
        else:
            ends = [self.weights.backward()] if want_weight else []
        size = tiles.back_scratch.size if add else tiles.back_scratch.at("products")
        return Backward(Launches(*epilogue), Launches(*ends), size)

    def _vector_gradients(self, arguments: dict[str, Any], sums: Place, grad_mean: Place, gradients: Place) -> Launcher:
        """Return the launcher for the gradients of the vectors and of E{‖x‖}, computed from the programs' sums."""
        groups = 1 if self.depthwise else self.groups  # a program of a depthwise layer has several groups
        programs = self.tiles.gradients.programs
        sizes = {"programs": programs, "K": self.kernels // groups, "channels": self.kernels}
        blocks = {"BR": 128, "BC": CHANNELS}
        rows = {"ROWS": self.tiles.rows, "RADIUS_ROW": self.tiles.radius_row, "DEPTHWISE": self.depthwise}
        places = {"radius": arguments["radius"], "sums": sums, "mean": arguments["mean"]}
        results = {"gradients": gradients, "grad_mean": grad_mean}
        grid = (groups, mean_parts(sizes["K"]))
        return Launcher(statistics.vector_gradients, grid, places | results | sizes | rows | self.tiles.radius | blocks)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The shape of t, where x·t is a part of the gradient of x: that of x with groups instead of channels."""
        return (self.norms.shape[0], self.groups, *self.norms.shape[2:])


_PLANS: dict[Any, Plan] = {}


def plan_of(t: Operands, o: Options, dot: Tensor | None = None) -> Plan:
    """Return the plan for operands of these kinds, made once; dot: the dot product, if it is computed already."""
    x, weight = t.x, t.weight
    kinds = [None if tensor is None else (tensor.dtype, tensor.device) for tensor in t]
    key = (o, x.shape, x.stride(), weight.shape, weight.stride(), 0 if t.energy is None else t.energy.shape[0], *kinds)
    found = _PLANS.get(key)
    if found is None:
        for tensor, name in zip(t, Operands._fields, strict=True):
            if tensor is not None and tensor.device != x.device:  # kernels would read that address on the wrong device
                raise ValueError(f"the input is on {x.device}, but its {name} is on {tensor.device}")
        if dot is None:  # only a convolution tells the memory order of its results; its values are not used
            dot = dense(convolution(x, torch.empty_like(weight, dtype=x.dtype), o))
            if is_depthwise(x, weight, o.groups):  # as its own kernels write it
                dot = dot.new_empty_strided(dot.shape, channels_last_strides(dot.shape))
        if len(_PLANS) >= 4096:  # many may be of shapes that never come again
            _PLANS.clear()
        found = _PLANS[key] = Plan(t, o, dot)
    return found
