"""What a data set is in memory: images as bytes, labels, names of the classes."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Split(NamedTuple):
    """Images uint8 (N, C, H, W), labels int64 (N,)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class DataSet:
    """A small data set, all of it in memory."""

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split

    @property
    def channels(self) -> int:
        return self.train.images.shape[1]

    @property
    def size(self) -> int:
        """Height and width of the images."""
        return self.train.images.shape[-1]
