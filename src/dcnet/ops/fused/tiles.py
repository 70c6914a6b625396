"""How the epilogue's kernels divide an output: tiles, programs, the arguments they share, scratch memory."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from dcnet.formulas import Choice
from dcnet.ops.activations import ACTIVATIONS, FUNCTIONS
from dcnet.ops.fused import formulas
from dcnet.ops.fused.launcher import Launcher
from dcnet.ops.fused.layout import Regions, View, cdiv, power_of_two_in, programs_for
from dcnet.ops.fused.norm_plan import NormPlan
from dcnet.ops.fused.operands import PRELU, STATISTICS, Options
from dcnet.ops.inputs import RADIUS_FLOOR


class Division(NamedTuple):
    """How a pass divides an output."""

    programs: int  # programs per block of kernels; each writes one row of sums
    positions: int  # of a tile
    warps: int  # of a program
    stages: int  # how many tiles a program loads ahead


# Programs for each multiprocessor, elements of a tile, warps, stages: the best of about twenty settings on an H200.
# Large tiles are for passes over 16-bit maps whose values fit into registers.
_SMALL = (3, 2048, 4, 3)
_LARGE = (2, 4096, 4, 3)
_READING = (2, 4096, 4, 4)  # for a pass that only writes sums
_ALONE = (1, 8192, 8, 3)  # for a pass that neither reads nor writes sums
_SUMMED = 4096  # numbers of other programs added at once; fitted to their count, there would be more variants
CHANNELS = 16  # for each program of `vector_gradients`


def mean_parts(kernels: int) -> int:
    """Return the number of parts of the gradient of E{‖x‖}, given the number of kernels of a group."""
    return cdiv(kernels, CHANNELS)


class Tiles:
    """The division of an output in the memory order of `dot`; has: which operands are given."""

    def __init__(self, dot: Tensor, has: dict[str, bool], norms: NormPlan, o: Options) -> None:
        operator, kernels, depthwise = o.operator, dot.shape[1], norms.depthwise
        groups = 1 if depthwise else o.groups  # a tile of a depthwise layer has several groups
        self.view = view = View(dot.shape, dot.stride(), groups)
        self.device = dot.device
        self.kernel_blocks = 1 if depthwise else cdiv(view.kernels, view.kernel_block)  # of a group's kernels
        self.columns = groups * cdiv(view.kernels, view.kernel_block)
        self.count = view.batch * view.positions
        unit = power_of_two_in(view.kernels)
        half = dot.dtype != torch.float32

        h, g = operator.magnitude, operator.angular
        alpha_one = dict(operator.alpha_one) if operator.weighting == "separate" else {}
        self.radius = {"RADIUS": o.radius_kind if h.formula.has_radius else 0, "FLOOR": RADIUS_FLOOR}
        self.common: dict[str, Any] = {
            "batch": view.batch,
            "groups": groups,
            "units": view.kernels // unit,
            "UNIT": unit,
            "P": view.positions,
            "count": float(self.count),
            **formulas.arguments("H", h, half, alpha_one, 0),
            **formulas.arguments("G", g, half, {}, len(h.learned)),
            "A": formulas.jit(FUNCTIONS[name], half) if (name := ACTIVATIONS[o.activation]) in FUNCTIONS else None,
            **self.radius,
            "BK": view.kernel_block,
            "CHANNELS_LAST": view.channels_last,
            "DEPTHWISE": depthwise,
        }
        self.slopes = {"H_SLOPES": _slopes(h, 2 + h.formula.has_radius), "G_SLOPES": _slopes(g, 2)}
        rows = [bool(operator.weighting), has["radius"], has["bias"], *[True] * len(operator.learned)]
        self.rows = sum(rows)
        self.radius_row = sum(rows[:1]) if has["radius"] else -1
        self.mean_parts = mean_parts(kernels // o.groups)
        large = _LARGE if half else _SMALL
        alone = half and o.follows != STATISTICS and not depthwise  # depthwise tiles also load norms of that size
        self.reduced = 3 if o.activation == PRELU else 2  # sums of the reduction
        self.statistics = self._divide(*(_READING if half else _SMALL))
        self.output = self._divide(*(_ALONE if alone else large))
        self.reduction = self._divide(*(large if self.reduced == 2 else _SMALL))
        self.gradients = self._divide(*(large if self.rows < 2 else _SMALL))
        # Forward's scratch: ½·Σ x² over channels, sums of norms, BatchNorm's sums
        of_norm = 2 * self.statistics.programs * kernels
        self.scratch = Regions(energies=norms.rows, norm_sums=o.groups * norms.programs, sums=of_norm)
        # Backward's: BatchNorm's sums, the vectors' sums, the gradients of E{‖x‖} and of the norms, the factors of x,
        # a depthwise layer's sums along columns
        self.back_scratch = Regions(
            reduced=self.reduced * self.reduction.programs * kernels,
            sums=self.gradients.programs * self.rows * kernels,
            mean=o.groups * self.mean_parts,
            norms=self.kernel_blocks * view.batch * o.groups * view.positions,
            products=norms.rows,
            columns=norms.sums,
        )

    def _divide(self, programs: int, tile: int, warps: int, stages: int) -> Division:
        positions = max(1, min(tile // self.view.kernel_block, triton.next_power_of_2(self.view.positions)))
        tiles = self.view.batch * cdiv(self.view.positions, positions)
        wanted = cdiv(programs_for(self.device, programs), self.columns)
        return Division(max(1, min(tiles, wanted)), positions, warps, stages)

    def launcher(self, kernel: Any, arguments: dict[str, Any], division: Division, before: Division) -> Launcher:
        """Return the launcher of a pass; before: the division of the pass that left the sums this one adds up."""
        bk = self.view.kernel_block
        sizes = {
            "norm_parts": before.programs,
            "BP": division.positions,
            "BR": max(1, _SUMMED // bk),
            "EVEN": self.view.positions % division.positions == 0 and self.view.kernels % bk == 0,
            "STAGES": division.stages,
        }
        grid = (division.programs, self.columns)
        return Launcher(kernel, grid, {**self.common, **arguments, **sizes}, division.warps)


def _slopes(choice: Choice, first: int) -> tuple[int, ...]:
    """Return the indices of the learned parameters' slopes among a formula's results; slopes start at `first`."""
    return tuple(first + choice.formula.learnable.index(name) for name in choice.learned)
