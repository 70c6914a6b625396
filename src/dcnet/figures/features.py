"""Two-dimensional features of the test images, by class: the paper's pictures of MNIST."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dcnet.figures.style import BLACK, CLASSES, MARKERS, grid_of, hide, label, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_features(axis: "Axes", inspected: Mapping[str, Any], title: str = "") -> None:
    """Draw the features of a network that has two (`cnn6_2d`), and each class's name at its center.

    Args:
        axis: where to draw, an axis of matplotlib.
        inspected: what `dcnet.inspection.inspect_run` returns.
        title: of the axis.
    """
    if "features" not in inspected:
        raise ValueError(f"{title or 'this network'} has no two-dimensional features; train one with model=cnn6_2d")
    points, labels = np.asarray(inspected["features"]["points"]), np.asarray(inspected["features"]["labels"])
    classes = inspected["classes"]
    for number, name in enumerate(classes):
        mine = points[labels == number]
        if not len(mine):
            continue
        color = CLASSES[number % len(CLASSES)]
        marker = MARKERS[number // len(CLASSES) % len(MARKERS)]  # where there are more classes than colors
        across, up = mine.T
        axis.scatter(across, up, s=4.0, color=color, marker=marker, alpha=0.6, linewidths=0)
        # the name beside the center, away from the origin, where it hides no points
        center = mine.mean(axis=0)
        outwards = 12.0 * center / max(float(np.linalg.norm(center)), 1e-12)
        axis.plot(*center, marker="+", color="0.35", markersize=7)
        box = {"boxstyle": "circle,pad=0.12", "facecolor": "white", "edgecolor": color, "linewidth": 1.5}
        style: dict[str, Any] = {
            "ha": "center",
            "va": "center",
            "fontsize": 8,
            "fontweight": "bold",
            "color": BLACK,
            "bbox": box,
            "zorder": 3,
        }
        axis.annotate(name, center, xytext=outwards, textcoords="offset points", **style)
    axis.axhline(0.0, color="0.7", linewidth=0.6, zorder=0)
    axis.axvline(0.0, color="0.7", linewidth=0.6, zorder=0)
    axis.margins(0.12)  # room for the names
    axis.set(title=title, xlabel="feature 1", ylabel="feature 2", aspect="equal", adjustable="datalim")


def features_figure(runs: Mapping[str, Mapping[str, Any]]) -> "Figure":
    """Return the features of several runs side by side."""
    rows, columns = grid_of(len(runs))
    figure, axes = new_figure(rows, columns, 3.4, 3.4)
    cells = [axis for row in axes for axis in row]
    for axis, (name, inspected) in zip(cells, runs.items(), strict=False):
        draw_features(axis, inspected, label(name))
    hide(cells[len(runs) :])
    return figure
