"""Export a trained network, and check it on test images of its data set."""

from pathlib import Path

import torch
from torch import Tensor

from dcnet.data import FOLDER, ImageFolder, MissingData, load_data
from dcnet.deploy import FORMATS, ExportReport, export
from dcnet.models.external import HUB
from dcnet.training.hub import TrainedFile, open_trained
from dcnet.training.run import Run
from dcnet.training.weights import save_weights
from dcnet.util.suggest import nearest

_IMAGES = 4


def export_run(
    source: str | Path,
    path: str | Path | None = None,
    to: str = "onnx",
    *,
    half: bool = False,
    dynamic: bool = True,
    opset: int = 18,
    data_root: str | Path = "data",
    trust_formulas: bool = False,
) -> ExportReport:
    """Write the network of a run folder, of a file of its weights, or of "hub:NAME" in another format; return a report.

    See `dcnet.export`. The network takes images in [0, 1]. It is checked on test images of its data set; if that is not
    under `data_root`, it is checked on noise, and a note says so.

    Args:
        source: a run folder, a .safetensors file of its weights, or "hub:NAME".
        path: the file to write; by default `model.onnx`, `model.pt2` or `model.safetensors` in the run folder, or a
            file beside that of the weights; for hub:NAME, NAME.onnx and so on in the current folder.
        to: the format, as in `dcnet.export`.
        half: float16 instead of float32, as in `dcnet.export`.
        dynamic: leave the batch and the size of images free in the file, as far as the network allows.
        opset: of ONNX.
        data_root: the folder of the data sets' official files.
        trust_formulas: execute the copy of your own formulas in the folder or file, if they are not registered here.

    Returns:
        What `dcnet.export` returns.
    """
    if to not in FORMATS:
        raise ValueError(f"to={to!r} is unknown.{nearest(str(to), FORMATS)} Possible: {', '.join(FORMATS)}")
    found = open_trained(source, trust_formulas=trust_formulas)
    path = Path(path) if path is not None else _beside(found, FORMATS[to])
    if isinstance(found, TrainedFile) and path.resolve() == found.path.resolve():
        raise ValueError(f"{path} is the file to export; give another path")
    if to == "safetensors":
        if isinstance(found, TrainedFile):
            raise ValueError(
                f"{found.path} holds weights as safetensors already; possible: a run folder, or another format"
            )
        if half:
            raise ValueError("half precision is not for safetensors, which hold the weights as they are")
        save_weights(found, path)
        return ExportReport(path, to, path.stat().st_size, 0.0, notes=["dcnet.load reads it"])
    images, note = _test_images(found.recipe.data, found.shape, data_root)
    report = export(found.model, path, to, images, half=half, dynamic=dynamic, opset=opset)
    report.notes += [note] * bool(note)
    return report


def _beside(found: Run | TrainedFile, ending: str) -> Path:
    """Return the file to write if none is given. Nothing is written into the hub."""
    if isinstance(found, Run):
        return found.folder / f"model{ending}"
    name = str(found.folder)
    return Path(name.removeprefix(HUB) + ending) if name.startswith(HUB) else found.path.with_suffix(ending)


def _test_images(data: str, shape: dict[str, int], root: str | Path) -> tuple[Tensor, str]:
    """Return a few images for the network, and a note if they are not from its own test set."""
    size = shape["in_channels"], shape["input_size"], shape["input_size"]
    try:
        if data.startswith(FOLDER):
            folder = ImageFolder(data.removeprefix(FOLDER), torch.device("cpu"), size=shape["input_size"], workers=0)
            images = next(folder.test_batches(_IMAGES))[0]
        else:
            images = load_data(data, root).test.images[:_IMAGES].float() / 255.0
        if tuple(images.shape[1:]) == size:
            return images, ""
        reason = f"images of {data} are {tuple(images.shape[1:])}"
    except (MissingData, FileNotFoundError, ImportError) as error:
        reason = str(error)
    noise = torch.rand(_IMAGES, *size, generator=torch.Generator().manual_seed(0))
    return noise, f"checked on noise, not on test images: {reason}"
