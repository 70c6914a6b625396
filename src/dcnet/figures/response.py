"""The output of an operator: over the (‖x‖, θ) plane, and over a plane of inputs."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dcnet.figures.style import DIVERGING, new_figure, theta_ticks
from dcnet.ops import decoupled_linear

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# beside the convolution's own product, a bounded operator, a soft one, an unbounded one, and one with another angle
OPERATORS = (
    ("linear", "cosine"),
    ("sphere", "cosine"),
    ("tanh", "cosine"),
    ("seg", "square_cosine"),
    ("tanh", "sigmoid"),
)


def _outputs(x: Tensor, w: Tensor, magnitude: str, angular: str) -> Tensor:
    """Return the operator itself, for vectors x (…, 2) and a kernel w (2,)."""
    return decoupled_linear(x, w[None], magnitude=magnitude, angular=angular, eps=0.0).squeeze(-1)


def _image(axis: "Axes", values: Tensor, extent: tuple[float, float, float, float], across: Tensor, up: Tensor) -> None:
    most = float(values.abs().max()) or 1.0
    image = axis.imshow(
        values.numpy(),
        origin="lower",
        extent=extent,
        aspect="auto",
        cmap=DIVERGING,
        vmin=-most,
        vmax=most,
        interpolation="none",
    )
    levels = [level for level in torch.linspace(-most, most, 9).tolist() if abs(level) > 1e-9]
    # dashed where negative: in gray print the colors of both signs look alike
    axis.contour(
        across.numpy(),
        up.numpy(),
        values.numpy(),
        levels=levels,
        colors="0.25",
        linewidths=0.6,
        negative_linestyles="dashed",
    )
    bar = axis.figure.colorbar(image, ax=axis, shrink=0.85, ticks=[-most, -most / 2, 0.0, most / 2, most], format=_tick)
    bar.ax.tick_params(labelsize=9)
    bar.ax.set_title("f", fontsize=10, pad=5)  # above: beside the numbers it would have to be small, and turned


def _tick(value: float, _: int | None = None) -> str:
    """Return a number as short as a color bar has room for: 0.5, not 0.4976."""
    return f"{value:.2g}".replace("-", "−")


def draw_response(axis: "Axes", magnitude: str, angular: str = "cosine", farthest: float = 3.0) -> None:
    """Draw the output over ‖x‖ and θ, with radius 1.

    Args:
        axis: where to draw, an axis of matplotlib.
        magnitude: the function h, by name, with parameters as in "seg:beta=0.2".
        angular: the function g, likewise.
        farthest: the largest ‖x‖.
    """
    n = torch.linspace(0.0, farthest, 151, dtype=torch.float64)
    theta = torch.linspace(0.0, math.pi, 151, dtype=torch.float64)
    x = n[None, :, None] * torch.stack([theta.cos(), theta.sin()], 1)[:, None]
    values = _outputs(x, torch.tensor([1.0, 0.0], dtype=torch.float64), magnitude, angular)
    _image(axis, values, (0.0, farthest, 0.0, math.pi), n, theta)
    axis.set(xlabel="‖x‖", ylabel="θ", title=f"{magnitude} + {angular}")
    theta_ticks(axis, "y")


def draw_plane(
    axis: "Axes",
    magnitude: str,
    angular: str = "cosine",
    kernel: tuple[float, float] = (0.8, 0.6),
    farthest: float = 3.0,
) -> None:
    """Draw the output over a plane of inputs, for a kernel in that plane, with radius 1.

    Args:
        axis: where to draw, an axis of matplotlib.
        magnitude: the function h, by name, with parameters as in "seg:beta=0.2".
        angular: the function g, likewise.
        kernel: the kernel w.
        farthest: the largest coordinate of x.
    """
    along = torch.linspace(-farthest, farthest, 201, dtype=torch.float64)
    x = torch.stack(torch.meshgrid(along, along, indexing="xy"), -1)
    w = torch.tensor(kernel, dtype=torch.float64)
    _image(axis, _outputs(x, w, magnitude, angular), (-farthest, farthest, -farthest, farthest), along, along)
    axis.annotate("", xy=kernel, xytext=(0.0, 0.0), arrowprops={"arrowstyle": "->", "linewidth": 2.0, "color": "black"})
    axis.text(
        1.25 * kernel[0],
        1.25 * kernel[1],
        "w",
        ha="center",
        va="center",
        fontweight="bold",
        bbox={"facecolor": "white", "alpha": 0.7, "lw": 0},
    )
    axis.set(xlabel="x₁", ylabel="x₂", title=f"{magnitude} + {angular}", aspect="equal")


def response_figure(operators: Sequence[tuple[str, str]] = OPERATORS) -> "Figure":
    """Draw both pictures for some operators, one below the other."""
    figure, axes = new_figure(2, len(operators), 3.3, 2.9)
    for column, (magnitude, angular) in enumerate(operators):
        draw_response(axes[0][column], magnitude, angular)
        draw_plane(axes[1][column], magnitude, angular)
    return figure
