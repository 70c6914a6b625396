"""Data sets: small ones in memory as bytes, augmented on the device; folders of images, streamed through worker processes."""

from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from dcnet.data.folder import ImageFolder
from dcnet.data.official import OFFICIAL, MissingData, Progress, load
from dcnet.data.order import epoch_order
from dcnet.data.resident import AUGMENTATIONS, Resident
from dcnet.data.sets import DataSet, Split
from dcnet.util.suggest import nearest

NAMES = ("digits", *OFFICIAL)
FOLDER = "imagefolder:"


def load_data(name: str, root: str | Path = "data", download: bool = False, progress: Progress | None = None) -> DataSet:
    """The data set of that name; all but `digits`, which comes with the package, are read from their official files under the root."""
    if name == "digits":
        return _digits()
    if name not in OFFICIAL:
        raise ValueError(f"unknown data set {name!r}.{nearest(name, NAMES)} Known: {', '.join(NAMES)}, {FOLDER}PATH")
    return load(name, Path(root), download, progress)


def _digits() -> DataSet:
    """The 1,797 handwritten digits, 8×8; DIGITS.md has their source and licence."""
    with (files("dcnet.data") / "digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels, test = arrays["images"], arrays["labels"], arrays["test"]
    images = torch.from_numpy(np.round(images[:, None] * (255 / 16)).astype(np.uint8))
    labels, mask = torch.from_numpy(labels.astype(np.int64)), torch.from_numpy(test)
    return DataSet("digits", tuple("0123456789"), Split(images[~mask], labels[~mask]), Split(images[mask], labels[mask]))


__all__ = ["AUGMENTATIONS", "FOLDER", "NAMES", "DataSet", "ImageFolder", "MissingData", "Resident", "Split", "epoch_order", "load_data"]
