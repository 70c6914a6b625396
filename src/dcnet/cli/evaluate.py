"""`dcnet evaluate`: accuracy of a trained network on the test images."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from dcnet.cli.common import AsJSON, DataRoot, Device, Download, TrainedArgument, fail, say, show_json, show_table
from dcnet.cli.own_formulas import Formulas, TrustFormulas, register
from dcnet.training import Run, evaluate_run, joined, open_trained
from dcnet.util.text import count


def evaluate(
    run: TrainedArgument,
    data: Annotated[
        str | None,
        typer.Option("--data", help="Another data set with these classes and image size.", metavar="DATA"),
    ] = None,
    data_root: DataRoot = Path("data"),
    download: Download = False,
    as_json: AsJSON = False,
    device: Device = None,
    formulas: Formulas = None,
    trust_formulas: TrustFormulas = False,
) -> None:
    """Evaluate a trained network on the test images: accuracy and loss, overall and by class."""
    try:
        register(formulas)
        found = open_trained(run, trust_formulas=trust_formulas)
        with joined(device) as ranks:
            result = evaluate_run(found, data, data_root=data_root, download=download, device=device)
    except (ValueError, OSError, RuntimeError) as error:
        fail(error)
    if not ranks.first:
        return
    classes = list(zip(result.classes, result.counts.tolist(), result.correct.tolist(), strict=True))
    if as_json:
        show_json(
            {
                "run": str(run),
                "data": result.data,
                "accuracy": result.accuracy,
                "top5_accuracy": result.top5_accuracy,
                "loss": result.loss,
                "unfinished_after": result.unfinished_after,
                "classes": [{"class": name, "images": count, "right": right} for name, count, right in classes],
            }
        )
        return
    rows = [[name, count, right, f"{100 * right / count:.2f}%" if count else ""] for name, count, right in classes]
    show_table(("class", "images", "right", "accuracy"), rows, f"{run} on {result.data}")
    total = int(result.counts.sum())
    say(f"accuracy {result.accuracy:.2f}% ({int(result.correct.sum())} of {total}), loss {result.loss:.4f}")
    if result.unfinished_after is not None:
        steps, epochs = found.recipe.steps, found.recipe.epochs
        length = count(steps, "step") if steps is not None else count(epochs, "epoch")
        restored = isinstance(found, Run) and found.restored
        done = count(result.unfinished_after, "step")
        more = "" if restored else f" Go on with: dcnet train --resume {quote(str(run))}"
        say(f"{run} is unfinished: these are its weights after {done}, of {length}.{more}")
