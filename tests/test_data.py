"""Data sets: what ships, the official files, downloads, augmentation, image folders."""

import gzip
import hashlib
import http.server
import io
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from dcnet.data import DataSet, ImageFolder, MissingData, Resident, Split, epoch_order, load_data, official
from dcnet.data.download import fetch
from dcnet.data.folder import read_image

CPU = torch.device("cpu")
REAL = Path(__file__).parent.parent / "data"


def test_digits():
    data = load_data("digits")
    assert data.train.images.shape == (1442, 1, 8, 8)
    assert data.test.images.shape == (355, 1, 8, 8)
    assert data.train.images.dtype == torch.uint8
    assert int(data.train.images.max()) == 255
    assert torch.cat([data.train.labels, data.test.labels]).bincount().tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]
    assert min(data.test.labels.bincount()) >= 34  # every class
    # the split never changes
    digest = hashlib.md5(data.test.images.numpy().tobytes() + data.test.labels.numpy().tobytes()).hexdigest()
    assert digest == DIGEST


DIGEST = "9ebbfd315eb88fe45933ea3299825770"


@pytest.mark.parametrize(
    ("name", "size", "channels", "train"),
    [("mnist", 28, 1, 60_000), ("cifar10", 32, 3, 50_000), ("cifar100", 32, 3, 50_000)],
)
def test_official_files(name, size, channels, train):
    if not all((REAL / file).exists() for file in official.OFFICIAL[name].files):
        pytest.skip(f"the official files of {name} are not under data/")
    data = load_data(name, REAL)
    assert data.train.images.shape == (train, channels, size, size)
    assert len(data.test.labels) == 10_000
    assert data.train.labels.unique().numel() == len(data.classes)
    if name != "mnist":
        assert set(data.test.labels.bincount().tolist()) == {10_000 // len(data.classes)}


def cifar_like(count: int, seed: int) -> tuple[np.ndarray, bytes]:
    records = np.random.default_rng(seed).integers(0, 256, (count, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    return records, records.tobytes()


@pytest.fixture
def small(monkeypatch):
    """CIFAR-10 with files of three images each, and their MD5 sums."""
    files = {name: cifar_like(3, i) for i, name in enumerate(official.OFFICIAL["cifar10"].files)}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, (_, data) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    whole = archive.getvalue()
    real = official.OFFICIAL["cifar10"]

    def serve(*addresses: str) -> None:
        source = official.Source("cifar-10-binary.tar.gz", hashlib.md5(whole).hexdigest(), addresses)
        sums = {name: hashlib.md5(data).hexdigest() for name, (_, data) in files.items()}
        monkeypatch.setitem(official.OFFICIAL, "cifar10", official.Official(sums, (source,), real.read, real.classes))

    serve("http://127.0.0.1:9/nothing")
    return files, whole, serve


def test_cifar_records(small, tmp_path):
    files, _, _ = small
    for name, (_, data) in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    data = load_data("cifar10", tmp_path)
    first = files["cifar-10-batches-bin/data_batch_1.bin"][0]
    assert data.train.images.shape == (15, 3, 32, 32)
    assert data.train.labels[:3].tolist() == first[:, 0].tolist()
    assert data.train.images[1, 2, 5, 7] == first[1, 1 + 2 * 1024 + 5 * 32 + 7]

    path = tmp_path / "cifar-10-batches-bin/test_batch.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(
        MissingData,
        match=r"test_batch.bin is corrupt \(MD5 .*looked under .*dcnet train --data cifar10 --data-root .* --download",
    ):
        load_data("cifar10", tmp_path)
    path.unlink()
    with pytest.raises(MissingData, match=r"test_batch.bin is missing"):
        load_data("cifar10", tmp_path)
    with pytest.raises(ValueError, match=r"unknown data set 'cifer10'. Did you mean 'cifar10'"):
        load_data("cifer10")


@pytest.fixture
def server():
    """Serves `content`, with ranges; `broken` makes it hang up half-way, `requests` has what was asked for."""

    class Handler(http.server.BaseHTTPRequestHandler):
        content, broken, requests = b"", False, []

        def do_GET(self):
            cls = type(self)
            asked = self.headers.get("Range")
            cls.requests.append((self.path, asked))
            if self.path == "/missing":
                self.send_error(404)
                return
            start = int(asked.split("=")[1].rstrip("-")) if asked else 0
            body = cls.content[start:]
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if cls.broken else body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_download_resumes(server, tmp_path):
    handler, address = server
    handler.content = np.random.default_rng(0).bytes(1_000_000)
    md5 = hashlib.md5(handler.content).hexdigest()
    seen = []
    handler.broken = True
    with pytest.raises(OSError, match=r"the connection ended after 500,000 of 1,000,000 bytes|IncompleteRead"):
        fetch([f"{address}/file"], tmp_path / "file", md5)
    handler.broken = False
    fetch(
        [f"{address}/missing", f"{address}/file"],
        tmp_path / "file",
        md5,
        lambda name, done, total: seen.append((name, done, total)),
    )
    assert (tmp_path / "file").read_bytes() == handler.content
    assert handler.requests[-1] == ("/file", "bytes=500000-")  # the second half, from the mirror that has it
    assert seen[-1] == ("file", 1_000_000, 1_000_000)
    before = len(handler.requests)
    fetch([f"{address}/file"], tmp_path / "file", md5)
    assert len(handler.requests) == before  # nothing to do
    with pytest.raises(
        OSError, match=r"(?s)other could not be downloaded.*/missing.*404.*has the MD5 sum .*, expected 00"
    ):
        fetch([f"{address}/missing", f"{address}/file"], tmp_path / "other", "00")
    assert not (tmp_path / "other").exists()


def test_download_of_a_data_set(server, small, tmp_path):
    handler, address = server
    files, handler.content, serve = small
    serve(f"{address}/cifar-10-binary.tar.gz")
    data = load_data("cifar10", tmp_path, download=True)
    assert len(data.train.labels) == 15
    assert {path.name for path in tmp_path.rglob("*.bin")} == {Path(name).name for name in files}
    assert not list(tmp_path.rglob("*.gz"))


def test_idx_files(tmp_path, monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    for part in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", np.arange(5, dtype=np.uint8))):
            data = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()
            path = tmp_path / f"FashionMNIST/raw/{part}-{kind}-ubyte.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(data))
    real = official.OFFICIAL["fashion-mnist"]
    sums = {name: hashlib.md5((tmp_path / name).read_bytes()).hexdigest() for name in real.files}
    monkeypatch.setitem(official.OFFICIAL, "fashion-mnist", official.Official(sums, (), real.read, real.classes))
    data = load_data("fashion-mnist", tmp_path)
    assert torch.equal(data.train.images, torch.from_numpy(images[:, None]))
    assert data.test.labels.tolist() == [0, 1, 2, 3, 4]


def test_only_what_is_missing_is_fetched(tmp_path, monkeypatch):
    content = {"train-images-idx3-ubyte": b"images", "train-labels-idx1-ubyte": b"labels"}
    sums = {f"MNIST/raw/{name}": hashlib.md5(data).hexdigest() for name, data in content.items()}
    sources = tuple(official.Source(f"{name}.gz", "", ()) for name in content)
    monkeypatch.setitem(
        official.OFFICIAL,
        "mnist",
        official.Official(sums, sources, lambda root: (squares().train, squares().test), ("0",)),
    )
    (tmp_path / "MNIST/raw").mkdir(parents=True)
    (tmp_path / "MNIST/raw/train-images-idx3-ubyte").write_bytes(b"images")
    fetched = []

    def fetch(addresses, target, md5, progress):
        fetched.append(target.name)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(gzip.compress(content[target.stem]))

    monkeypatch.setattr(official, "fetch", fetch)
    load_data("mnist", tmp_path, download=True)
    assert fetched == ["train-labels-idx1-ubyte.gz"]


def squares(count: int = 30, size: int = 12, channels: int = 3) -> DataSet:
    images = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (count, channels, size, size), dtype=np.uint8))
    split = Split(images, torch.arange(count) % 10)
    return DataSet("squares", tuple("0123456789"), split, split)


@pytest.mark.parametrize("augment", ["none", "crop", "flip", "crop+flip"])
def test_augmentation(augment):
    """Every image is some crop of its mirrored padding, flipped or not, and both happen."""
    data, pad = squares(), 3
    images, labels = next(Resident(data, CPU, 5, augment, pad).train_batches(2, 1, 10))
    order = epoch_order(30, 5, 2)
    shifts, flips = set(), set()
    for image, label, index in zip(images, labels, order[10:20], strict=True):
        assert label == data.train.labels[index]
        padded = np.pad(data.train.images[index].numpy(), ((0, 0), (pad, pad), (pad, pad)), mode="reflect")
        found = [
            (top, left, flip)
            for top in range(2 * pad + 1)
            for left in range(2 * pad + 1)
            for flip in (False, True)
            if np.array_equal(
                padded[:, top : top + 12, left : left + 12][:, :, :: -1 if flip else 1], (image * 255).round().numpy()
            )
        ]
        assert len(found) == 1
        shifts.add(found[0][:2])
        flips.add(found[0][2])
    assert (len(shifts) > 1) == ("crop" in augment)
    assert (flips == {False, True}) == ("flip" in augment)
    if augment == "none":
        assert shifts == {(pad, pad)}


def test_every_epoch_and_seed_has_an_order_of_its_own():
    orders = [tuple(epoch_order(30, seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 6
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert tuple(epoch_order(30, 1, 2)) == orders[-1]  # the same each time it is asked for


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_a_batch(world):
    def batches(rank, world, first=0):
        return list(Resident(squares(), CPU, 5, "crop+flip", 3).train_batches(1, first, 8, rank, world))

    whole, parts = batches(0, 1), [batches(rank, world) for rank in range(world)]
    assert len(whole) == 3  # of 30 images; the rest comes another time
    for number, (images, labels) in enumerate(whole):
        assert torch.equal(images, torch.cat([part[number][0] for part in parts]))
        assert torch.equal(labels, torch.cat([part[number][1] for part in parts]))
    assert torch.equal(batches(0, 1, first=2)[0][0], whole[2][0])  # a resumed epoch
    tests = [list(Resident(squares(), CPU).test_batches(4, rank, world)) for rank in range(world)]
    assert torch.cat([labels for part in tests for _, labels in part]).tolist() == squares().test.labels.tolist()


def test_errors():
    with pytest.raises(ValueError, match="unknown augmentation 'crops'"):
        Resident(squares(), CPU, augment="crops")
    with pytest.raises(ValueError, match="pad=12 does not go with images of 12×12; possible: 1 to 11"):
        Resident(squares(), CPU, augment="crop", pad=12)


@pytest.fixture
def folder(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="image folders need Pillow")
    random = np.random.default_rng(0)
    for part, count in (("train", 5), ("val", 2)):
        for shade, name in enumerate(("cat", "dog")):
            for i in range(count):
                pixels = np.full((30 + 7 * i, 50, 3), 40 + 150 * shade, np.uint8) + random.integers(
                    0, 20, (30 + 7 * i, 50, 3), dtype=np.uint8
                )
                path = tmp_path / part / name / f"{i}.jpeg"
                path.parent.mkdir(parents=True, exist_ok=True)
                image.fromarray(pixels).save(path)
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
def test_image_folder(folder, workers):
    data = ImageFolder(folder, CPU, seed=3, size=16, workers=workers)
    assert (data.classes, data.train_length, data.test_length) == (("cat", "dog"), 10, 4)
    whole = list(data.train_batches(0, 0, 4))
    assert [images.shape for images, _ in whole] == [(4, 3, 16, 16)] * 2
    for images, labels in whole:  # dark cats, bright dogs
        assert ((images.mean((1, 2, 3)) > 0.5).long() == labels).all()
    assert torch.equal(next(data.train_batches(0, 1, 4))[0], whole[1][0])
    halves = [next(data.train_batches(0, 0, 4, rank, 2))[0] for rank in range(2)]
    assert torch.equal(torch.cat(halves), whole[0][0])
    assert not torch.equal(next(data.train_batches(1, 0, 4))[0], whole[0][0])
    assert torch.cat([labels for _, labels in data.test_batches(3)]).tolist() == [0, 0, 1, 1]


def test_drawn_images_of_a_folder(folder):
    """Those of `test_batches`, in another order, which is always the same; fewer are the first of these."""
    data = ImageFolder(folder, CPU, size=16, workers=0)
    (ordered, labels), (drawn, theirs) = next(data.test_batches(10)), data.drawn_test_images(4)
    places = [int((ordered == image).flatten(1).all(1).nonzero()) for image in drawn]
    assert sorted(places) == [0, 1, 2, 3]
    assert places != [0, 1, 2, 3]
    assert theirs.tolist() == labels[places].tolist()
    fewer, their = data.drawn_test_images(3)
    assert torch.equal(fewer, drawn[:3])
    assert torch.equal(their, theirs[:3])


def test_image_folder_errors(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        ImageFolder(tmp_path / "nowhere", CPU)
    with pytest.raises(
        FileNotFoundError, match=r"must hold train/CLASS/… and val/CLASS/… .* found the folders \['cat', 'dog'\]"
    ):
        ImageFolder(folder / "train", CPU)
    (folder / "val" / "cow").mkdir()
    with pytest.raises(ValueError, match="has the class 'cow', which train does not have"):
        ImageFolder(folder, CPU)
    (folder / "val" / "cow").rmdir()
    (folder / "val" / "dog").rename(folder / "dogs")
    with pytest.warns(UserWarning, match=r"val has no images of 1 of the 2 classes that train has \('dog'\)"):
        ImageFolder(folder, CPU)
    (folder / "val" / "dog").mkdir()  # without images
    with pytest.warns(UserWarning, match="the accuracy says nothing about these"):
        ImageFolder(folder, CPU)
    (folder / "val" / "dog").rmdir()
    (folder / "dogs").rename(folder / "val" / "dog")
    (folder / "train" / "cat" / "0.jpeg").write_bytes(b"no image")
    with pytest.raises(OSError, match=r"0.jpeg cannot be read as an image"):
        list(ImageFolder(folder, CPU, size=16, workers=0).train_batches(0, 0, 10))


def test_cutout():
    """A square of the mean color, anywhere, cut off at the borders; all else as without it, for any number of ranks."""
    data = squares()
    (plain, labels), (cut, same) = (
        next(Resident(data, CPU, 5, augment, 2, 4).train_batches(0, 0, 10))
        for augment in ("crop+flip", "crop+flip+cutout")
    )
    assert torch.equal(labels, same)
    mean = (data.train.images.double().mean((0, 2, 3)) / 255.0).float()
    sizes = set()
    for before, after in zip(plain, cut, strict=True):
        changed = (before != after).any(0) | (after == mean[:, None, None]).all(0)
        rows, columns = changed.any(1).nonzero().flatten(), changed.any(0).nonzero().flatten()
        inside = after[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        torch.testing.assert_close(inside, mean[:, None, None].expand_as(inside))
        assert int(changed.sum()) == len(rows) * len(columns) <= 16
        sizes.add((len(rows), len(columns)))
    assert len(sizes) > 1  # some are cut off by a border
    halves = [next(Resident(data, CPU, 5, "crop+flip+cutout", 2, 4).train_batches(0, 0, 10, r, 2))[0] for r in (0, 1)]
    assert torch.equal(torch.cat(halves), cut)
    with pytest.raises(ValueError, match="cutout=13 does not go with images of"):
        Resident(data, CPU, augment="crop+flip+cutout", cutout=13)


def test_cutmix():
    """Some batches get a rectangle of another image each, and labels by area; the same for any number of ranks."""
    data = squares()
    plain, mixed = (
        list(Resident(data, CPU, 5, augment, 2).train_batches(0, 0, 3)) for augment in ("crop+flip", "crop+flip+cutmix")
    )
    areas = []
    for (before, labels), (after, shares) in zip(plain, mixed, strict=True):
        targets = torch.nn.functional.one_hot(labels, 10).float()
        new = (before != after).any(0).any(0)
        if not new.any():
            assert torch.equal(shares, targets)
            continue
        box = tuple(slice(int(at[0]), int(at[-1]) + 1) for at in (new.any(1).nonzero(), new.any(0).nonzero()))
        areas.append(after[0, 0, *box].numel() / 144)
        outside = after.clone()
        outside[:, :, *box] = before[:, :, *box]
        assert torch.equal(outside, before)
        for image, share, target in zip(after, shares, targets, strict=True):
            (other,) = (i for i in range(3) if torch.equal(image[:, *box], before[i][:, *box]))
            torch.testing.assert_close(share, (1.0 - areas[-1]) * target + areas[-1] * targets[other])
    assert 2 <= len(areas) < len(plain)
    assert len(set(areas)) > 1
    halves = [list(Resident(data, CPU, 5, "crop+flip+cutmix", 2).train_batches(0, 0, 3, rank, 2)) for rank in (0, 1)]
    for (whole, shares), *parts in zip(mixed, *halves, strict=True):
        assert torch.equal(torch.cat([images for images, _ in parts]), whole)
        assert torch.equal(torch.cat([labels for _, labels in parts]), shares)


def test_pixels_of_more_than_eight_bits(tmp_path):
    """Scaled, not cut off: 16 bits have 257 times the range."""
    image = pytest.importorskip("PIL.Image", reason="image folders need Pillow")
    eight = np.arange(0, 256, 3, dtype=np.uint8).repeat(4)[:320].reshape(16, 20)
    image.fromarray(eight.astype(np.uint16) * 257).save(tmp_path / "sixteen.png")
    for mode in ("L", "RGB"):
        found, own = read_image(tmp_path / "sixteen.png", mode)
        assert (own, found.mode) == ("I;16", mode)
        assert (np.asarray(found).reshape(16, 20, -1) == eight[..., None]).all()
    for number, pixels in enumerate((eight.astype(np.int32), eight.astype(np.float32))):
        image.fromarray(pixels).save(tmp_path / f"{number}.tiff")
        with pytest.raises(ValueError, match=r"its pixels have 32 bits \(mode '[IF]'\); possible: 8 or 16 bits"):
            read_image(tmp_path / f"{number}.tiff", "L")


def test_images_are_upright(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="image folders need Pillow")
    picture = image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8))
    exif = image.Exif()
    exif[0x0112] = 6  # the camera was turned: the rows are columns
    picture.save(tmp_path / "turned.png", exif=exif)
    found, _ = read_image(tmp_path / "turned.png", "L")
    assert found.size == (6, 8)
    assert (np.asarray(found) == np.rot90(np.asarray(picture), -1)).all()
