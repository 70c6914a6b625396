"""The curves of every magnitude and angular function in the catalogue, a user's own included."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dcnet.figures.style import line_styles, new_figure, theta_ticks
from dcnet.formulas import Formula, angulars, choose, magnitudes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SAME = 0.25  # of the axis: curves that coincide there are drawn as a band with a line on it


def _draw(axis: "Axes", formulas: list[Formula], x: Tensor, argument: Tensor, rho: float) -> None:
    values = [choose(formula.kind, formula)(argument, torch.full_like(argument, rho))[0] for formula in formulas]
    curves = [torch.as_tensor(value, dtype=argument.dtype).expand_as(argument) for value in values]
    shares = [[float((one - other).abs().lt(1e-6).double().mean()) for other in curves] for one in curves]
    # those with others on them: square_cosine is power_cosine with p = 2, relu_cosine is cosine in half of the range
    bands = [number for number in range(len(curves)) if any(share > _SAME for share in shares[number][number + 1 :])]
    for number, (formula, y, style) in enumerate(zip(formulas, curves, line_styles(), strict=False)):
        look: dict[str, Any] = {**style, "linewidth": 1.8}
        if number in bands:
            width = 4.0 + 3.0 * min(2, len(bands) - 1 - bands.index(number))  # bands lie on each other too
            look |= {"linestyle": "-", "linewidth": width, "alpha": 0.45, "solid_capstyle": "butt"}
        twin = next((formulas[other].name for other in range(number) if shares[number][other] == 1.0), None)
        axis.plot(x.numpy(), y.numpy(), **look, label=formula.name if twin is None else f"{formula.name} = {twin}")


def draw_magnitudes(axis: "Axes", rho: float = 1.0) -> None:
    """Draw h over ‖x‖ for every magnitude, with its default parameters and radius `rho`.

    Args:
        axis: where to draw, an axis of matplotlib.
        rho: the radius of those that have one.

    Examples:
        >>> import dcnet
        >>> from matplotlib.figure import Figure
        >>> axis = Figure().subplots()
        >>> dcnet.figures.draw_magnitudes(axis, rho=2.0)
        >>> axis.get_title()
        'Magnitude functions (ρ = 2)'
    """
    if not 0.0 < rho < math.inf:
        raise ValueError(f"rho={rho}; a radius is a positive number")
    n = torch.linspace(0.0, 3.0 * rho, 301, dtype=torch.float64)
    _draw(axis, list(magnitudes().values()), n, n, rho)
    axis.set(
        xlabel="‖x‖",
        ylabel="h(‖x‖)",
        title=f"Magnitude functions (ρ = {rho:g})",
        xlim=(0.0, 3.0 * rho),
        ylim=(0.0, None),
    )
    axis.legend(frameon=False)
    axis.grid(alpha=0.25)


def draw_angulars(axis: "Axes") -> None:
    """Draw g over θ for every angular function, with its default parameters.

    Args:
        axis: where to draw, an axis of matplotlib.
    """
    theta = torch.linspace(0.0, torch.pi, 301, dtype=torch.float64)
    _draw(axis, list(angulars().values()), theta, theta.cos(), 1.0)
    axis.set(xlabel="θ", ylabel="g(θ)", title="Angular functions", xlim=(0.0, torch.pi))
    theta_ticks(axis)
    axis.legend(frameon=False)
    axis.grid(alpha=0.25)


def functions_figure() -> "Figure":
    """Return a figure with both catalogues side by side."""
    figure, ((left, right),) = new_figure(1, 2, 5.0, 4.0)
    draw_magnitudes(left)
    draw_angulars(right)
    return figure
