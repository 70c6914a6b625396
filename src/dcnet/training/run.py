"""A run folder: recipe, metrics, checkpoint, result, attacks.

All other commands read only such folders.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.converting import restore_conversion_
from dcnet.formulas import parse_number
from dcnet.fusing import fuse_
from dcnet.layers import decoupled_layers
from dcnet.models import create_external, create_model, is_external
from dcnet.models.external import HUB
from dcnet.training.checkpoint import load_checkpoint, load_state, without_prefix
from dcnet.training.own_formulas import check_formulas
from dcnet.training.plain_kernels import normalize_ordinary_
from dcnet.training.recipe import Recipe
from dcnet.training.recipes import read_recipe
from dcnet.util.files import append_line, write_atomically, write_json
from dcnet.util.text import one_mismatch

Conversion = Mapping[str, Mapping[str, Any]]
OPERATOR = ("magnitude", "angular", "weighting", "radius", "where")  # fields: what is decoupled, and how


def layer_options(recipe: Recipe) -> dict[str, Any]:
    """Return the options of the recipe's decoupled layers for `decouple_` and `create_model`; none for a plain one."""
    if recipe.magnitude is None:
        return {}
    options: dict[str, Any] = {"weighting": recipe.weighting, "sync": recipe.sync}
    if recipe.radius != "learned":
        try:
            options["radius"] = parse_number(recipe.radius)
        except ValueError:
            raise ValueError(f"recipe: radius={recipe.radius!r}; possible: learned, or a number > 0") from None
    return options


def plain_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of the plain network of the same structure."""
    return replace(recipe, magnitude=None, weighting=None, radius="learned", where=(), sync=False, calibrate=0)


def build_model(
    recipe: Recipe, shape: dict[str, Any], conversion: Conversion | None = None, library_weights: bool = False
) -> nn.Module:
    """Return the recipe's network for data of that shape.

    Args:
        recipe: the recipe.
        shape: of the data: num_classes, in_channels, input_size.
        conversion: the converted layers of a network that was plain first, as `conversion_of` returns them.
        library_weights: load the weights that the network's library has for it.
    """
    if conversion is not None:
        images = torch.zeros(2, shape["in_channels"], shape["input_size"], shape["input_size"])
        return fuse_untraced_(restore_conversion_(build_model(plain_recipe(recipe), shape), conversion), images)
    if is_external(recipe.model):
        return create_external(recipe.model, **shape, pretrained=library_weights)
    options = layer_options(recipe)
    if recipe.penultimate_activation:
        options["penultimate_activation"] = True
    if not recipe.penultimate_norm:
        options["penultimate_norm"] = False
    if recipe.root_activation:
        options["root_activation"] = True
    named: dict[str, Any] = {
        name: None if value == "none" else value
        for name, value in (("norm", recipe.norm), ("activation", recipe.activation))
    }
    model = create_model(
        recipe.model, magnitude=recipe.magnitude, angular=recipe.angular, head=recipe.head, **named, **shape, **options
    )
    return normalize_ordinary_(model) if recipe.plain_kernels == "normalized" else model


def fuse_untraced_(model: nn.Module, images: Tensor) -> nn.Module:
    """Fuse a converted model in place by running it, if torch.fx could not trace it; return the model."""
    if not any(layer.fusion for layer in decoupled_layers(model).values()) and fuse_(model).unseen:
        fuse_(model, images)
    return model


def read_json(path: Path) -> Any:
    """Return the contents of the file; raise an error that names it if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged: {error}; move it away, and give the command that made it again"
        ) from error


_RESULT = {"accuracy", "loss", "epochs", "seconds", "images_per_second", "parameters"}
_EPOCH = {"epoch", "step", "seconds"}


