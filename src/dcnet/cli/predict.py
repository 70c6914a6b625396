"""`dcnet predict`: classify image files with a trained network."""

from pathlib import Path
from typing import Annotated

import typer

from dcnet.cli.common import AsJSON, Device, TrainedArgument, fail, say, show_json, show_table
from dcnet.cli.own_formulas import Formulas, TrustFormulas, register
from dcnet.training import Prediction, classes_of, open_trained, predict_run


def predict(
    run: TrainedArgument,
    images: Annotated[list[Path], typer.Argument(help="Image files.", metavar="IMAGES...")],
    top: Annotated[int, typer.Option(min=1, help="How many classes to show, the likeliest first.")] = 3,
    as_json: AsJSON = False,
    device: Device = None,
    formulas: Formulas = None,
    trust_formulas: TrustFormulas = False,
) -> None:
    """Classify image files with a trained network.

    They are converted to the run's size and channels, and the table says how.
    """
    try:
        register(formulas)
        found = open_trained(run, trust_formulas=trust_formulas)
        note = classes_of(found).note
        predictions = predict_run(found, images, top, device=device)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        fail(error)
    if note is not None:
        say(note, stderr=True)
    read = [prediction for prediction in predictions if prediction.error is None]
    unreadable = [prediction for prediction in predictions if prediction.error is not None]
    if as_json:
        entries = [_entry(prediction) for prediction in (*read, *unreadable)]
        show_json(entries)
    else:
        _show(run, read)
        for prediction in unreadable:
            say(f"error: {prediction.error}", stderr=True)
    if unreadable:
        raise typer.Exit(1)


def _entry(prediction: Prediction) -> dict[str, object]:
    if prediction.error is not None:
        return {"image": str(prediction.image), "error": prediction.error}
    ranked = [{"class": name, "probability": round(chance, 6)} for name, chance in prediction.top]
    return {
        "image": str(prediction.image),
        "prediction": prediction.top[0][0],
        "top": ranked,
        "converted": prediction.converted,
    }


def _show(run: Path, predictions: list[Prediction]) -> None:
    rows = []
    for image, ((name, chance), *others), converted, _ in predictions:
        rest = ", ".join(f"{other} {100 * p:.1f}%" for other, p in others)
        rows.append([str(image), name, f"{100 * chance:.1f}%", rest, converted or "as it is"])
    if rows:
        show_table(("image", "prediction", "probability", "then", "converted"), rows, str(run), right=("probability",))
