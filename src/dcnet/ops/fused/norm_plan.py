"""Launchers of the kernels before and after the convolution: normalized kernels, patch norms, and their gradients."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import triton

from dcnet.ops.fused.kernels import norms
from dcnet.ops.fused.launcher import Launcher, Place
from dcnet.ops.fused.layout import Sizes, View, cdiv
from dcnet.ops.fused.operands import Options, output_sizes

# positions and warps of each program of the box kernels; Triton's interpreter is faster with fewer programs
_BLOCK, _BOX_WARPS = 512 if triton.knobs.runtime.interpret else 128, 4
_KERNEL_BLOCK = 1024  # elements of a kernel read at once; a block for each size would mean more variants to compile
SHORT = 2**31 - 2**16  # what 32-bit indices reach
Places = Mapping[str, Place | None]


class KernelPlan:
    """Makes the launchers that normalize `count` kernels of `size` elements, and those of its gradient.

    forward and backward: where the two passes find their operands. taps_first: write the normalized kernels as
    (size, count).
    """

    def __init__(
        self, count: int, size: int, forward: Places, backward: Places, eps: float, taps_first: bool = False
    ) -> None:
        self.count = count
        order = {"unit_k": 1, "unit_i": count} if taps_first else {"unit_k": size, "unit_i": 1}
        self._forward = {**forward, "D": size, "eps": eps, **order}
        self._backward = {**backward, "D": size}

    def forward(self) -> Launcher:
        """Return the launcher that normalizes the kernels."""
        return Launcher(norms.normalize, (self.count,), {**self._forward, "BLOCK": _KERNEL_BLOCK})

    def backward(self) -> Launcher:
        """Return the launcher of the gradient of the weight."""
        return Launcher(norms.normalize_backward, (self.count,), {**self._backward, "BLOCK": _KERNEL_BLOCK})

    def forward_and_box(self, grid: tuple[int, int], arguments: Mapping[str, Any]) -> Launcher:
        """Return the launcher that computes patch norms too; grid: the programs for patch norms."""
        return self._beside(norms.normalize_and_box, grid, {**self._forward, **arguments})

    def backward_and_box(self, grid: tuple[int, int], arguments: Mapping[str, Any], want_weight: bool) -> Launcher:
        """Return the launcher that computes the gradient of the norms, and that of the weight if it is wanted."""
        own = self._backward if want_weight else dict.fromkeys(self._backward) | {"D": 0}
        return self._beside(norms.normalize_and_box_backward, grid, {**own, **arguments}, want_weight)

    def _beside(
        self, kernel: Any, grid: tuple[int, int], arguments: Mapping[str, Any], wanted: bool = True
    ) -> Launcher:
        programs, groups = grid
        kernel_programs = cdiv(self.count, groups) if wanted else 0
        own = {"K": self.count, "kernel_programs": kernel_programs, "KERNEL_BLOCK": _KERNEL_BLOCK}
        return Launcher(kernel, (kernel_programs + programs, groups), {**arguments, **own}, _BOX_WARPS)


class NormPlan:
    """Makes the launchers of patch norms for inputs of one shape and memory order."""

    depthwise = False
    sums = 0  # how many sums along columns a depthwise layer needs

    def __init__(self, shape: Sizes, strides: Sizes, kernel: Sizes, o: Options) -> None:
        self.groups, self.shape, self.eps = o.groups, shape, o.eps
        sizes = shape[2:]
        positions = output_sizes(sizes, kernel, o)
        self.output = (shape[0], o.groups, *positions)
        self.count = shape[0] * math.prod(positions)  # of the norms of one group
        self.view = View(shape, strides, o.groups)
        self.programs = cdiv(self.count, _BLOCK)
        self.rows = shape[0] * o.groups * math.prod(sizes)
        triples = {"I": (sizes, 1), "O": (positions, 1), "S": (o.stride, 1), "P": (o.padding, 0)}
        triples |= {"D": (o.dilation, 1), "K": (kernel, 1)}
        self.window = {"groups": o.groups}
        for letter, (values, missing) in triples.items():
            self.window |= zip((f"{letter}D", f"{letter}H", f"{letter}W"), _three(values, missing), strict=True)

    def _over_channels(self) -> dict[str, Any]:
        view = self.view
        bp, bc = view.channel_blocks()
        sizes = {"groups": self.groups, "C": view.kernels, "P": view.positions, "blocks": cdiv(view.positions, bp)}
        return {**sizes, **dict(zip(("x_b", "x_c", "x_p"), view.strides, strict=True)), "BP": bp, "BC": bc}

    def forward(self, at: Places, maps: int, kernels: KernelPlan) -> list[Launcher]:
        """Return the launchers for normalized kernels and patch norms.

        maps: the number of energy maps of x; 0 if its energy has to be computed first.
        """
        if not self.count:
            return [kernels.forward()]
        launchers = []
        if not maps:
            over = self._over_channels()
            places = {"x_ptr": at["x"], "q_ptr": at["energy"]}
            programs = self.view.batch * self.groups * over["blocks"]
            launchers.append(Launcher(norms.energies, (programs,), {**places, **over}))
        places = {"n_ptr": at["norms"], "q_ptr": at["energy"], "sums_ptr": at["sums"]}
        sizes = {"maps": maps or 1, "rows": self.rows, "total": self.count}
        fixed = {"LONG": self.count > SHORT, "BLOCK": _BLOCK}
        arguments = {**places, **self.window, **sizes, **fixed}
        return [*launchers, kernels.forward_and_box((self.programs, self.groups), arguments)]

    def backward(
        self, at: Places, kernels: KernelPlan, maps: int, means: int, share: float, add: bool, want_weight: bool
    ) -> list[Launcher]:
        """Return the launchers for the products t (N, groups, …), where x·t is a part of the gradient of x.

        They read the norms ‖x‖ and their gradient. The gradient is the sum of `maps` maps, plus a `share` of the
        gradient of E{‖x‖}, which is the same for every norm of a group, and is the sum of `means` numbers. add: whether
        to add x·t to the gradient of x. want_weight: whether to compute the gradient of the weight too.
        """
        total = self.shape[0] * math.prod(self.shape[2:])
        if not self.count or not math.prod(self.shape):
            return [kernels.backward()] if want_weight else []
        t = at["products"]
        places = {"n_ptr": at["norms"], "e_ptr": at["of_norms"], "e_mean": at["of_mean"], "t_ptr": t}
        sizes = {"share": share, "means": means, "maps": maps, "total": total, "rows": math.prod(self.output)}
        fixed = {"LONG": total > SHORT, "BLOCK": _BLOCK}
        arguments = {**places, **self.window, **sizes, **fixed}
        box = kernels.backward_and_box((cdiv(total, _BLOCK), self.groups), arguments, want_weight)
        if not add:
            return [box]
        over = self._over_channels()
        grid = (self.view.batch * self.groups * over["blocks"], cdiv(self.view.kernels, over["BC"]))
        places = {"grad_ptr": at["grad_x"], "x_ptr": at["x"], "t_ptr": t}
        return [box, Launcher(norms.add_product, grid, {**places, **over})]


def _three(values: Sequence[int], missing: int) -> list[int]:
    return [missing] * (3 - len(values)) + list(values)
