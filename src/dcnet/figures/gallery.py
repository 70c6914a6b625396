"""The figures by name, and what each is made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from dcnet.figures.explanations import explanations_figure
from dcnet.figures.features import features_figure
from dcnet.figures.functions import functions_figure
from dcnet.figures.geometry import geometry_figure
from dcnet.figures.layers import angles_figure, filters_figure
from dcnet.figures.response import response_figure
from dcnet.figures.robustness import Attacks, adversarial_figure, curves_figure, deepfool_figure
from dcnet.figures.training import convergence_figure, learned_figure
from dcnet.inspection import explained_examples, inspect_run
from dcnet.training import Run
from dcnet.util.suggest import nearest
from dcnet.util.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Kind:
    """A figure: what it shows, and what it needs of each run.

    That is "metrics", "inspection", "attacks", "contributions", "others" (contributions beside captum's methods), or ""
    where it needs no run.
    """

    shows: str
    needs: str
    make: "Callable[..., Figure]"


FIGURES = {
    "functions": Kind("all magnitude and angular functions", "", functions_figure),
    "geometry": Kind("what each operator does to vectors in the plane", "", geometry_figure),
    "response": Kind("outputs over the (‖x‖, θ) plane, and over a plane of inputs", "", response_figure),
    "convergence": Kind("training and test curves", "metrics", convergence_figure),
    "radius": Kind("learned radii (and k) by layer and epoch", "metrics", learned_figure),
    "filters": Kind("first-layer kernels and the cosines between them", "inspection", filters_figure),
    "angles": Kind("θ and ‖x‖ that each layer sees on test images", "inspection", angles_figure),
    "features": Kind("two-dimensional features of cnn6_2d by class", "inspection", features_figure),
    "adversarial": Kind("images, perturbations, predictions before and after", "inspection", adversarial_figure),
    "contributions": Kind("what each pixel adds to the logit, on test images", "contributions", explanations_figure),
    "explanations": Kind(
        "the same beside Grad-CAM and integrated gradients (pip install 'dcnet[explanations]')",
        "others",
        explanations_figure,
    ),
    "deepfool": Kind("sorted sizes of DeepFool's perturbations", "attacks", deepfool_figure),
    "curves": Kind("accuracy under PGD against ε, and against steps", "attacks", curves_figure),
}


def make_figure(name: str, runs: Sequence[str | Path] = (), data_root: str | Path = "data") -> "Figure":
    """Return the figure of that name, of those run folders; raise with what is missing where it cannot be made.

    Args:
        name: one of `dcnet.figures.FIGURES`.
        runs: run folders; none for a figure that is of no run.
        data_root: the folder of the data sets' official files, for figures that look at images.

    Returns:
        A figure of matplotlib, to show or to save with its `savefig`.

    Examples:
        >>> import dcnet
        >>> figure = dcnet.figures.make_figure("functions")
        >>> len(figure.axes)
        2
    """
    if name not in FIGURES:
        raise ValueError(f"unknown figure {name!r}.{nearest(name, FIGURES)} Known: {', '.join(FIGURES)}")
    kind = FIGURES[name]
    if not kind.needs:
        if runs:
            raise ValueError(f"the figure {name!r} is of no run; given: {', '.join(map(str, runs))}")
        return kind.make()
    if not runs:
        raise ValueError(f"the figure {name!r} needs one or more run folders: dcnet figure {name} runs/NAME …")
    found = [Run(folder) for folder in runs]
    parts: dict[str, Callable[[Run], Any]] = {
        "metrics": metrics_of,
        "attacks": attacks_of,
        "inspection": lambda run: inspect_run(run, data_root),
        "contributions": lambda run: explained_examples(run, data_root),
        "others": lambda run: explained_examples(run, data_root, others=True),
    }
    return kind.make({title: parts[kind.needs](run) for title, run in zip(titles_of(found), found, strict=True)})


def metrics_of(run: Run) -> list[dict[str, Any]]:
    """Return the run's epochs; raise where none is over yet.

    Args:
        run: the run.
    """
    if not run.metrics and run.restored:
        raise ValueError(f"{run.folder} has no metrics: it was made from a file of weights")
    if not run.metrics:
        raise ValueError(
            f"{run.folder} has no metrics: its first epoch is not over. Go on with: dcnet train --resume "
            f"{quote(str(run.folder))}"
        )
    return run.metrics


def attacks_of(run: Run) -> Attacks:
    """Return what `dcnet attack` found; raise where it never ran.

    Args:
        run: the run.
    """
    if not run.attacks:
        raise ValueError(f"{run.folder} was not attacked yet; run: dcnet attack {quote(str(run.folder))}")
    return run.attacks


def titles_of(runs: Sequence[Run]) -> list[str]:
    """Return a short name for each run: its folder's, with as many of the folders above as tell it from the others.

    Args:
        runs: the runs, whose titles are to differ.
    """
    paths = [run.folder.resolve().parts for run in runs]
    for depth in range(1, 5):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    else:
        names = [str(run.folder) for run in runs]
    titles: list[str] = []
    for name in map(printable, names):  # some of which may look the same then
        same = sum(title == name or title.startswith(f"{name} (") for title in titles)
        titles.append(name if not same else f"{name} ({same + 1})")
    return titles
