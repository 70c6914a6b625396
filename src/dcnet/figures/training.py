"""Training seen from outside: loss and accuracy by epoch, and how learned radii move."""

from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Any

from dcnet.figures.style import (
    SEQUENTIAL,
    STYLES,
    add_legend,
    dots,
    grid_of,
    hide,
    label,
    labels,
    line_styles,
    new_figure,
    room_below,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Metrics = list[dict[str, Any]]
_POINTS = 40  # epochs that are drawn of learned parameters
_BANDS = 4  # layers that have bands: more would lie on top of each other
_NAMES = 12  # layers that the legend names: of more, every second or third, as their colors follow their order


def draw_convergence(axis: "Axes", runs: Mapping[str, Metrics], what: str = "accuracy") -> None:
    """Draw "accuracy" (in percent) or "loss" by epoch: on the training images thin, on the test images thick.

    Args:
        axis: where to draw, an axis of matplotlib.
        runs: the epochs of each run by its name, as in `Run.metrics`.
        what: "accuracy" or "loss".
    """
    if what not in ("accuracy", "loss"):
        raise ValueError(f"unknown curve {what!r}; possible: accuracy, loss")
    shown_as = labels(runs)
    for (name, metrics), style, dot in zip(runs.items(), line_styles(), dots(), strict=False):
        tested = any(f"test_{what}" in entry for entry in metrics)
        for split, width, alpha in (("train", 1.0, 0.55), ("test", 2.2, 1.0)):
            points = [(entry["epoch"], entry[f"{split}_{what}"]) for entry in metrics if f"{split}_{what}" in entry]
            if points:
                marker: dict[str, Any] = {"marker": dot, "markersize": 5} if len(points) == 1 else {}
                shown = shown_as[name] if split == "test" or not tested else None
                axis.plot(*zip(*points, strict=True), **style, linewidth=width, alpha=alpha, label=shown, **marker)
    axis.set(
        xlabel="epoch",
        ylabel=f"{what}{' (%)' if what == 'accuracy' else ''}",
        title=f"{what.capitalize()}: test thick, training thin",
    )
    axis.grid(alpha=0.25)
    add_legend(axis)


def convergence_figure(runs: Mapping[str, Metrics]) -> "Figure":
    """Draw accuracy and loss of several runs side by side."""
    figure, ((left, right),) = new_figure(1, 2, 5.0, 4.0 + room_below(len(runs)))
    draw_convergence(left, runs, "accuracy")
    draw_convergence(right, runs, "loss")
    return figure


def draw_learned(
    axis: "Axes", metrics: Metrics, parameter: str = "radius", title: str | None = None, legend: bool = True
) -> None:
    """Draw the learned parameter of every layer by epoch: the median over its kernels.

    With few layers, a band shows the middle half of the kernels.

    The legend stands to the right of the axis.

    Args:
        axis: where to draw, an axis of matplotlib.
        metrics: the epochs of a run, as in `Run.metrics`.
        parameter: one of `learned_parameters(metrics)`.
        title: of the axis; by default the name of the parameter.
        legend: whether to name the layers.
    """
    import matplotlib

    entries = [entry for entry in metrics if parameter in entry.get("learned", {})]
    if not entries:
        raise ValueError(
            f"no learned {parameter} in these metrics; possible: "
            f"{', '.join(learned_parameters(metrics)) or 'nothing was learned'}"
        )
    entries = entries[: -1 : max(1, len(entries) // _POINTS)] + entries[-1:]
    layers = list(entries[0]["learned"][parameter])
    bands, step = len(layers) <= _BANDS, -(-len(layers) // _NAMES)
    colors = matplotlib.colormaps[SEQUENTIAL]
    epochs = [entry["epoch"] for entry in entries]
    for number, (name, style) in enumerate(zip(layers, cycle(STYLES), strict=False)):
        color = colors(0.3 + 0.6 * number / max(1, len(layers) - 1))  # neither end, to be seen on dark and on light
        low, middle, high = (
            [entry["learned"][parameter][name][quantile] for entry in entries] for quantile in (1, 2, 3)
        )
        if bands:
            axis.fill_between(epochs, low, high, color=color, alpha=0.15, linewidth=0)
        marker: dict[str, Any] = {"marker": "o", "markersize": 4} if len(epochs) == 1 else {}
        axis.plot(
            epochs,
            middle,
            color=color,
            linestyle=style,
            linewidth=1.8,
            label=name.removesuffix(".conv") if number % step == 0 else None,
            **marker,
        )
    unit = "radius ρ, in units of E{‖x‖}" if parameter == "radius" else parameter
    axis.set(
        xlabel="epoch", ylabel=unit, title=title or f"Learned {parameter}: median{', middle half' if bands else ''}"
    )
    axis.grid(alpha=0.25)
    if legend:
        axis.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def learned_parameters(metrics: Metrics) -> list[str]:
    """Return what a run has learned besides kernels: "radius", "k".

    Args:
        metrics: the epochs of a run, as in `Run.metrics`.
    """
    return list(dict.fromkeys(parameter for entry in metrics for parameter in entry.get("learned", {})))


def learned_figure(runs: Mapping[str, Metrics]) -> "Figure":
    """Return the learned radii (and parameters such as k) of several runs, a panel each."""
    panels = [(name, metrics, parameter) for name, metrics in runs.items() for parameter in learned_parameters(metrics)]
    without = [name for name, metrics in runs.items() if not learned_parameters(metrics)]
    if without:
        raise ValueError(
            f"the metrics of {', '.join(without)} have no learned radius: the operators with one are ball, tanh "
            "and seg with radius=learned "
            "(and runs recorded by older versions have none)",
        )
    rows, columns = grid_of(len(panels), 2)
    figure, axes = new_figure(rows, columns, 5.6, 3.6)
    cells = [axis for row in axes for axis in row]
    for axis, (name, metrics, parameter) in zip(cells, panels, strict=False):
        draw_learned(axis, metrics, parameter, f"{label(name)}: {parameter}")
    hide(cells[len(panels) :])
    return figure
