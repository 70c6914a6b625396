"""Test images of a run with what explains their classes: contributions, and other methods beside them."""

from pathlib import Path
from typing import Any

import torch

from dcnet.data import FOLDER
from dcnet.explaining import explain, grad_cam, integrated_gradients
from dcnet.inspection.examples import encoded
from dcnet.inspection.run import shared_data
from dcnet.training import Run

COUNT = 6


def explained_examples(run: Run, data_root: str | Path = "data", others: bool = False) -> dict[str, Any]:
    """Return the first test image of each of some classes, what the network predicts, and maps of why.

    The maps show which pixels speak for the predicted class.

    Args:
        run: the run, with its checkpoint.
        data_root: the folder of the data sets' official files.
        others: also with Grad-CAM and integrated gradients, for which captum must be installed.

    Returns:
        The names of the classes, and for each example the image as text, the prediction, and the maps.
    """
    if run.recipe.data.startswith(FOLDER):
        raise ValueError(
            f"{run.folder} was trained on {run.recipe.data}, which is too large to pick images from; "
            "use dcnet.explain on images of yours"
        )
    if not run.checkpoint.is_file():
        raise FileNotFoundError(f"{run.folder} has no checkpoint.safetensors, and so no network to explain")
    model, data = run.model, shared_data(run.recipe.data, str(data_root))
    labels = data.test.labels
    chosen = [int((labels == label).nonzero()[0]) for label in labels.unique().tolist()[:COUNT]]
    images, labels = data.test.images[chosen].float() / 255.0, labels[chosen]
    found = explain(model, images)
    maps = {"contributions": found.maps}
    if others:
        maps["Grad-CAM"] = grad_cam(model, images, found.target)
        maps["integrated\ngradients"] = integrated_gradients(model, images, found.target).sum(1)
    with torch.no_grad():
        confidence = model(images).softmax(1).gather(1, found.target[:, None]).squeeze(1)
    return {
        "classes": list(data.classes),
        "examples": [
            {
                "image": encoded(images[i]),
                "channels": images.shape[1],
                "size": images.shape[2],
                "label": int(labels[i]),
                "class": int(found.target[i]),
                "confidence": float(confidence[i]),
                "logit": float(found.logits[i]),
                "bias": float(found.bias[i]),
                "maps": {name: values[i].tolist() for name, values in maps.items()},
            }
            for i in range(len(images))
        ],
    }
