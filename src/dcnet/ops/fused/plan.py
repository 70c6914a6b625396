"""How the epilogue's kernels go over an output: tiles, and the arguments that stay the same from call to call."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton

from dcnet.formulas import Choice, angulars, magnitudes
from dcnet.ops.fused import backward_kernel, formulas, forward_kernel, statistics
from dcnet.ops.fused.launcher import Launcher, Place, aligned
from dcnet.ops.fused.layout import Sizes, View, cdiv
from dcnet.ops.inputs import RADIUS_FLOOR
from dcnet.ops.operator import Operator, make_operator

PROGRAMS, STAGES, TILE, WARPS = (
    3,
    3,
    2048,
    4,
)  # programs on each multiprocessor, tiles a program loads ahead, elements of a tile, its warps
_SUMMED = 8192  # numbers of other programs added up at once
_CHANNELS = 16  # of a program of `vector_gradients`


class ForwardFlags(NamedTuple):
    """What one launch of the forward kernel is to do; its last arguments, in their order."""

    mean_parts: int  # of how many sums E{‖x‖} is made
    tally: bool  # whether the kernel may count the batch, which only a single group can
    mean: int  # 0: no E{‖x‖}, 1: known, 2: to be added up
    track: int = 0  # its running average: 0 stays, 1 moves with the momentum, 2 is cumulative
    norm: int = 0  # BatchNorm: 0 none, 1 with its running averages, 2 with this batch's statistics
    has_gamma: bool = False
    has_beta: bool = False
    move: bool = False  # whether BatchNorm's running averages move
    residual: bool = False
    activation: int = 0
    statistics: bool = False  # only the sums for BatchNorm's statistics, and no output
    centre: bool = False  # whether there is a running mean to take them around
    energy: bool = False  # also ½·Σ of the output's squares over channels, for the layer that comes next


class GradientFlags(NamedTuple):
    """What one launch of the gradient kernel is to do."""

    affine: bool  # whether BatchNorm follows
    residual: bool
    activation: int
    reduce: bool  # only the sums for BatchNorm's gradient
    centred: bool  # whether BatchNorm took this batch's statistics, which have a gradient
    energy: bool  # whether ½·Σ of the output's squares has a gradient
    slope: bool  # whether the activation's slope is learned


class Plan:
    """The launchers for outputs of one shape, order and dtype, and one operator.

    there: which of factor, gain, radius and bias are there; their sums come in this order. radius: 1 for ρ, 2 for what is learned.
    mean: whether ρ is multiplied by E{‖x‖}.
    """

    def __init__(
        self,
        shape: Sizes,
        stride: Sizes,
        dtype: torch.dtype,
        device: torch.device,
        groups: int,
        operator: Operator,
        there: tuple[bool, ...],
        radius: int,
        mean: bool,
    ) -> None:
        self.channels, self.groups = shape[1], groups
        view = View(shape, stride, groups)
        self.count = view.batch * view.positions
        self.kernels = view.kernels
        bp, bk = view.blocks(TILE)
        self.kernel_blocks = cdiv(view.kernels, bk)
        self.columns = groups * self.kernel_blocks
        position_blocks = cdiv(view.positions, bp)
        self.tiles = view.batch * position_blocks
        # Programs share the tiles: enough of them to fill the device, few enough to add up what they leave.
        wanted = (
            PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        )
        self.programs = max(1, min(self.tiles, cdiv(wanted, self.columns)))

        h, g = operator.magnitude, operator.angular
        alpha_one = dict(operator.alpha_one) if operator.weighting == "separate" else {}
        count_h, fixed_h, rows_h = formulas.arguments(h, alpha_one, 0)
        count_g, fixed_g, rows_g = formulas.arguments(g, {}, len(h.learned))
        half = dtype != torch.float32
        of_h = (formulas.jit(h.formula, half), count_h, *fixed_h, *rows_h)
        of_g = (formulas.jit(g.formula, half), count_g, *fixed_g, *rows_g)
        sizes = (groups, view.kernels, view.positions, position_blocks, self.tiles, self.kernel_blocks)
        factor, gain, _, bias = there
        self.radius = (radius if h.formula.has_radius else 0, RADIUS_FLOOR)
        self.mean = mean
        even = view.positions % bp == 0 and view.kernels % bk == 0
        br = max(1, min(triton.next_power_of_2(self.programs), _SUMMED // bk))
        tile = (bp, bk, br, even, STAGES)
        self._arguments = (
            *sizes,
            *view.strides,
            *view.norm_strides,
            *of_h,
            *of_g,
            *self.radius,
            factor,
            gain,
            bias,
            *tile,
        )
        # where the slopes of the learned parameters stand among the results of h (three) and g (three), −1 for none
        places = (*_places(h, 2 + h.formula.has_radius), *_places(g, 2), len(h.learned))
        self.norms = view.batch * groups * view.positions
        self._gradient_arguments = (*self._arguments, self.norms, mean, *places)
        self.rows = sum(there) + len(operator.learned)
        self.radius_row = sum(there[:2]) if there[2] else -1
        # for `vector_gradients`: blocks of programs × channels
        self._small = (min(triton.next_power_of_2(self.programs), 256), _CHANNELS)
        self.mean_parts = self.parts(view.kernels)
        # Backward's scratch: BatchNorm's sums, the vectors' sums, the gradients of E{‖x‖} and of the norms.
        sizes_of = (
            3 * self.programs * self.channels,
            self.programs * self.rows * self.channels,
            groups * self.mean_parts,
        )
        self.reduced_at, self.sums_at, self.mean_at, self.norms_at = accumulate(map(aligned, sizes_of), initial=0)
        self.scratch = self.norms_at + aligned(self.kernel_blocks * self.norms)

    def forward_launcher(self, table: Sequence[Place], floats: tuple[float, ...], flags: ForwardFlags) -> Launcher:
        """The epilogue."""
        return Launcher(
            forward_kernel.forward,
            (self.programs, self.columns),
            table,
            (*floats, *self._arguments, self.norms, *flags),
            WARPS,
        )

    def backward_launcher(self, table: Sequence[Place], flags: GradientFlags) -> Launcher:
        """The epilogue's gradient."""
        reduced = 3 if flags.slope else 2
        rest = (*flags[:-1], reduced if flags.reduce else self.rows, reduced)
        fixed = (float(self.count), *self._gradient_arguments, *rest)
        return Launcher(backward_kernel.backward, (self.programs, self.columns), table, fixed, WARPS)

    @staticmethod
    def parts(kernels: int) -> int:
        """In how many parts the gradient of E{‖x‖} comes, for so many kernels of a group."""
        return cdiv(kernels, _CHANNELS)

    def vector_gradients_launcher(self, table: Sequence[Place]) -> Launcher:
        """The gradients of the vectors and of E{‖x‖}, out of the programs' sums."""
        fixed = (
            self.programs,
            self.kernels,
            self.channels,
            self.rows,
            self.radius_row,
            *self.radius,
            self.mean,
            *self._small,
        )
        return Launcher(statistics.vector_gradients, (self.groups, self.mean_parts), table, fixed)


def _places(choice: Choice, first: int) -> Sequence[int]:
    found = [first + choice.formula.learnable.index(name) for name in choice.learned]
    return found + [-1] * (formulas.MOST_PARAMETERS - len(found))


_OPERATORS: dict[tuple[str, str, str], Operator] = {}


def operator_named(magnitude: str, angular: str, weighting: str) -> Operator:
    """The operator of these names, parsed once as long as the formulas stay what they are."""
    key = (magnitude, angular, weighting)
    known = _OPERATORS.get(key)
    if (
        known is None
        or magnitudes().get(known.magnitude.name) is not known.magnitude.formula
        or angulars().get(known.angular.name) is not known.angular.formula
    ):
        known = _OPERATORS[key] = make_operator(magnitude, angular, weighting or None)
    return known
