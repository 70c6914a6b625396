"""A run folder: recipe, metrics, checkpoint, result, attacks. Every other command reads such a folder and nothing else."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from tempfile import TemporaryFile
from typing import Any

from torch import nn

from dcnet.formulas import parse_number
from dcnet.models import create_model
from dcnet.training.checkpoint import load_checkpoint, load_state, without_prefix, write_atomically
from dcnet.training.recipe import Recipe, read_recipe


def build_model(recipe: Recipe, shape: dict[str, Any]) -> nn.Module:
    """The recipe's network for data of that shape: num_classes, in_channels, input_size."""
    options: dict[str, Any] = {}
    if recipe.magnitude is not None:
        try:
            radius: str | float = recipe.radius if recipe.radius == "learned" else parse_number(recipe.radius)
        except ValueError:
            raise ValueError(f"recipe: radius={recipe.radius!r}; possible: learned, or a number > 0") from None
        options = {"weighting": recipe.weighting, "sync": recipe.sync}
        if radius != "learned":
            options["radius"] = radius
    if recipe.penultimate_activation:
        options["penultimate_activation"] = True
    named: dict[str, Any] = {name: None if value == "none" else value for name, value in (("norm", recipe.norm), ("activation", recipe.activation))}
    return create_model(recipe.model, magnitude=recipe.magnitude, angular=recipe.angular, head=recipe.head, **named, **shape, **options)


def read_json(path: Path) -> Any:
    """What the file holds; raises with its name where it cannot be read."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; remove it to have it made again") from error


_RESULT = {"accuracy", "loss", "epochs", "seconds", "images_per_second", "parameters"}
_EPOCH = {"epoch", "step", "seconds"}


class Run:
    """A training run on disk."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / "recipe.json").is_file():
            raise FileNotFoundError(f"{self.folder} is not a run folder: it has no recipe.json (looked at {self.folder.resolve()})")
        self.recipe = read_recipe(self.folder / "recipe.json")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    @property
    def result(self) -> dict[str, Any] | None:
        """What `result.json` says; None before the end."""
        path = self.folder / "result.json"
        if not path.is_file():
            return None
        found = read_json(path)
        if not isinstance(found, dict) or not set(found) >= _RESULT:
            raise ValueError(
                f"{path} is not what `dcnet train` writes; remove it, and have it made again: dcnet train --resume {quote(str(self.folder))}"
            )
        return found

    @property
    def accuracy(self) -> float:
        """In percent, on the test set at the last epoch."""
        if self.result is None:
            raise ValueError(f"{self.folder} is not finished; go on with: dcnet train --resume {quote(str(self.folder))}")
        return self.result["accuracy"]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One entry an epoch."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return []
        *lines, _ = path.read_text().split("\n")  # the last is empty, or cut off by a kill
        try:
            found = [json.loads(line) for line in lines]
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if wrong := [number for number, entry in enumerate(found, 1) if not isinstance(entry, dict) or not set(entry) >= _EPOCH]:
            raise ValueError(f"{path} is not what `dcnet train` writes: line {wrong[0]} lacks one of {', '.join(sorted(_EPOCH))}")
        return found

    def keep_metrics(self, step: int) -> None:
        """Forgets the epochs that ended after that step: a resumed run does them again."""
        kept = [entry for entry in self.metrics if entry["step"] <= step]
        write_atomically(self.folder / "metrics.jsonl", "".join(json.dumps(entry) + "\n" for entry in kept).encode())

    def add_metrics(self, entry: dict[str, Any]) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, result: dict[str, Any]) -> None:
        write_atomically(self.folder / "result.json", (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode())

    @property
    def attacks(self) -> list[dict[str, Any]]:
        """What `dcnet attack` found, one entry a call."""
        path = self.folder / "attacks.json"
        found = read_json(path) if path.is_file() else []
        if not isinstance(found, list) or not all(isinstance(result, dict) and {"attacks", "transfer", "labels"} <= set(result) for result in found):
            raise ValueError(f"{path} is not what `dcnet attack` writes; remove it, and attack again")
        return found

    def add_attack(self, result: dict[str, Any]) -> Path:
        """Adds what an attack found; gives the file."""
        return self.write_attacks([*self.attacks, result])

    def write_attacks(self, records: list[dict[str, Any]]) -> Path:
        """Keep these records of attacks and no others; give the file."""
        path = self.folder / "attacks.json"
        write_atomically(path, (json.dumps(records, ensure_ascii=False) + "\n").encode())
        return path

    def check_writable(self) -> None:
        """Raise where nothing can be written into the folder: before a long computation rather than after it."""
        try:
            with TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise ValueError(f"nothing can be written into {self.folder}: {error.strerror or error}") from error

    @property
    def shape(self) -> dict[str, int]:
        """Of the data it was trained on: num_classes, in_channels, input_size."""
        if not self.checkpoint.is_file():
            raise FileNotFoundError(f"{self.folder} has no checkpoint yet")
        return load_state(self.checkpoint)["shape"]

    @property
    def model(self) -> nn.Module:
        """The network with the weights of the last checkpoint (their moving average, where there is one), in evaluation mode.

        Its running averages are those the evaluation at that checkpoint has used, where there was one.
        """
        if not self.checkpoint.is_file():
            raise FileNotFoundError(f"{self.folder} has no checkpoint yet")
        tensors, state = load_checkpoint(self.checkpoint)
        model = build_model(self.recipe, state["shape"])
        try:
            weights = without_prefix("ema/" if self.recipe.ema is not None else "model/", tensors)
            model.load_state_dict(weights | without_prefix("calibrated/", tensors))
        except RuntimeError as error:
            raise ValueError(f"{self.checkpoint} does not fit {self.folder / 'recipe.json'}: {error}") from error
        return model.eval()


def check_free(folder: Path, recipe: Recipe) -> None:
    """Raises if another recipe's run is in the folder."""
    if (folder / "recipe.json").is_file():
        there = asdict(Run(folder).recipe)
        other = {name: (there[name], value) for name, value in asdict(recipe).items() if there[name] != value}
        if other:
            differences = ", ".join(f"{name}={old!r} there, {new!r} here" for name, (old, new) in other.items())
            raise ValueError(f"{folder} holds another recipe's run: {differences}. Choose another folder, or remove that one")
    elif folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; a run needs a folder")


def open_run(folder: Path, recipe: Recipe) -> Run:
    """The run in the folder, made if there is none; raises if another recipe's is there."""
    check_free(folder, recipe)
    if not (folder / "recipe.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "recipe.json", recipe.to_json().encode())
    return Run(folder)


def load(folder: str | Path) -> nn.Module:
    """The network a run has trained, in evaluation mode: images in [0, 1] to logits."""
    return Run(folder).model


def find_runs(folder: str | Path) -> list[Run]:
    """The runs in a folder and below, by name."""
    return [Run(path) for path in run_folders(folder)]


def run_folders(folder: str | Path) -> list[Path]:
    """The run folders in a folder and below, by name."""
    return [path.parent for path in sorted(Path(folder).rglob("recipe.json"))]
