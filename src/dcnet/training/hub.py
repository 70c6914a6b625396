"""Trained networks that come with dcnet, by name: `dcnet.load("hub:NAME")`.

They are in a folder: `NAME.safetensors`, with recipe, formulas and results in the metadata, and `index.json`, a list
with the name, data, accuracy and digest of each. One folder comes with the package; the environment variable DCNET_HUB
names another, which is searched first.
"""

import hashlib
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import nn

from dcnet.models.external import HUB
from dcnet.training.own_formulas import trust_formulas as execute_formulas
from dcnet.training.recipes import recorded
from dcnet.training.run import Run, read_json
from dcnet.training.weights import (
    Trained,
    about_of,
    check_own_formulas,
    read_weights,
    save_weights,
    trained_by,
    trained_in,
)
from dcnet.util.files import write_json
from dcnet.util.suggest import nearest

_INDEX = "index.json"
_FIELDS = ("name", "data", "model", "operator", "accuracy", "parameters", "sha256")


def load(path: str | Path, *, trust_formulas: bool = False) -> nn.Module:
    """Return a trained network in evaluation mode: images in [0, 1] to logits.

    Args:
        path: a run folder, a .safetensors file that `dcnet export --to safetensors` or `dcnet table --keep-weights` has
            written, or "hub:NAME" for one of `dcnet.trained_models()`.
        trust_formulas: execute the copy of your own formulas in the folder or file, if they are not registered here.

    Examples:
        >>> import torch, dcnet
        >>> model = dcnet.load("hub:cnn9-narrow-seg-digits")
        >>> model(torch.rand(1, 1, 8, 8)).shape
        torch.Size([1, 10])
    """
    return open_trained(path, trust_formulas=trust_formulas).model


class TrainedFile:
    """A trained network in a file of `save_weights`, with the attributes of a run that others read.

    Args:
        path: the file.
        name: what the user calls it; the path if not given.
        trust_formulas: execute the copy of your own formulas in it.
    """

    def __init__(self, path: Path, name: str | None = None, trust_formulas: bool = False) -> None:
        self.path, self.folder = path, name or path
        metadata = read_weights(path)[1]
        about = about_of(path, metadata)
        self.recipe, self.shape = recorded(about["recipe"]), about["shape"]
        self.classes: tuple[str, ...] = tuple(about.get("classes", ()))
        self.result, self.conversion = about.get("result"), about.get("conversion")
        check_own_formulas(path, metadata.get("formulas"), self.recipe, trust_formulas)

    @property
    def model(self) -> nn.Module:
        """The network, in evaluation mode."""
        return trained_in(self.path).model


def is_trained_file(name: str | Path) -> bool:
    """Tell whether this is a trained network other than a run folder: hub:NAME, or a .safetensors file."""
    return str(name).startswith(HUB) or Path(name).suffix == ".safetensors"


def open_trained(name: str | Path, *, trust_formulas: bool = False) -> Run | TrainedFile:
    """Return the run of a folder, or the trained network of a .safetensors file or "hub:NAME".

    trust_formulas: execute the copy of your own formulas in it, if they are not registered here.
    """
    if not isinstance(name, str | os.PathLike):
        raise TypeError(
            f"a trained network is named by a path or by hub:NAME, got {name!r}; possible: a run folder, a "
            ".safetensors file of its weights, or hub: and one of dcnet.trained_models()"
        )
    if is_trained_file(name):
        return TrainedFile(weights_file(name), str(name), trust_formulas)
    if trust_formulas:
        execute_formulas(Path(name))
    return Run(name)


def weights_file(name: str | Path) -> Path:
    """Return the file of a trained network; for "hub:NAME", the one in the hub."""
    return find_in_hub(str(name).removeprefix(HUB)) if str(name).startswith(HUB) else Path(name)


def hub_folders() -> list[Path]:
    """Return the folders to search, the user's own first."""
    own = os.environ.get("DCNET_HUB")
    return [*([Path(own)] if own else []), Path(str(files("dcnet") / "hub"))]


def trained_models() -> dict[str, dict[str, Any]]:
    """Return all trained networks by name, with their data, model, operator and accuracy.

    Examples:
        >>> import dcnet
        >>> dcnet.trained_models()["cnn9-narrow-seg-digits"]["operator"]
        'seg + square_cosine'
    """
    found: dict[str, dict[str, Any]] = {}
    for folder in hub_folders():
        for entry in _index(folder):
            found.setdefault(entry["name"], entry | {"file": folder / f"{entry['name']}.safetensors"})
    return found


def find_in_hub(name: str) -> Path:
    """Return the file of a trained network; raise if there is none, or if its digest differs from the index."""
    known = trained_models()
    if name not in known:
        there = ", ".join(known) or "none"
        raise ValueError(f"no trained network {name!r}.{nearest(name, known)} There are: {there}")
    path = known[name]["file"]
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent / _INDEX} has the trained network {name!r}, but there is no file {path}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != known[name]["sha256"]:
        raise ValueError(f"{path} is not the file that {path.parent / _INDEX} describes: its sha256 is another one")
    return path  # type: ignore[no-any-return]


def add_to_hub(trained: Run | Trained, name: str, folder: str | Path) -> Path:
    """Write a network in bfloat16 to a folder of trained networks, and add it to the index; return the file.

    trained: a finished run, or the result of `trained_in` for a file of its weights.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise ValueError(f"name={name!r}; possible: small letters, digits, and - _ . between them")
    if isinstance(trained, Run):
        if trained.result is None:
            raise ValueError(f"{trained.folder} is not finished; only finished runs can be added")
        trained = trained_by(trained)
    recipe, result = recorded(trained.about["recipe"]), trained.about.get("result")
    if result is None:
        raise ValueError(
            f"the weights for {name!r} are of a run that was not finished; only finished ones can be added"
        )
    folder = Path(folder)
    others = [entry for entry in _index(folder) if entry["name"] != name]  # may raise, so it is read before writing
    path = folder / f"{name}.safetensors"
    save_weights(trained, path, bf16=True)
    operator = "plain" if recipe.magnitude is None else f"{recipe.magnitude} + {recipe.angular}"
    entry = {
        "name": name,
        "data": recipe.data,
        "model": recipe.model,
        "operator": operator if recipe.weighting is None else f"{operator}, weighting {recipe.weighting}",
        "accuracy": round(result["accuracy"], 2),
        "parameters": result["parameters"],
        "epochs": result["epochs"],
        "robustness": trained.about.get("robustness"),
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    write_json(folder / _INDEX, sorted([*others, entry], key=lambda one: one["name"]), indent=2)
    return path


def _index(folder: Path) -> list[dict[str, Any]]:
    path = folder / _INDEX
    if not path.is_file():
        return []
    found = read_json(path)
    if not isinstance(found, list) or not all(
        isinstance(entry, dict) and set(entry) >= set(_FIELDS) for entry in found
    ):
        raise ValueError(
            f"{path} is not an index of trained networks: a list of objects with {', '.join(_FIELDS)} is expected"
        )
    for entry in found:
        if Path(str(entry["name"])).name != entry["name"]:
            raise ValueError(f"{path} has the name {entry['name']!r}, which is not that of a file beside it")
    return found
