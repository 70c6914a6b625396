"""Launchers of the kernels of depthwise convolutions, whose channels lie next to each other in memory."""

import math
from typing import Any

import torch
import triton

from dcnet.ops.fused.kernels import depthwise
from dcnet.ops.fused.launcher import Launcher
from dcnet.ops.fused.layout import Sizes, cdiv, power_of_two_in, programs_for
from dcnet.ops.fused.norm_plan import SHORT, KernelPlan, NormPlan, Places
from dcnet.ops.fused.operands import Options

_TILE = 2048  # elements
_WARPS = 4
_PROGRAMS = 6  # of `windows` per multiprocessor: few, so that adding up their sums is fast


class DepthwisePlan(NormPlan):
    """Makes the launchers that compute dot products and patch norms together, and the gradient of x from both."""

    depthwise = True

    def __init__(self, shape: Sizes, strides: Sizes, kernel: Sizes, o: Options, device: torch.device) -> None:
        super().__init__(shape, strides, kernel, o)
        channels = shape[1]
        # the widest block that wastes little; memory is read in units of 16 channels
        blocks = {bc: cdiv(channels, bc) for bc in (64, 32, 16)}
        bc = next((bc for bc, count in blocks.items() if count * bc <= 1.25 * channels), 16)
        bc = min(bc, triton.next_power_of_2(channels))
        unit = power_of_two_in(channels)
        self.columns = cdiv(channels, bc)
        self.shared = {"units": channels // unit, "UNIT": unit, "BP": _TILE // bc, "BC": bc}
        wanted = cdiv(programs_for(device, _PROGRAMS), self.columns)
        self.programs = max(1, min(cdiv(self.count, _TILE // bc), wanted))
        self.rows = 0  # it needs no map of ½·x²
        window = self.window
        self.sums = channels * shape[0] * window["ID"] * window["IH"] * window["OW"]

    def _launcher(self, kernel: Any, places: Places, total: int, programs: int | None = None, **more: Any) -> Launcher:
        most = max(self.count * self.shape[1], self.sums, math.prod(self.shape))
        known = {**places, **more, **self.shared, **self.window, "total": total, "LONG": most > SHORT}
        grid = (programs or cdiv(total, self.shared["BP"]), self.columns)
        return Launcher(kernel, grid, {name: known[name] for name in kernel.arg_names}, _WARPS)

    def forward(self, at: Places, maps: int, kernels: KernelPlan) -> list[Launcher]:
        """Return the launchers for normalized kernels, and for dot products and norms."""
        return [kernels.forward(), *self.windows(at)]

    def windows(self, at: Places) -> list[Launcher]:
        """Return the launcher for dot products and norms."""
        if not self.count:
            return []
        slots = {"x_ptr": "x", "unit_ptr": "unit", "d_ptr": "dot", "n_ptr": "norms", "sums_ptr": "sums"}
        places = {name: at[slot] for name, slot in slots.items()}
        return [self._launcher(depthwise.windows, places, self.count, self.programs, eps=self.eps)]

    def backward(
        self, at: Places, kernels: KernelPlan, maps: int, means: int, share: float, add: bool, want_weight: bool
    ) -> list[Launcher]:
        """Return the launchers for the whole gradient of x: the norms' part along columns, then the rest."""
        assert add
        of_weight = [kernels.backward()] if want_weight else []
        positions = self.shape[0] * math.prod(self.shape[2:])
        if not self.count or not positions:
            return of_weight
        slots = {"of_norms": "of_norms", "n_ptr": "norms", "e_mean": "of_mean", "sum_ptr": "columns"}
        slots |= {"grad_ptr": "grad_x", "x_ptr": "x", "unit_ptr": "unit", "grad_d": "grad_d"}
        places = {name: at[slot] for name, slot in slots.items()}
        return [
            self._launcher(depthwise.sum_columns, places, self.sums // self.shape[1], share=share),
            self._launcher(depthwise.input_gradient, places, positions),
            *of_weight,
        ]