class Run:
    """A training run on disk: `recipe`, `metrics`, `result`, `model`, `attacks`.

    Args:
        folder: the run folder, as `dcnet train` or `train` has made it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / "recipe.json").is_file():
            raise FileNotFoundError(f"{self.folder} is not a run folder{_what_it_is(self.folder)}")
        self.recipe = read_recipe(self.folder / "recipe.json")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    @property
    def result(self) -> dict[str, Any] | None:
        """The contents of `result.json`; None before the end."""
        path = self.folder / "result.json"
        if not path.is_file():
            return None
        found = read_json(path)
        if not isinstance(found, dict) or not set(found) >= _RESULT:
            raise ValueError(
                f"{path} is not what `dcnet train` writes; remove it, and have it made again: dcnet train "
                f"--resume {quote(str(self.folder))}"
            )
        return found

    @property
    def accuracy(self) -> float:
        """In percent, on the test set at the last epoch."""
        if self.result is None:
            raise ValueError(
                f"{self.folder} is not finished; go on with: dcnet train --resume {quote(str(self.folder))}"
            )
        return float(self.result["accuracy"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One entry per epoch."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return []
        *lines, _ = path.read_text(encoding="utf-8").split("\n")  # the last is empty, or cut off by a kill
        found = []
        for number, line in enumerate(lines, 1):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} is damaged in line {number} of {len(lines)}: {error.msg}") from error
        if wrong := [
            number for number, entry in enumerate(found, 1) if not isinstance(entry, dict) or not set(entry) >= _EPOCH
        ]:
            raise ValueError(
                f"{path} is not what `dcnet train` writes: line {wrong[0]} lacks one of {', '.join(sorted(_EPOCH))}"
            )
        return found

    def keep_metrics(self, step: int) -> None:
        """Remove the epochs that ended after that step, since a resumed run repeats them."""
        kept = [entry for entry in self.metrics if entry["step"] <= step]
        write_atomically(self.folder / "metrics.jsonl", "".join(json.dumps(entry) + "\n" for entry in kept).encode())

    def add_metrics(self, entry: dict[str, Any]) -> None:
        append_line(self.folder / "metrics.jsonl", json.dumps(entry))

    def diverge(self, record: dict[str, Any]) -> None:
        """Record where the loss was not finite; the folder keeps its last checkpoint."""
        write_json(self.folder / "diverged.json", record, indent=2)

    @property
    def divergence(self) -> dict[str, Any] | None:
        """Where and why the loss was not finite; None for a run whose loss always was."""
        path = self.folder / "diverged.json"
        return read_json(path) if path.is_file() else None

    def finish(self, result: dict[str, Any]) -> None:
        write_json(self.folder / "result.json", result, indent=2)

    @property
    def attacks(self) -> list[dict[str, Any]]:
        """The results of `dcnet attack`, one entry per call."""
        path = self.folder / "attacks.json"
        found = read_json(path) if path.is_file() else []
        if not isinstance(found, list) or not all(
            isinstance(result, dict) and {"attacks", "transfer", "labels"} <= set(result) for result in found
        ):
            raise ValueError(f"{path} is not what `dcnet attack` writes; remove it, and attack again")
        return found

    def add_attack(self, result: dict[str, Any]) -> Path:
        """Add the result of an attack; return the file."""
        return self.write_attacks([*self.attacks, result])

    def write_attacks(self, records: list[dict[str, Any]]) -> Path:
        """Replace all records of attacks by these; return the file."""
        path = self.folder / "attacks.json"
        write_json(path, records)
        return path

    def check_writable(self) -> None:
        """Raise if nothing can be written into the folder, before a long computation instead of after it."""
        try:
            with TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise ValueError(f"nothing can be written into {self.folder}: {error.strerror or error}") from error

    @property
    def shape(self) -> dict[str, int]:
        """The shape of its training data: num_classes, in_channels, input_size."""
        if not self.checkpoint.is_file():
            raise FileNotFoundError(self._no_weights)
        shape: dict[str, int] = load_state(self.checkpoint)["shape"]
        return shape

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of its classes; none if its checkpoint does not have them, as older ones."""
        data = load_state(self.checkpoint).get("data") if self.checkpoint.is_file() else None
        return tuple(data["classes"]) if data else ()

    @property
    def _no_weights(self) -> str:
        name = self.checkpoint.name
        if (self.folder / "result.json").is_file():  # a record, such as those under results/
            return f"{self.folder} is a finished run, but its weights ({name}) are not in this folder"
        return f"{self.folder} has no weights yet ({name}): no checkpoint has been written"

    @property
    def conversion(self) -> Conversion | None:
        """The converted layers of a network that was plain first, with their options; None for other networks."""
        return load_state(self.checkpoint).get("conversion") if self.checkpoint.is_file() else None

    @property
    def restored(self) -> bool:
        """Whether it was made from a file of weights, so that its training cannot go on."""
        return self.checkpoint.is_file() and bool(load_state(self.checkpoint).get("weights_only"))

    @property
    def weights(self) -> dict[str, Tensor]:
        """The state dict of `model`."""
        if not self.checkpoint.is_file():
            raise FileNotFoundError(self._no_weights)
        tensors, _ = load_checkpoint(self.checkpoint)
        weights = without_prefix("ema/" if self.recipe.ema is not None else "model/", tensors)
        return weights | without_prefix("calibrated/", tensors)

    @property
    def model(self) -> nn.Module:
        """The network with the weights of the last checkpoint, or their moving average, in evaluation mode.

        If there was an evaluation at that checkpoint, the running averages are those that it used.
        """
        weights = self.weights
        check_formulas(self.folder, self.recipe)
        model = build_model(self.recipe, self.shape, self.conversion)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = one_mismatch(error)
            raise ValueError(f"{self.checkpoint} does not fit {self.folder / 'recipe.json'}: {reason}") from error
        return model.eval()


def _what_it_is(path: Path) -> str:
    """Say what a path is that is not a run folder, and which commands take it."""
    others = "dcnet evaluate, predict, attack, export and finetune take it"
    if str(path).startswith(HUB):
        return f", but the name of a trained network; {others}, and dcnet.load({str(path)!r}) in Python"
    if path.suffix == ".safetensors" and path.is_file():
        return f", but a file of weights; where dcnet wrote it, {others}, and dcnet.load in Python"
    return f": it has no recipe.json (looked at {path.resolve()})"


def run_folders(folder: str | Path) -> list[Path]:
    """Return the run folders in a folder and below, by name."""
    return [path.parent for path in sorted(Path(folder).rglob("recipe.json"))]
