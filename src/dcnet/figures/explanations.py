"""What explains a class: the image, what its pixels add to the logit, and other methods beside it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dcnet.figures.style import SIGNED, hide, new_figure, short
from dcnet.inspection.examples import decoded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Explained = Mapping[str, Any]  # what `explained_examples` gives


def explanation_captions(example: Mapping[str, Any], classes: Sequence[str]) -> dict[str, str]:
    """Return the captions above the image and above its contributions.

    The first is the predicted class, with ✗ if it is wrong; the second shows the parts whose sum is the logit.

    Args:
        example: one of the examples that `dcnet.inspection.explained_examples` returns.
        classes: the names of the classes.
    """
    pixels = example["logit"] - example["bias"]
    wrong = "" if example["class"] == example["label"] else " ✗"
    return {
        "image": f"{classes[example['class']]}\n{100 * example['confidence']:.0f}%{wrong}",
        "contributions": f"pixels {pixels:+.1f}\nconstants {example['bias']:+.1f}",
    }


def draw_explanation(axes: Sequence["Axes"], example: Mapping[str, Any], classes: Sequence[str]) -> None:
    """Draw one image and its maps, one on each of the axes.

    Light pixels speak for the class, dark pixels against it; each map has its own range.

    Args:
        axes: axes of matplotlib, one for the image and one for each map.
        example: one of the examples that `dcnet.inspection.explained_examples` returns.
        classes: the names of the classes.
    """
    captions = explanation_captions(example, classes)
    picture = decoded(example["image"], example["channels"], example["size"]).numpy().transpose(1, 2, 0).clip(0.0, 1.0)
    axes[0].imshow(picture.squeeze(), cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
    for axis, (name, values) in zip(axes[1:], example["maps"].items(), strict=True):
        found = np.asarray(values)
        most = float(np.abs(found).max()) or 1.0
        axis.imshow(found, cmap=SIGNED, vmin=-most, vmax=most, interpolation="nearest")
        axis.set_title(captions.get(name, ""), fontsize=8)
    axes[0].set_title(captions["image"], fontsize=8)
    for axis in axes:
        axis.set(xticks=[], yticks=[])


def explanations_figure(runs: Mapping[str, Explained]) -> "Figure":
    """Return a figure with a column for each image; each run has a row of images and a row for each kind of map."""
    names = ["image", *next(iter(runs.values()))["examples"][0]["maps"]]
    count = max(len(explained["examples"]) for explained in runs.values())
    figure, axes = new_figure(len(names) * len(runs), count, 1.25, 1.45)
    for number, (run, explained) in enumerate(runs.items()):
        rows = axes[len(names) * number : len(names) * (number + 1)]
        for row, name in zip(rows, [f"{short(run)}\nimage", *names[1:]], strict=True):
            row[0].set_ylabel(name, fontsize=8)
            hide(row[len(explained["examples"]) :])
        for column, example in enumerate(explained["examples"]):
            draw_explanation([row[column] for row in rows], example, explained["classes"])
    return figure
