"""A small data set on the device: batches are gathered and augmented there, all images at once, each in its own way."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.data.order import epoch_order, of_batch, share
from dcnet.data.sets import DataSet, Split

AUGMENTATIONS = ("none", "crop", "flip", "crop+flip", "crop+flip+cutout", "crop+flip+cutmix")
_MIXED = 0.5  # the share of batches that cutmix mixes


class Resident:
    """The batches of a data set in memory.

    augment: one of AUGMENTATIONS; crops are taken from images padded by their mirror image, cutout puts the mean color
    in a square of `cutout` pixels a side, whose center may be anywhere (DeVries and Taylor, 2017). In about
    every second batch, cutmix puts a rectangle of another image of the batch into every image, of a share that is drawn
    evenly from 0 to 1 (Yun et al., 2019).
    """

    def __init__(
        self,
        data: DataSet,
        device: torch.device,
        seed: int = 0,
        augment: str = "none",
        pad: int = 4,
        cutout: int = 8,
    ) -> None:
        if augment not in AUGMENTATIONS:
            raise ValueError(f"unknown augmentation {augment!r}; possible: {', '.join(AUGMENTATIONS)}")
        if "crop" in augment and not 0 < pad < data.size:
            raise ValueError(
                f"pad={pad} does not go with images of {data.size}×{data.size}; possible: 1 to {data.size - 1}"
            )
        if "cutout" in augment and not 0 < cutout <= data.size:
            raise ValueError(
                f"cutout={cutout} does not go with images of {data.size}×{data.size}; possible: 1 to {data.size}"
            )
        self.classes, self.channels, self.size = data.classes, data.channels, data.size
        self.seed, self.pad, self.flips = seed, pad if "crop" in augment else 0, "flip" in augment
        self.device = device
        self.train, self.test = (Split(*[tensor.to(device) for tensor in split]) for split in (data.train, data.test))
        self.mixes = "cutmix" in augment
        self.cutout = cutout if "cutout" in augment else 0
        if self.cutout:
            self.mean_color = self.train.images.mean((0, 2, 3), keepdim=True, dtype=torch.float32) / 255.0

    @property
    def train_length(self) -> int:
        return len(self.train.labels)

    @property
    def test_length(self) -> int:
        return len(self.test.labels)

    def train_batches(
        self, epoch: int, first: int, batch: int, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the full batches of an epoch: images in [0, 1] and labels.

        `first` is the number of the batch to start from. With cutmix, labels are shares of the classes, (N, classes).
        """
        order = torch.from_numpy(epoch_order(self.train_length, self.seed, epoch)).to(self.device)
        mine = share(batch, rank, world)
        for number in range(first, self.train_length // batch):
            yield self._batch(order[number * batch : (number + 1) * batch], epoch, number, mine)

    def _batch(self, everyone: Tensor, epoch: int, number: int, mine: slice) -> tuple[Tensor, Tensor]:
        """Return this rank's images of a batch, augmented, and their labels."""
        # drawn for the whole batch, so that every number of ranks sees the same images
        random, batch = of_batch(self.seed, epoch, number), len(everyone)
        shifts = random.integers(-self.pad, self.pad, (batch, 2), endpoint=True) if self.pad or self.flips else None
        flips = random.integers(0, 2, batch) if self.flips else None
        centers = random.integers(0, self.size, (batch, 2)) if self.cutout else None

        def at(positions: slice | np.ndarray) -> tuple[Tensor, Tensor]:
            where = positions if isinstance(positions, slice) else torch.from_numpy(positions).to(self.device)
            picks = everyone[where]
            drawn = [None if numbers is None else numbers[positions] for numbers in (shifts, flips, centers)]
            return self._augmented(picks, *drawn), self.train.labels[picks]

        images, labels = at(mine)
        if not self.mixes:
            return images, labels
        targets = F.one_hot(labels, len(self.classes)).float()
        if random.random() >= _MIXED:
            return images, targets
        box, others = self._box(random), random.permutation(batch)
        images_of_others, labels_of_others = at(others[mine])
        images[:, :, *box] = images_of_others[:, :, *box]
        share_of_others = images[0, 0, *box].numel() / self.size**2
        return images, targets.lerp(F.one_hot(labels_of_others, len(self.classes)).float(), share_of_others)

    def _box(self, random: np.random.Generator) -> tuple[slice, slice]:
        """Return the rows and columns that cutmix takes from other images: a square anywhere, cut off at borders."""
        half = 0.5 * self.size * float(random.random()) ** 0.5
        rows, columns = (
            slice(max(0, round(center - half)), min(self.size, round(center + half)))
            for center in random.integers(0, self.size, 2)
        )
        return rows, columns

    def _augmented(
        self, picks: Tensor, shifts: np.ndarray | None, flips: np.ndarray | None, centers: np.ndarray | None
    ) -> Tensor:
        """Return these images, each shifted and flipped as it was drawn, with a square hidden around its center."""
        images = self.train.images
        if shifts is None:
            return images[picks].float().div_(255.0)
        shift = torch.from_numpy(shifts).to(self.device, non_blocking=True)
        rows = self._mirrored(shift[:, :1])
        columns = self._mirrored(shift[:, 1:])
        if flips is not None:
            flip = torch.from_numpy(flips).to(self.device, non_blocking=True).bool()
            columns = torch.where(flip[:, None], columns.flip(1), columns)
        channels = torch.arange(self.channels, device=self.device)
        gathered = images[
            picks[:, None, None, None], channels[None, :, None, None], rows[:, None, :, None], columns[:, None, None, :]
        ]
        result = gathered.float().div_(255.0)
        if centers is not None:
            center = torch.from_numpy(centers).to(self.device, non_blocking=True)
            hidden = self._covered(center[:, :1])[:, None, :, None] & self._covered(center[:, 1:])[:, None, None, :]
            result = torch.where(hidden, self.mean_color, result)
        return result

    def _covered(self, center: Tensor) -> Tensor:
        """Tell which rows (or columns) a square around each center covers: (N, size)."""
        first = center - self.cutout // 2
        at = torch.arange(self.size, device=self.device)
        return (at >= first) & (at < first + self.cutout)

    def _mirrored(self, shift: Tensor) -> Tensor:
        """Return the rows (or columns) of images shifted by that many pixels, mirrored where they end: (N, size)."""
        at = (torch.arange(self.size, device=self.device) + shift).abs()
        return torch.where(at < self.size, at, 2 * (self.size - 1) - at)

    def test_batches(self, batch: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the test images, each once, in order."""
        mine = share(self.test_length, rank, world)
        images, labels = self.test.images[mine], self.test.labels[mine]
        for start in range(0, len(labels), batch):
            yield images[start : start + batch].float().div_(255.0), labels[start : start + batch]
