"""`dcnet evaluate`: accuracy of a trained network on the test images."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from dcnet.cli.common import DataRoot, Device, Download, RunArgument, described, fail, say, show_table
from dcnet.cli.own_formulas import Formulas, TrustFormulas, register
from dcnet.data import FOLDER
from dcnet.training import Run, autocast_of, change, joined, open_data, settings
from dcnet.training import evaluate as evaluate_model
from dcnet.training.checkpoint import load_state


def evaluate(
    run: RunArgument,
    data: Annotated[
        str | None, typer.Option(help="Another data set with the same classes and image size.", metavar="DATA")
    ] = None,
    data_root: DataRoot = Path("data"),
    download: Download = False,
    device: Device = None,
    formulas: Formulas = None,
    trust_formulas: TrustFormulas = False,
) -> None:
    """Accuracy and loss of a trained network on the test images, in all and by class."""
    try:
        register(formulas, [run] if trust_formulas else ())
        found = Run(run)
        shape = found.shape
        recipe = found.recipe
        if data is not None:  # only its test images are looked at
            folder = data.startswith(FOLDER)
            recipe = change(recipe, data=data, augment="none", image_size=shape["input_size"] if folder else None)
        with joined(device) as ranks, settings(recipe, ranks.device):
            source = open_data(recipe, ranks, data_root, download)
            theirs = {"num_classes": len(source.classes), "in_channels": source.channels, "input_size": source.size}
            if theirs != shape:
                raise ValueError(f"{run} was trained for {described(shape)}; {recipe.data} has {described(theirs)}")
            result = evaluate_model(found.model.to(ranks.device), source, ranks, autocast_of(recipe, ranks.device))
        unfinished = None if found.result is not None else load_state(found.checkpoint)["step"]
    except (ValueError, OSError, RuntimeError) as error:
        fail(error)
    if not ranks.first:
        return
    rows = []
    for name, count, right in zip(source.classes, result.counts.tolist(), result.correct.tolist(), strict=True):
        rows.append([name, count, right, f"{100 * right / max(1, count):.2f}%"])
    show_table(("class", "images", "right", "accuracy"), rows, f"{run} on {recipe.data}")
    total = int(result.counts.sum())
    say(f"accuracy {result.accuracy:.2f}% ({int(result.correct.sum())} of {total}), loss {result.loss:.4f}")
    if unfinished is not None:
        last = f"{recipe.steps} steps" if recipe.steps is not None else f"{recipe.epochs:g} epochs"
        say(
            f"{run} is unfinished: these are its weights after {unfinished} steps, of {last}. Go on with: dcnet train --resume {quote(str(run))}"
        )
