"""A folder of images in ImageNet's layout, streamed through worker processes.

The layout is PATH/train/CLASS/*.jpeg and PATH/val/CLASS/*.jpeg.
"""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dcnet.data.order import epoch_order, of_image, share
from dcnet.util.text import few

ENDINGS = (".jpeg", ".jpg", ".png", ".bmp", ".webp")
_UNREADABLE = "cannot be read as an image"
_AT_ONCE = 100  # images that a worker process hands over together
_RESIZED = 256 / 224  # the shorter side before the crop, in crops


class ImageFolder:
    """The batches of a folder of images.

    size: of the crops; the shorter side of an image becomes 256/224 of it first, as in the paper.
    """

    channels = 3

    def __init__(
        self, path: str | Path, device: torch.device, seed: int = 0, size: int = 224, workers: int | None = None
    ) -> None:
        root = Path(path)
        if not root.is_dir():
            raise FileNotFoundError(f"image folder {root} does not exist (looked at {root.resolve()})")
        held_out = next((name for name in ("val", "test") if (root / name).is_dir()), None)
        if not (root / "train").is_dir() or held_out is None:
            found = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
            raise FileNotFoundError(
                f"image folder {root} must hold train/CLASS/… and val/CLASS/… (or test/CLASS/…), found the "
                f"folders {found}"
            )
        self.classes = class_names(root / "train")
        self.device, self.seed, self.size = device, seed, size
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self._train = self._files(root / "train")
        self._test = self._files(root / held_out)

    def _files(self, folder: Path) -> list[tuple[str, int]]:
        unknown = sorted(set(class_names(folder)) - set(self.classes))
        if unknown:
            raise ValueError(f"{folder} has the class {unknown[0]!r}, which train does not have")
        found: list[tuple[str, int]] = []
        missing: list[str] = []
        for label, name in enumerate(self.classes):
            files = _images_under(folder / name)
            if not files and folder.name == "train":
                raise FileNotFoundError(
                    f"no images of the class {name!r} under {folder / name}; possible endings: {', '.join(ENDINGS)}"
                )
            if not files:
                missing.append(name)
            found += [(str(path), label) for path in files]
        if not found:
            raise FileNotFoundError(f"no images under {folder}; possible endings: {', '.join(ENDINGS)}")
        if missing:
            warnings.warn(
                f"{folder} has no images of {len(missing)} of the {len(self.classes)} classes that train has "
                f"({few(list(map(repr, missing)))}): the accuracy says nothing about these",
                stacklevel=3,
            )
        return found

    @property
    def train_length(self) -> int:
        return len(self._train)

    @property
    def test_length(self) -> int:
        return len(self._test)

    def train_batches(
        self, epoch: int, first: int, batch: int, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the full batches of an epoch: images in [0, 1] and labels.

        `first` is the number of the batch to start from.
        """
        order = epoch_order(self.train_length, self.seed, epoch).tolist()
        mine = share(batch, rank, world)
        groups = [order[i * batch : (i + 1) * batch][mine] for i in range(first, self.train_length // batch)]
        yield from self._load(_Images(self._train, self.size, (self.seed, epoch)), groups)

    def test_batches(self, batch: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the test images, each once, in order."""
        indices = list(range(self.test_length))[share(self.test_length, rank, world)]
        groups = [indices[i : i + batch] for i in range(0, len(indices), batch)]
        yield from self._load(_Images(self._test, self.size, None), groups)

    def drawn_test_images(self, count: int) -> tuple[Tensor, Tensor]:
        """Return this many test images in [0, 1], and their labels, all in memory; every time the same ones.

        They are drawn at random and in random order, as the files are sorted by class.
        """
        drawn = np.random.default_rng(0).permutation(self.test_length)[:count].tolist()
        images = torch.empty(len(drawn), self.channels, self.size, self.size, device=self.device)
        labels = torch.empty(len(drawn), dtype=torch.int64, device=self.device)
        done = 0
        groups = [drawn[i : i + _AT_ONCE] for i in range(0, len(drawn), _AT_ONCE)]
        for some, their in self._load(_Images(self._test, self.size, None), groups):
            images[done : done + len(some)], labels[done : done + len(some)] = some, their
            done += len(some)
        return images, labels

    def _load(self, images: "_Images", groups: list[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        options: dict[str, Any] = {"num_workers": self.workers, "pin_memory": self.device.type == "cuda"}
        # a generator of its own: the workers' seeds, which nobody uses, would come from the global one
        loader: DataLoader[Any] = DataLoader(images, batch_sampler=groups, generator=torch.Generator(), **options)
        try:
            for batch, labels in loader:
                yield (
                    batch.to(self.device, non_blocking=True).float().div_(255.0),
                    labels.to(self.device, non_blocking=True),
                )
        except OSError as error:  # a worker's comes with its whole traceback
            line = str(error).strip().splitlines()[-1].removeprefix("OSError: ")
            raise (OSError(line) if _UNREADABLE in line else error) from None


def class_names(path: Path) -> tuple[str, ...]:
    """Return the classes in a folder, sorted; what starts with a dot is some program's own."""
    return tuple(sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")))


def _images_under(folder: Path) -> list[Path]:
    """Return the images at any depth, sorted.

    `os.walk` asks the disk nothing about each of a million files.
    """
    names = (Path(where, name) for where, _, names in os.walk(folder) for name in names if not name.startswith("."))
    return sorted(path for path in names if path.suffix.lower() in ENDINGS)


def read_image(path: str | Path, mode: str) -> tuple[Any, str]:
    """Return an image as Pillow has it, in the mode "L" or "RGB", upright as its camera says, and the file's own mode.

    Pixels of 16 bits are scaled to 8; Pillow itself would cut off all above 255. Of those of 32 bits nobody knows which
    number is white.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError("reading images needs Pillow: pip install 'dcnet[images]'") from error
    with Image.open(path) as file:
        own, image = file.mode, ImageOps.exif_transpose(file)
        if own.startswith("I;16"):
            image = Image.fromarray(np.round(np.asarray(image, dtype=np.float32) / 257.0).astype(np.uint8))
        elif own in ("I", "F"):
            raise ValueError(f"its pixels have 32 bits (mode {own!r}); possible: 8 or 16 bits")
        return image.convert(mode), own


def resized_to(image: Any, size: int) -> np.ndarray:
    """Return the pixels of an image of Pillow's, brought to this size as a whole."""
    from PIL.Image import Resampling

    return np.asarray(image.resize((size, size), Resampling.BILINEAR))


def _resized(image: Any, size: int) -> np.ndarray:
    """Return the pixels of an image of Pillow's, its shorter side a little longer than the crop."""
    from PIL.Image import Resampling

    scale = size * _RESIZED / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    return np.asarray(image.resize((width, height), Resampling.BILINEAR))


def middle_crop(image: Any, size: int) -> np.ndarray:
    """Return the middle of a Pillow image, as test images are seen: (size, size), and its channels if several."""
    pixels = _resized(image, size)
    top, left = ((side - size) // 2 for side in pixels.shape[:2])
    return pixels[top : top + size, left : left + size]


class _Images(Dataset[tuple[Tensor, int]]):
    """Crops of the files. random: (seed, epoch) for random crops and flips, None for the middle."""

    def __init__(self, files: list[tuple[str, int]], size: int, random: tuple[int, int] | None) -> None:
        self.files, self.size, self.random = files, size, random

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        try:
            image, _ = read_image(path, "RGB")
        except (OSError, ValueError) as error:
            raise OSError(f"{path} {_UNREADABLE}: {error}") from error
        if self.random is None:
            crop = middle_crop(image, self.size)
        else:
            pixels = _resized(image, self.size)
            height, width = pixels.shape[:2]
            random = of_image(*self.random, index)
            top, left, flip = random.integers(0, (height - self.size, width - self.size, 1), endpoint=True).tolist()
            crop = pixels[top : top + self.size, left : left + self.size]
            if flip:
                crop = crop[:, ::-1]
        return torch.from_numpy(crop.transpose(2, 0, 1).copy()), label
