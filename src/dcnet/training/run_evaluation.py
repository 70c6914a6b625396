"""Evaluation of a trained run: what `dcnet evaluate` does."""

from dataclasses import dataclass
from pathlib import Path

from dcnet.data import FOLDER
from dcnet.training.checkpoint import load_state
from dcnet.training.evaluate import Evaluation, evaluate
from dcnet.training.hub import TrainedFile
from dcnet.training.ranks import joined
from dcnet.training.recipe import change
from dcnet.training.recipe_data import open_data
from dcnet.training.run import Run
from dcnet.training.settings import autocast_of, settings


@dataclass(frozen=True)
class RunEvaluation(Evaluation):
    """An evaluation of a run.

    Attributes:
        loss: the mean cross-entropy.
        counts: how many images there are of each class.
        correct: how many of these were right.
        correct5: how many labels were among the five largest logits.
        data: the data set.
        classes: the names of its classes.
        unfinished_after: for a run that is not finished, the step of its weights; else None.
    """

    data: str
    classes: tuple[str, ...]
    unfinished_after: int | None


def evaluate_run(
    run: Run | TrainedFile,
    data: str | None = None,
    *,
    data_root: str | Path = "data",
    download: bool = False,
    device: str | None = None,
) -> RunEvaluation:
    """Evaluate a run's network on the test images of its data set, or of another one.

    Args:
        run: the run, whose last checkpoint is evaluated, or the result of `open_trained`.
        data: another data set, with as many classes and images of the same shape.
        data_root: the folder of the data sets' official files.
        download: fetch missing files of the data set from its own site.
        device: "cpu" or "cuda"; by default the GPU if there is one.

    Returns:
        Loss, accuracy, and counts by class. Under torchrun each process takes its share, and all return the same.
    """
    shape, recipe = run.shape, run.recipe
    if data is not None:  # only its test images are used
        size = shape["input_size"] if data.startswith(FOLDER) else None
        recipe = change(recipe, data=data, augment="none", image_size=size)
    with joined(device) as ranks, settings(recipe, ranks.device):
        source = open_data(recipe, ranks, data_root, download)
        theirs = {"num_classes": len(source.classes), "in_channels": source.channels, "input_size": source.size}
        if theirs != shape:
            raise ValueError(
                f"{run.folder} was trained for {_described(shape)}; {recipe.data} has {_described(theirs)}"
            )
        folders = all(name.startswith(FOLDER) for name in (run.recipe.data, recipe.data))
        if run.classes and run.classes != tuple(source.classes) and (folders or data is None):
            here, there = next(pair for pair in zip(source.classes, run.classes, strict=True) if pair[0] != pair[1])
            raise ValueError(
                f"{run.folder} was trained on other classes than {recipe.data} has: {there!r} there, {here!r} here"
            )
        found = evaluate(run.model.to(ranks.device), source, ranks, autocast_of(recipe, ranks.device))
    step = int(load_state(run.checkpoint)["step"]) if isinstance(run, Run) and run.result is None else None
    return RunEvaluation(**vars(found), data=recipe.data, classes=tuple(source.classes), unfinished_after=step)


def _described(shape: dict[str, int]) -> str:
    """Describe the shape of data in words."""
    size = shape["input_size"]
    return f"{shape['num_classes']} classes and images of {shape['in_channels']}×{size}×{size}"
