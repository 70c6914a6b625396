"""`dcnet predict`: what a trained network says of image files."""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from dcnet.cli.common import Device, RunArgument, fail, say, show_table
from dcnet.cli.own_formulas import Formulas, TrustFormulas, register
from dcnet.data import FOLDER, load_data
from dcnet.data.folder import class_names, middle_crop
from dcnet.data.official import OFFICIAL
from dcnet.training import Run, joined
from dcnet.training.settings import tf32
from dcnet.util.text import valid

_BATCH = 100


def predict(
    run: RunArgument,
    images: Annotated[list[Path], typer.Argument(help="Image files.", metavar="IMAGES...")],
    top: Annotated[int, typer.Option(min=1, help="How many classes to show, the likeliest first.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    device: Device = None,
    formulas: Formulas = None,
    trust_formulas: TrustFormulas = False,
) -> None:
    """Classify image files with a trained network. They are converted to the run's size and channels, and the table says how."""
    try:
        register(formulas, [run] if trust_formulas else ())
        found = Run(run)
        shape, names = found.shape, _classes(found)
        read, unreadable = _read(images, shape, found.recipe.data.startswith(FOLDER))
        with joined(device) as ranks, tf32(False), torch.no_grad():
            model = found.model.to(ranks.device)
            parts = [
                torch.stack([pixels for _, pixels, _ in read[i : i + _BATCH]]) for i in range(0, len(read), _BATCH)
            ]
            chances = (
                torch.cat([model(part.to(ranks.device).float() / 255.0).float().softmax(1).cpu() for part in parts])
                if parts
                else torch.empty(0, 1)
            )
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        fail(error)
    entries = []
    for (path, _, how), chance in zip(read, chances, strict=True):
        likeliest = chance.topk(min(top, len(names)))
        ranked = [
            {"class": names[i], "probability": round(p, 6)}
            for p, i in zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
        ]
        entries.append({"image": str(path), "prediction": ranked[0]["class"], "top": ranked, "converted": how})
    if as_json:
        typer.echo(valid(json.dumps([*entries, *unreadable], indent=2, ensure_ascii=False)))
    else:
        _show(run, entries)
        for entry in unreadable:
            say(f"error: {entry['error']}", stderr=True)
    if unreadable:
        raise typer.Exit(1)


def _show(run: Path, entries: list[dict[str, Any]]) -> None:
    rows = []
    for entry in entries:
        first, *others = entry["top"]
        rest = ", ".join(f"{other['class']} {100 * other['probability']:.1f}%" for other in others)
        rows.append(
            [
                entry["image"],
                first["class"],
                f"{100 * first['probability']:.1f}%",
                rest,
                entry["converted"] or "as it is",
            ]
        )
    if rows:
        show_table(("image", "prediction", "probability", "then", "converted"), rows, str(run), right=("probability",))


def _classes(run: Run) -> list[str]:
    """Return the names of the classes; where the run's image folder is not here any more, their numbers."""
    data, count = run.recipe.data, run.shape["num_classes"]
    if data.startswith(FOLDER):
        folder = Path(data.removeprefix(FOLDER)) / "train"
        names = list(class_names(folder)) if folder.is_dir() else []
    else:
        names = list(OFFICIAL[data].classes if data in OFFICIAL else load_data(data).classes)
    if len(names) != count:
        say(
            f"the names of the classes are not known here: {data} has {len(names)} of {count}; their numbers are shown",
            stderr=True,
        )
        return [str(number) for number in range(count)]
    return names


def _read(
    paths: list[Path], shape: dict[str, int], cropped: bool
) -> tuple[list[tuple[Path, Tensor, str]], list[dict[str, str]]]:
    """Return each image's path, its pixels as the network takes them, and how they were converted; and errors of those that cannot be read."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading images needs Pillow: pip install 'dcnet[images]'") from error
    size, mode = shape["input_size"], "L" if shape["in_channels"] == 1 else "RGB"
    read, unreadable = [], []
    for path in paths:
        try:
            with Image.open(path) as file:
                image = file.convert(mode)
                how = [] if file.mode == mode else [f"{file.mode} to {'gray' if mode == 'L' else 'RGB'}"]
        except (OSError, ValueError) as error:
            reason = "it does not exist" if not path.exists() else "it is a folder" if path.is_dir() else str(error)
            unreadable.append({"image": str(path), "error": f"{path} cannot be read as an image: {reason}"})
            continue
        if cropped:  # as the test images of a folder are
            pixels = middle_crop(image, size)
            how.append(f"{image.width}×{image.height}, resized, middle {size}×{size}")
        elif image.size != (size, size):
            pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
            how.append(f"resized from {image.width}×{image.height} to {size}×{size}")
        else:
            pixels = np.asarray(image)
        planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        read.append((path, torch.from_numpy(planes.copy()), "; ".join(how)))
    return read, unreadable
