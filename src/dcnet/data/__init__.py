"""Data sets: small ones in memory as bytes, augmented on the device; image folders, streamed by worker processes."""

from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from dcnet.data.folder import ImageFolder, class_names
from dcnet.data.official import OFFICIAL, MissingData, Progress, load
from dcnet.data.order import epoch_order
from dcnet.data.resident import AUGMENTATIONS, Resident
from dcnet.data.sets import DataSet, Split
from dcnet.util.suggest import nearest

NAMES = ("digits", *OFFICIAL)
FOLDER = "imagefolder:"


def load_data(
    name: str, root: str | Path = "data", download: bool = False, progress: Progress | None = None
) -> DataSet:
    """Return the data set of that name.

    `digits` comes with the package; all others are read from their official files under the root.
    """
    check_name(name)
    return _digits() if name == "digits" else load(name, Path(root), download, progress)


def check_name(name: str) -> None:
    """Raise unless there is a data set of that name."""
    if name not in NAMES:
        raise ValueError(f"unknown data set {name!r}.{nearest(name, NAMES)} Known: {', '.join(NAMES)}, {FOLDER}PATH")


def class_names_of(name: str) -> tuple[str, ...]:
    """Return the names of a data set's classes; none for an image folder that is not here."""
    if name.startswith(FOLDER):
        folder = Path(name.removeprefix(FOLDER)) / "train"
        return class_names(folder) if folder.is_dir() else ()
    return tuple(OFFICIAL[name].classes) if name in OFFICIAL else load_data(name).classes


def _digits() -> DataSet:
    """Return the 1,797 handwritten digits, 8×8; DIGITS.md has their source and license."""
    with (files("dcnet.data") / "digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels, test = arrays["images"], arrays["labels"], arrays["test"]
    images = torch.from_numpy(np.round(images[:, None] * (255 / 16)).astype(np.uint8))
    labels, mask = torch.from_numpy(labels.astype(np.int64)), torch.from_numpy(test)
    return DataSet(
        "digits", tuple("0123456789"), Split(images[~mask], labels[~mask]), Split(images[mask], labels[mask])
    )


__all__ = [
    "AUGMENTATIONS",
    "FOLDER",
    "NAMES",
    "DataSet",
    "ImageFolder",
    "MissingData",
    "Resident",
    "Split",
    "check_name",
    "class_names_of",
    "epoch_order",
    "load_data",
]
