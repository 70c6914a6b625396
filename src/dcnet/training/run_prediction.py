"""Classify image files with a trained run: what `dcnet predict` does."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dcnet.data import FOLDER, class_names_of
from dcnet.data.folder import middle_crop, read_image, resized_to
from dcnet.training.hub import TrainedFile
from dcnet.training.ranks import joined
from dcnet.training.run import Run
from dcnet.training.settings import tf32

_BATCH = 100


class Prediction(NamedTuple):
    """A network's prediction for one image file.

    Attributes:
        image: the file.
        top: (class, probability), the likeliest first; empty if the file cannot be read.
        converted: how the image was made to fit the network; empty if it fits as it is.
        error: why the file cannot be read; None if it can.
    """

    image: Path
    top: tuple[tuple[str, float], ...] = ()
    converted: str = ""
    error: str | None = None


class Classes(NamedTuple):
    """The names of a run's classes; if they are only numbers, `note` says why."""

    names: tuple[str, ...]
    note: str | None


def predict_run(
    run: Run | TrainedFile, images: Sequence[str | Path], top: int = 3, *, device: str | None = None
) -> list[Prediction]:
    """Classify image files with a run's network.

    Args:
        run: the run, or what `open_trained` returns.
        images: image files; each is converted to the size and the channels of the run's data.
        top: how many classes to return for each image.
        device: "cpu" or "cuda"; by default the GPU if there is one.

    Returns:
        A prediction for each file, in order. A file that cannot be read has an `error` and no classes.
    """
    names = classes_of(run).names
    paths = [Path(path) for path in images]
    read = _read(paths, run.shape, run.recipe.data.startswith(FOLDER))
    readable = [image for image in read if not isinstance(image, str)]
    chances: list[Tensor] = []
    with joined(device) as ranks, tf32(False), torch.no_grad():
        model = run.model.to(ranks.device)
        for i in range(0, len(readable), _BATCH):
            pixels = torch.stack([pixels for pixels, _ in readable[i : i + _BATCH]]).to(ranks.device)
            chances += model(pixels.float() / 255.0).float().softmax(1).cpu()
    left = iter(chances)
    return [
        Prediction(path, error=image)
        if isinstance(image, str)
        else Prediction(path, _likeliest(next(left), names, top), image[1])
        for path, image in zip(paths, read, strict=True)
    ]


def classes_of(run: Run | TrainedFile) -> Classes:
    """Return the names of a run's classes as in training, or their numbers if the names are unknown."""
    names, count = run.classes or class_names_of(run.recipe.data), run.shape["num_classes"]
    if len(names) == count:
        return Classes(names, None)
    why = f"the names of the classes are not known here: {run.recipe.data} has {len(names)} of {count}"
    return Classes(tuple(str(number) for number in range(count)), f"{why}; their numbers are shown")


def _likeliest(chance: Tensor, names: Sequence[str], top: int) -> tuple[tuple[str, float], ...]:
    found = chance.topk(min(top, len(names)))
    return tuple((names[i], p) for p, i in zip(found.values.tolist(), found.indices.tolist(), strict=True))


def _read(paths: list[Path], shape: dict[str, int], cropped: bool) -> list[tuple[Tensor, str] | str]:
    """Return, for each file, pixels for the network and how they were converted, or why it cannot be read."""
    size, mode = shape["input_size"], "L" if shape["in_channels"] == 1 else "RGB"
    read: list[tuple[Tensor, str] | str] = []
    for path in paths:
        try:
            image, own = read_image(path, mode)
            how = [] if own == mode else [f"{own} to {'gray' if mode == 'L' else 'RGB'}"]
        except (OSError, ValueError) as error:
            reason = "it does not exist" if not path.exists() else "it is a folder" if path.is_dir() else str(error)
            read.append(f"{path} cannot be read as an image: {reason}")
            continue
        if cropped:  # as the test images of a folder are
            pixels = middle_crop(image, size)
            how.append(f"{image.width}×{image.height}, resized, middle {size}×{size}")
        elif image.size != (size, size):
            pixels = resized_to(image, size)
            how.append(f"resized from {image.width}×{image.height} to {size}×{size}")
        else:
            pixels = np.asarray(image)
        planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        read.append((torch.from_numpy(planes.copy()), "; ".join(how)))
    return read
