"""A trained network taken elsewhere: exported, and checked on test images of the data it was trained on."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dcnet.data import FOLDER, ImageFolder, MissingData, load_data
from dcnet.deploy import FORMATS, ExportReport, export
from dcnet.training.hub import load
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
) -> ExportReport:
    """Write the network of a run folder, or of a file of its weights, in another format; return a report.

    See `dcnet.export`. The network takes images in [0, 1]. It is checked on test images of its data set; if that is not
    under `data_root`, it is checked on noise, and a note says so.

    path: if not given, `model.onnx`, `model.pt2` or `model.safetensors` in the run folder, or a file beside that of the
    weights.
    """
    source = Path(source)
    if to not in FORMATS:
        raise ValueError(f"to={to!r} is unknown.{nearest(str(to), FORMATS)} Possible: {', '.join(FORMATS)}")
    model = load(source)
    is_file = source.suffix == ".safetensors"
    if path is None:
        path = source.with_suffix(FORMATS[to]) if is_file else source / f"model{FORMATS[to]}"
    path = Path(path)
    if path.resolve() == source.resolve():
        raise ValueError(f"{path} is the file to export; give another path")
    if to == "safetensors":
        if is_file:
            raise ValueError(
                f"{source} holds weights as safetensors already; possible: a run folder, or another format"
            )
        if half:
            raise ValueError("half precision is not for safetensors, which hold the weights as they are")
        save_weights(Run(source), path)
        return ExportReport(path, to, path.stat().st_size, 0.0, notes=["dcnet.load reads it"])
    data, shape = _about(source)
    images, note = _test_images(data, shape, data_root)
    report = export(model, path, to, images, half=half, dynamic=dynamic, opset=opset)
    report.notes += [note] * bool(note)
    return report


def _about(source: Path) -> tuple[str, dict[str, int]]:
    """Return the name of the data that a network was trained on, and the shape of that."""
    if source.suffix != ".safetensors":
        run = Run(source)
        return run.recipe.data, run.shape
    with safe_open(source, "pt") as file:
        about: dict[str, Any] = json.loads(file.metadata()["about"])
    return about["recipe"]["data"], about["shape"]


def _test_images(data: str, shape: dict[str, int], root: str | Path) -> tuple[Tensor, str]:
    """Return a few images as the network takes them, and a note where they are not of its own test set."""
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
