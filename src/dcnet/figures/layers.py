"""A network seen from inside: its first kernels, and the angles and norms its layers see."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dcnet.figures.style import BLACK, SEQUENTIAL, SIGNED, label, new_figure, theta_ticks
from dcnet.inspection.layers import FARTHEST

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Inspected = Mapping[str, Any]  # what `inspect_run` gives


def filter_sheet(inspected: Inspected) -> np.ndarray:
    """Return the first layer's kernels side by side, each stretched to its own range, 0.5 for zero.

    The shape is (H, W, 3) where they see three channels, else (H, W, 1).

    Between those of one channel stands NaN.
    """
    kernels = np.asarray(inspected["filters"]["values"], dtype=float)
    color = kernels.shape[1] == 3
    if not color:
        kernels = kernels.mean(axis=1, keepdims=True)  # of several channels, their mean
    count, channels, height, width = kernels.shape
    most = np.abs(kernels).max(axis=(1, 2, 3), keepdims=True)
    tiles = 0.5 + 0.5 * kernels / np.where(most > 0, most, 1.0)
    rows, columns = _sheet_grid(count)
    sheet = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1, channels), 0.75 if color else np.nan)
    for number, tile in enumerate(tiles):
        top, left = (number // columns) * (height + 1) + 1, (number % columns) * (width + 1) + 1
        sheet[top : top + height, left : left + width] = tile.transpose(1, 2, 0)
    return sheet


def _sheet_grid(count: int) -> tuple[int, int]:
    """Return the rows and columns of a sheet that is about as wide as high.

    The last row is full where that is possible, else as full as can be.
    """
    ideal = math.sqrt(1.4 * count)
    candidates = range(max(1, math.ceil(ideal / 2)), math.floor(2 * ideal) + 1)
    columns = min(candidates, key=lambda width: (-count % width, abs(math.log(width / ideal))))
    return math.ceil(count / columns), columns


def filters_title(inspected: Inspected) -> str:
    return f"{len(inspected['filters']['values'])} kernels of {_short(inspected['filters']['name'])}"


def draw_filters(axis: "Axes", inspected: Inspected) -> None:
    """Draw the first layer's kernels as a grid.

    In color where they see three channels, else dark below zero and light above.

    Args:
        axis: where to draw, an axis of matplotlib.
        inspected: what `dcnet.inspection.inspect_run` returns.
    """
    axis.set_facecolor("0.75")  # between kernels
    axis.imshow(filter_sheet(inspected).squeeze(), cmap=SIGNED, vmin=0.0, vmax=1.0, interpolation="nearest")
    axis.set(title=filters_title(inspected), xticks=[], yticks=[])


def kernel_cosines(inspected: Inspected) -> np.ndarray:
    """Return the cosines between the first layer's kernels (kernels, kernels)."""
    kernels = np.asarray(inspected["filters"]["values"], dtype=float)
    flat = kernels.reshape(len(kernels), -1)
    unit = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)
    cosines: np.ndarray = unit @ unit.T
    return cosines


def cosines_title(cosines: np.ndarray) -> str:
    off = np.abs(cosines[~np.eye(len(cosines), dtype=bool)])
    return f"Cosines between kernels, mean |cos| off the diagonal {off.mean():.2f}" if len(off) else "One kernel"


def draw_correlation(axis: "Axes", inspected: Inspected) -> None:
    """Draw the cosines between the first layer's kernels: gray off the diagonal where they are orthogonal.

    Args:
        axis: where to draw, an axis of matplotlib.
        inspected: what `dcnet.inspection.inspect_run` returns.
    """
    cosines = kernel_cosines(inspected)
    image = axis.imshow(cosines, cmap=SIGNED, vmin=-1.0, vmax=1.0, interpolation="nearest")
    axis.figure.colorbar(image, ax=axis, shrink=0.8, label="cosine")
    axis.set_title(
        cosines_title(cosines).replace(", ", "\n", 1), fontsize=10
    )  # in one line it would be wider than the axis
    axis.set(xlabel="kernel", ylabel="kernel")


