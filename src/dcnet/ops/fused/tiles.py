"""How the epilogue's kernels divide an output: tiles, programs, the arguments they share, scratch memory."""

from typing import Any

import torch
import triton
from torch import Tensor

from dcnet.formulas import Choice
from dcnet.ops.activations import ACTIVATIONS, FUNCTIONS
from dcnet.ops.fused import formulas
from dcnet.ops.fused.layout import Regions, View, cdiv, power_of_two_in
from dcnet.ops.fused.norm_plan import NormPlan
from dcnet.ops.fused.operands import Options
from dcnet.ops.inputs import RADIUS_FLOOR

PROGRAMS = 3  # for each multiprocessor
STAGES = 3  # how many tiles a program loads ahead
TILE = 2048  # elements of a tile
_SUMMED = 8192  # how many numbers of other programs are added at once
CHANNELS = 16  # for each program of `vector_gradients`


def mean_parts(kernels: int) -> int:
    """Return the number of parts of the gradient of E{‖x‖}, given the number of kernels of a group."""
    return cdiv(kernels, CHANNELS)


class Tiles:
    """The division of an output in the memory order of `dot`; has: which operands are there."""

    def __init__(self, dot: Tensor, has: dict[str, bool], norms: NormPlan, o: Options) -> None:
        operator, kernels, depthwise = o.operator, dot.shape[1], norms.depthwise
        groups = 1 if depthwise else o.groups  # there, a tile is of several groups
        view = View(dot.shape, dot.stride(), groups)
        bp, bk = view.blocks(TILE)
        columns = groups * cdiv(view.kernels, bk)
        self.kernel_blocks = 1 if depthwise else cdiv(view.kernels, bk)  # in which a group's kernels are divided
        self.count = view.batch * view.positions
        unit = power_of_two_in(view.kernels)
        # Programs share the tiles: enough programs to fill the device, few enough that adding up their sums is quick.
        cuda = dot.device.type == "cuda"
        wanted = PROGRAMS * torch.cuda.get_device_properties(dot.device).multi_processor_count if cuda else 2
        self.programs = max(1, min(view.batch * cdiv(view.positions, bp), cdiv(wanted, columns)))
        self.grid = (self.programs, columns)

        h, g = operator.magnitude, operator.angular
        alpha_one = dict(operator.alpha_one) if operator.weighting == "separate" else {}
        half = dot.dtype != torch.float32
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
            "BP": bp,
            "BK": bk,
            "BR": max(1, min(triton.next_power_of_2(self.programs), _SUMMED // bk)),
            "EVEN": view.positions % bp == 0 and view.kernels % bk == 0,
            "CHANNELS_LAST": view.channels_last,
            "STAGES": STAGES,
            "DEPTHWISE": depthwise,
        }
        self.slopes = {"H_SLOPES": _slopes(h, 2 + h.formula.has_radius), "G_SLOPES": _slopes(g, 2)}
        rows = [bool(operator.weighting), has["radius"], has["bias"], *[True] * len(operator.learned)]
        self.rows = sum(rows)
        self.radius_row = sum(rows[:1]) if has["radius"] else -1
        self.mean_parts = mean_parts(kernels // o.groups)
        # Forward's scratch: ½·Σ x² over channels, sums of norms, BatchNorm's sums
        of_norm = 2 * self.programs * kernels
        self.scratch = Regions(energies=norms.rows, norm_sums=o.groups * norms.programs, sums=of_norm)
        # Backward's: BatchNorm's sums, the vectors' sums, the gradients of E{‖x‖} and of the norms, the factors of x,
        # a depthwise layer's sums along columns
        self.back_scratch = Regions(
            reduced=3 * self.programs * kernels,
            sums=self.programs * self.rows * kernels,
            mean=o.groups * self.mean_parts,
            norms=self.kernel_blocks * view.batch * o.groups * view.positions,
            products=norms.rows,
            columns=norms.sums,
        )


def _slopes(choice: Choice, first: int) -> tuple[int, ...]:
    """Return the indices of the learned parameters' slopes among a formula's results; slopes start at `first`."""
    return tuple(first + choice.formula.learnable.index(name) for name in choice.learned)
