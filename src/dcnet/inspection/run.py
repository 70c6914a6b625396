"""The inspection of a run: `inspection.json` in its folder, made once for each checkpoint."""

import contextlib
import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dcnet.data import FOLDER, DataSet, load_data
from dcnet.inspection.examples import adversarial_examples
from dcnet.inspection.layers import filters_of, layer_statistics
from dcnet.models.cnn import CNN
from dcnet.robustness import EPS
from dcnet.training import Run
from dcnet.training.checkpoint import load_state
from dcnet.training.run import read_json
from dcnet.util.files import write_atomically

FILE = "inspection.json"
_VERSION = 1
_IMAGES = 32  # for the distributions of θ and ‖x‖; more take a wide network many seconds on a CPU, and change no curve
_ATTACKED = 16  # for adversarial examples
_POINTS = 1000  # features, where a plane shows them
_EPS_GRAY = 0.1  # for gray images, drawn in black and white, a change of 8/255 says little


def inspect_run(run: Run, data_root: str | Path = "data", eps: float | None = None) -> dict[str, Any]:
    """Return filters, θ and ‖x‖ by layer, adversarial examples, and 2-D features of the test images where there are.

    What the folder has of this checkpoint is read, not made again; a folder without a checkpoint may have it too.

    Args:
        run: the run.
        data_root: the folder of the data sets' official files.
        eps: the largest change of a pixel in the adversarial examples; by default 8/255, or 0.1 for gray images.
    """
    if run.recipe.data.startswith(FOLDER):
        raise ValueError(
            f"{run.folder} was trained on {run.recipe.data}, which is too large to be inspected as a whole"
        )
    path = run.folder / FILE
    if not run.checkpoint.is_file():
        if path.is_file():
            return _known(path)
        raise FileNotFoundError(f"{run.folder} has no checkpoint.safetensors, and so no network to inspect")
    state = load_state(run.checkpoint)
    with run.checkpoint.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if eps is None:
        eps = _EPS_GRAY if state["shape"]["in_channels"] == 1 else EPS
    key = {"version": _VERSION, "step": state["step"], "checkpoint": digest, "eps": eps}
    if path.is_file():
        with contextlib.suppress(ValueError):  # a damaged one is made again
            known = _known(path)
            if all(known.get(name) == value for name, value in key.items()):
                return known
    found = key | _inspected(run.model, shared_data(run.recipe.data, str(data_root)), eps)
    with contextlib.suppress(OSError):  # in a folder that cannot be written to it is made again next time
        write_atomically(path, (json.dumps(found, ensure_ascii=False) + "\n").encode())
    return found


def _known(path: Path) -> dict[str, Any]:
    known = read_json(path)
    if not isinstance(known, dict) or known.get("version") != _VERSION:
        raise ValueError(f"{path} is of another version; it can be made again from the run's checkpoint")
    return known


@lru_cache(maxsize=1)
def shared_data(name: str, root: str) -> DataSet:
    """Return the data set of that name, which several runs share."""
    return load_data(name, root)


def _inspected(model: nn.Module, data: DataSet, eps: float) -> dict[str, Any]:
    images, labels = data.test.images[:_IMAGES].float() / 255.0, data.test.labels[:_IMAGES]
    found: dict[str, Any] = {
        "classes": list(data.classes),
        "images": len(labels),
        "filters": filters_of(model),
        "layers": layer_statistics(model, images),
        "examples": adversarial_examples(model, images[:_ATTACKED], labels[:_ATTACKED], eps),
    }
    if isinstance(model, CNN) and model.head.in_features == 2:
        with torch.no_grad():
            points = [model.features(part.float() / 255.0) for part in data.test.images[:_POINTS].split(500)]
        found["features"] = {
            "points": [[float(f"{v:.5g}") for v in point] for point in torch.cat(points).tolist()],
            "labels": data.test.labels[:_POINTS].tolist(),
        }
    return found