def draw_angles(axis: "Axes", inspected: Inspected, bar: bool = True) -> None:
    """Draw how often each layer sees which θ between patches and kernels, a row for each layer, the first on top.

    Args:
        axis: where to draw, an axis of matplotlib.
        inspected: what `dcnet.inspection.inspect_run` returns.
        bar: whether to add a color bar.
    """
    _draw_histograms(axis, inspected, "theta", math.pi, bar)
    axis.axvline(math.pi / 2, color="white", linestyle="--", linewidth=1.0)
    axis.set(xlabel="θ", title="Angles between patches and kernels")
    theta_ticks(axis)


def draw_norms(axis: "Axes", inspected: Inspected, bar: bool = True) -> None:
    """Draw how often each layer sees which ‖x‖, in units of its mean.

    Bars span the radii of its kernels, least to greatest, with the median.

    An arrow stands where the greatest is beyond the end of the axis. What the bars are is said below the axis, in lines
    of its own.

    Args:
        axis: where to draw, an axis of matplotlib.
        inspected: what `dcnet.inspection.inspect_run` returns.
        bar: whether to add a color bar.
    """
    _draw_histograms(axis, inspected, "norm", FARTHEST, bar)
    radii = {row: layer["radius"] for row, layer in enumerate(inspected["layers"]) if "radius" in layer}
    rows, beyond = list(radii), [row for row, radius in radii.items() if radius[-1] > FARTHEST]
    if radii:
        least, _, middle, _, most = np.minimum(np.asarray(list(radii.values())), FARTHEST).T
        for color, width in ((BLACK, 4.0), ("white", 1.5)):  # to be seen on dark and on light
            axis.hlines(rows, least, most, color=color, linewidth=width)
            axis.plot(middle, rows, color=color, linestyle="none", marker="|", markersize=9, markeredgewidth=width)
            axis.plot(
                [0.985 * FARTHEST] * len(beyond),
                beyond,
                color=color,
                linestyle="none",
                marker=">",
                markersize=3.0 + width,
                markeredgewidth=0,
            )
    farther = f"; ▸ beyond {FARTHEST:g}" if beyond else ""
    bars = f"\nbars: radii of the layer's kernels,\nleast | median | greatest{farther}" if radii else ""
    axis.set(xlabel=f"‖x‖ / E{{‖x‖}}{bars}", title="Norms of patches", xlim=(0.0, FARTHEST))


def _draw_histograms(axis: "Axes", inspected: Inspected, what: str, high: float, bar: bool) -> None:
    layers = inspected["layers"]
    counts = np.asarray([layer[what] for layer in layers], dtype=float)
    relative = counts / np.maximum(counts.max(axis=1, keepdims=True), 1.0)  # layers differ too much for one scale
    image = axis.imshow(
        relative, cmap=SEQUENTIAL, aspect="auto", interpolation="nearest", extent=(0.0, high, len(layers) - 0.5, -0.5)
    )
    if bar:
        axis.figure.colorbar(image, ax=axis, shrink=0.8, label="frequency, highest = 1")
    step = max(1, len(layers) // 12)
    axis.set_yticks(range(0, len(layers), step), [_short(layer["name"]) for layer in layers[::step]], fontsize=8)


def _short(name: str) -> str:
    return name.removesuffix(".conv")


def filters_figure(runs: Mapping[str, Inspected]) -> "Figure":
    """Draw kernels and their cosines, a row for each run."""
    figure, axes = new_figure(len(runs), 2, 4.6, 3.4)
    for (left, right), (name, inspected) in zip(axes, runs.items(), strict=True):
        draw_filters(left, inspected)
        draw_correlation(right, inspected)
        left.set_ylabel(label(name))
    return figure


def angles_figure(runs: Mapping[str, Inspected]) -> "Figure":
    """Draw angles and norms by layer, a row for each run."""
    figure, axes = new_figure(len(runs), 2, 5.2, 3.4)
    for (left, right), (name, inspected) in zip(axes, runs.items(), strict=True):
        draw_angles(left, inspected)
        draw_norms(right, inspected)
        left.set_ylabel(label(name))
    return figure
