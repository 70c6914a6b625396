"""What all figures share: colors, line styles, sizes."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colors: distinct for the color-blind; the line styles and markers keep them apart in gray print.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (7, 2)), (0, (1, 1)))
# Petroff's ten colors, as distinct as ten can be for the color-blind; where they stand for classes, each is also named
# in place.
CLASSES = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd")
MARKERS = ("o", "s", "^", "D", "v")
BLACK = "#010101"  # where it must stay black: a report on a dark page turns black itself light
DIVERGING = "RdBu_r"  # for signed values, zero in white
SEQUENTIAL = "cividis"  # its lightness rises all the way, so that gray print keeps it
SIGNED = (
    SEQUENTIAL  # for signed values in pictures too small for contours: its middle is gray, so lightness keeps the sign
)
_LONGEST = 32  # characters of a run's name in a legend


def line_styles() -> Iterator[dict[str, Any]]:
    """Yield color and line style for one curve after the other; 49 of them differ."""
    for number in count():
        yield {"color": COLORS[number % 7], "linestyle": STYLES[(number + number // 7) % 7]}


def dots() -> Iterator[str]:
    """Yield markers for curves that are a single point; with the colors of `line_styles`, 35 of them differ."""
    for number in count():
        yield MARKERS[(number + number // 7) % len(MARKERS)]


def add_legend(axis: "Axes") -> None:
    """Add a legend: among the curves if they are few, else in two columns below the axis."""
    if room_below(len(axis.get_legend_handles_labels()[1])) == 0.0:
        axis.legend(frameon=False, fontsize=8)
    else:
        axis.legend(frameon=False, fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.45, -0.17))


def room_below(entries: int) -> float:
    """Return the inches that `add_legend` needs below the axis and its label for this many entries."""
    return 0.0 if entries <= 8 else 0.15 + 0.15 * math.ceil(entries / 2)


def labels(names: Iterable[str]) -> dict[str, str]:
    """Return for each of several runs' names what a legend shows: of long ones what tells them apart.

    Names are made of words with hyphens between them; those that all names begin or end with are left out.
    """
    words = {name: name.split("-") for name in names}
    if len(words) < 2 or max(map(len, words)) <= _LONGEST:
        return {name: label(name) for name in words}
    front = _shared(list(words.values()))
    rest = [parts[front:] for parts in words.values()]
    back = min(_shared([parts[::-1] for parts in rest]), *(len(parts) - 1 for parts in rest))
    if back < 0:  # one name begins with another
        return {name: label(name) for name in words}
    return {name: label("-".join(parts[front : len(parts) - back])) for name, parts in words.items()}


def _shared(lists: list[list[str]]) -> int:
    """Return how many entries all lists begin with."""
    return sum(1 for _ in takewhile(lambda entries: len(set(entries)) == 1, zip(*lists, strict=False)))


def label(name: str) -> str:
    """Return a run's name as matplotlib shows it; of a long one both ends.

    Dollars start no mathematics, and a name that starts with _ is not hidden.
    """
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST // 2]}…{name[-(_LONGEST // 2 - 1) :]}"
    return ("\u200b" if name.startswith("_") else "") + name.replace("$", r"\$")


def short(name: str) -> str:
    """Return a run's name in lines of a few characters, for the side of a small picture."""
    shown = label(name)
    return "\n".join(shown[i : i + 16] for i in range(0, len(shown), 16))


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple["Figure", list[list["Axes"]]]:
    """Return a figure, and its axes row by row, each of about that many inches."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [list(row) for row in axes]


def grid_of(count: int, most: int = 4) -> tuple[int, int]:
    """Return the rows and columns for this many panels."""
    columns = min(most, max(1, count))
    return max(1, math.ceil(count / columns)), columns


def hide(axes: Sequence["Axes"]) -> None:
    """Take away panels that nothing is drawn on."""
    for axis in axes:
        axis.set_axis_off()


def theta_ticks(axis: "Axes", which: str = "x") -> None:
    """Mark an axis with angles from 0 to π."""
    ticks = [0.0, math.pi / 4, math.pi / 2, 3 * math.pi / 4, math.pi]
    (axis.set_xticks if which == "x" else axis.set_yticks)(ticks, ["0", "π/4", "π/2", "3π/4", "π"])
