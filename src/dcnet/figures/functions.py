"""The curves of every magnitude and angular function in the catalogue, a user's own included."""

import math
from typing import Any

import torch
from torch import Tensor

from dcnet.figures.style import line_styles, new_figure, theta_ticks
from dcnet.formulas import Formula, angulars, choose, magnitudes


def _draw(axis: Any, formulas: list[Formula], x: Tensor, argument: Tensor, rho: float) -> None:
    # thick below thin, so that curves which coincide (square_cosine is power_cosine with p = 2) stay visible
    widths = torch.linspace(3.4, 1.4, len(formulas)).tolist()
    for formula, width, style in zip(formulas, widths, line_styles(), strict=False):
        value = choose(formula.kind, formula)(argument, torch.full_like(argument, rho))[0]
        y = torch.as_tensor(value, dtype=argument.dtype).expand_as(argument)
        axis.plot(x.numpy(), y.numpy(), **style, linewidth=width, label=formula.name)


def draw_magnitudes(axis: Any, rho: float = 1.0) -> None:
    """Draws h over ‖x‖ for every magnitude, with its default parameters and radius `rho`."""
    if not 0.0 < rho < math.inf:
        raise ValueError(f"rho={rho}; a radius is a positive number")
    n = torch.linspace(0.0, 3.0 * rho, 301, dtype=torch.float64)
    _draw(axis, list(magnitudes().values()), n, n, rho)
    axis.set(xlabel="‖x‖", ylabel="h(‖x‖)", title=f"Magnitude functions (ρ = {rho:g})", xlim=(0.0, 3.0 * rho), ylim=(0.0, None))
    axis.legend(frameon=False)
    axis.grid(alpha=0.25)


def draw_angulars(axis: Any) -> None:
    """Draws g over θ for every angular function, with its default parameters."""
    theta = torch.linspace(0.0, torch.pi, 301, dtype=torch.float64)
    _draw(axis, list(angulars().values()), theta, theta.cos(), 1.0)
    axis.set(xlabel="θ", ylabel="g(θ)", title="Angular functions", xlim=(0.0, torch.pi))
    theta_ticks(axis)
    axis.legend(frameon=False)
    axis.grid(alpha=0.25)


def functions_figure() -> Any:
    """A figure with both catalogues side by side."""
    figure, ((left, right),) = new_figure(1, 2, 5.0, 4.0)
    draw_magnitudes(left)
    draw_angulars(right)
    return figure
