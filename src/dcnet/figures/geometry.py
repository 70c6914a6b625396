"""What each operator does to vectors in the plane: the paper's geometric figure."""

import math
from typing import TYPE_CHECKING

import torch

from dcnet.figures.style import COLORS, grid_of, hide, new_figure
from dcnet.formulas import choose, magnitudes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_geometry(axis: "Axes", magnitude: str, rho: float = 1.0) -> None:
    """Draw input vectors x and what the operator makes of them: the same direction, the length h(‖x‖).

    Args:
        axis: where to draw, an axis of matplotlib.
        magnitude: the function h, by name, with parameters as in "seg:beta=0.2".
        rho: the radius, where the function has one.
    """
    choice = choose("magnitude", magnitude)
    angles = torch.arange(12, dtype=torch.float64) * (2.0 * math.pi / 12)
    lengths = torch.tensor([0.6, 1.2, 2.0], dtype=torch.float64)
    n, angle = (part.flatten() for part in torch.meshgrid(lengths, angles, indexing="ij"))
    h = torch.as_tensor(choice(n, torch.full_like(n, rho))[0], dtype=n.dtype).expand_as(n)
    direction = torch.stack([angle.cos(), angle.sin()])
    before, after = (n * direction).numpy(), (h * direction).numpy()
    axis.quiver(
        *before,
        *(after - before),
        angles="xy",
        scale_units="xy",
        scale=1.0,
        color="0.6",
        width=0.005,
        headwidth=5,
        zorder=1,
    )
    axis.plot(
        *before, linestyle="none", marker="o", markerfacecolor="none", markeredgecolor=COLORS[2], label="x", zorder=2
    )
    axis.plot(*after, linestyle="none", marker="^", markersize=5, color=COLORS[1], label="projected", zorder=3)
    circle = torch.linspace(0.0, 2.0 * math.pi, 201, dtype=torch.float64)
    if choice.formula.has_radius:
        axis.plot(rho * circle.cos(), rho * circle.sin(), color="0.35", linestyle="--", linewidth=1.0, label="‖x‖ = ρ")
    axis.plot(0.0, 0.0, marker="+", color="0.35")
    reach = 1.1 * max(float(n.max()), float(h.max()))
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", title=str(magnitude), xlabel="x₁", ylabel="x₂")


def geometry_figure(rho: float = 1.0) -> "Figure":
    """Draw all magnitudes of the catalogue, each on its own axis."""
    names = list(magnitudes())
    rows, columns = grid_of(len(names) + 1)
    figure, axes = new_figure(rows, columns, 2.8, 2.9)
    cells = [axis for row in axes for axis in row]
    for axis, name in zip(cells, names, strict=False):
        draw_geometry(axis, name, rho)
    hide(cells[len(names) :])
    with_radius = next(
        (axis for axis, name in zip(cells, names, strict=False) if magnitudes()[name].has_radius), cells[0]
    )
    cells[len(names)].legend(*with_radius.get_legend_handles_labels(), loc="center", frameon=False, fontsize=12)
    return figure
