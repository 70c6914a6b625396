"""The official files of MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100: places, MD5 sums, and contents."""

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dcnet.data.download import fetch, unpack
from dcnet.data.sets import DataSet, Split

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Source:
    """A file to download: its MD5 sum and the addresses that have it, the official one first.

    It may hold several of our files.
    """

    name: str
    md5: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Official:
    """A data set: its files with their MD5 sums, its sources, and how to read it.

    The sum is "" for a file that is kept as it was downloaded.
    """

    files: dict[str, str]
    sources: tuple[Source, ...]
    read: Callable[[Path], tuple[Split, Split]]
    classes: tuple[str, ...]


class MissingData(FileNotFoundError):
    """A data set's files are not where they were looked for, or not what they should be."""


def load(name: str, root: Path, download: bool, progress: Progress | None = None) -> DataSet:
    """Read the data set from its files under the folder.

    With `download`, fetch what is missing or corrupt there first.
    """
    known = OFFICIAL[name]
    wrong = {file: state for file, md5 in known.files.items() if (state := _state(root / file, md5)) is not None}
    if wrong and download:
        names = {Path(file).name for file in wrong}
        for source in known.sources:
            if not source.name.endswith(".tar.gz") and not names & {source.name, Path(source.name).stem}:
                continue  # a file by itself, and in order
            target = root / ".downloads" / source.name
            fetch(source.addresses, target, source.md5, progress)
            unpack(target, root, known.files)
            target.unlink()
        wrong = {file: state for file, md5 in known.files.items() if (state := _state(root / file, md5)) is not None}
    if wrong:
        file, state = next(iter(wrong.items()))
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise MissingData(
            f"data set {name!r}: {root / file} is {state}{more}; looked under {root.resolve()}. "
            f"With internet access, `dcnet train --data {name} --data-root {root} --download` gets it",
        )
    train, test = known.read(root)
    return DataSet(name, known.classes, train, test)


def _state(path: Path, md5: str) -> str | None:
    """Return what is wrong with a file, None if nothing is."""
    if not path.is_file():
        return "missing"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    return None if found == md5 else f"corrupt (MD5 {found}, the official file has {md5})"


def _cifar(
    folder: str, train: tuple[str, ...], test: str, label: int, labels: int
) -> Callable[[Path], tuple[Split, Split]]:
    """Return a reader of records: `labels` label bytes, one of them in use, then the planes R, G, B."""

    def split(root: Path, names: tuple[str, ...]) -> Split:
        records = np.concatenate(
            [np.fromfile(root / folder / name, np.uint8).reshape(-1, labels + 3072) for name in names]
        )
        images = torch.from_numpy(records[:, labels:].reshape(-1, 3, 32, 32).copy())
        return Split(images, torch.from_numpy(records[:, label].astype(np.int64)))

    return lambda root: (split(root, train), split(root, (test,)))


def _idx(folder: str, ending: str) -> Callable[[Path], tuple[Split, Split]]:
    """Read MNIST's format: a big-endian header, then bytes."""

    def read(path: Path) -> np.ndarray:
        data = gzip.decompress(path.read_bytes()) if ending else path.read_bytes()
        dims = data[3]
        shape = np.frombuffer(data, ">i4", dims, 4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)

    def split(root: Path, part: str) -> Split:
        images = read(root / folder / f"{part}-images-idx3-ubyte{ending}")
        labels = read(root / folder / f"{part}-labels-idx1-ubyte{ending}")
        return Split(torch.from_numpy(images[:, None].copy()), torch.from_numpy(labels.astype(np.int64)))

    return lambda root: (split(root, "train"), split(root, "t10k"))


_TORONTO = "https://www.cs.toronto.edu/~kriz"
_MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist")
_FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",  # its authors' repository
)


def _sources(sums: dict[str, str], *mirrors: str) -> tuple[Source, ...]:
    return tuple(Source(name, md5, tuple(f"{mirror}/{name}" for mirror in mirrors)) for name, md5 in sums.items())


_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""

OFFICIAL = {
    "mnist": Official(
        {
            "MNIST/raw/train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
            "MNIST/raw/train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
            "MNIST/raw/t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
            "MNIST/raw/t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
        },
        _sources(
            {
                "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
                "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
                "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
            },
            *_MNIST,
        ),
        _idx("MNIST/raw", ""),
        tuple("0123456789"),
    ),
    "fashion-mnist": Official(
        {
            "FashionMNIST/raw/train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "FashionMNIST/raw/train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "FashionMNIST/raw/t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        _sources(
            {
                "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
                "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
                "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
            },
            *_FASHION,
        ),
        _idx("FashionMNIST/raw", ".gz"),
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    "cifar10": Official(
        {
            "cifar-10-batches-bin/data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "cifar-10-batches-bin/data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "cifar-10-batches-bin/data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "cifar-10-batches-bin/data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "cifar-10-batches-bin/data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "cifar-10-batches-bin/test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
        _sources({"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}, _TORONTO),
        _cifar("cifar-10-batches-bin", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", 0, 1),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    "cifar100": Official(
        {
            "cifar-100-binary/train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
            "cifar-100-binary/test.bin": "4499cfba6c016c1be1438163640a0898",
        },
        _sources({"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"}, _TORONTO),
        _cifar("cifar-100-binary", ("train.bin",), "test.bin", 1, 2),  # the coarse label comes first
        tuple(_CIFAR100.split()),
    ),
}
