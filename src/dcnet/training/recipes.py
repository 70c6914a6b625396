"""Recipes by name (the paper's, a quick one, the demo's), and recipes in files."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from dcnet.training.recipe import Recipe, change, hints
from dcnet.util.suggest import nearest

# The paper's recipes are evaluated with the averages of training, as in the paper. Since learning rates end low, these
# do not lag behind.
_PAPER: dict[str, Any] = {
    "recalibrate": 0,
    "label_smoothing": 0.01,
    "weight_decay": 5e-4,
    "projection": 100,
    "orthogonality": 1e-5,
    "schedule": "step",
}
_CIFAR = _PAPER | {
    "augment": "crop+flip",
    "steps": 42_500,
    "milestones": (20_000 / 42_500, 30_000 / 42_500, 37_500 / 42_500),
}
RECIPES: dict[str, dict[str, Any]] = {
    "paper-cifar": _CIFAR | {"data": "cifar100", "model": "cnn9"},
    "paper-cifar-sgd": _CIFAR | {"data": "cifar100", "model": "cnn9", "optimizer": "sgd", "lr": 0.1},
    "paper-imagenet": _PAPER
    | {
        "data": "imagefolder:imagenet",
        "model": "resnet18",
        "optimizer": "sgd",
        "lr": 0.1,
        "batch": 40,
        "steps": 700_000,
        "weight_decay": 1e-4,
    }
    | {"milestones": (200 / 700, 375 / 700, 550 / 700), "decay_shortcuts": False, "save_every": 5000},
    "paper-adversarial": {
        "recalibrate": 0,
        "data": "cifar10",
        "model": "cnn9_narrow",
        "augment": "crop+flip",
        "epochs": 100.0,
    }
    | {"schedule": "step", "milestones": (0.5, 0.75, 0.9)},  # not "plateau": the same learning rates for all
    "fast-cifar": {
        "data": "cifar10",
        "model": "cnn9",
        "augment": "crop+flip",
        "optimizer": "sgd",
        "nesterov": True,
        "lr": 0.4,
        "batch": 512,
    }
    | {
        "epochs": 20.0,
        "schedule": "onecycle",
        "weight_decay": 5e-4,
        "label_smoothing": 0.1,
        "precision": "bf16",
        "channels_last": True,
    }
    | {"evaluate_every": 0, "graphs": True},
    # what people use today, the same for decoupled and plain networks; not the paper's
    "best-cifar": {
        "data": "cifar100",
        "model": "resnet32",
        "augment": "crop+flip+cutmix",
        "optimizer": "sgd",
        "nesterov": True,
        "lr": 0.2,
        "batch": 256,
    }
    | {
        "epochs": 60.0,
        "schedule": "onecycle",
        "weight_decay": 5e-4,
        "label_smoothing": 0.1,
        "ema": 0.999,
        "precision": "bf16",
        "channels_last": True,
    }
    | {"evaluate_every": 10, "graphs": True},
    "demo": {
        "data": "digits",
        "model": "cnn9_narrow",
        "norm": "batch",
        "epochs": 8.0,
        "batch": 64,
        "lr": 2e-3,
        "schedule": "onecycle",
    }
    | {"augment": "crop", "pad": 1},
}


def make_recipe(name: str | None = None, **overrides: Any) -> Recipe:
    """Return the named recipe, with fields replaced; without a name, the defaults.

    Args:
        name: a recipe by name; `dcnet recipes` lists them.
        **overrides: fields of `Recipe`. Giving `epochs` takes the place of the recipe's `steps`.

    Examples:
        >>> import dcnet
        >>> dcnet.make_recipe("demo", magnitude="seg", epochs=2).magnitude
        'seg'
    """
    if name is not None and name not in RECIPES:
        raise ValueError(
            f"unknown recipe {name!r}.{nearest(name, RECIPES)} Known: {', '.join(RECIPES)}, or a JSON file"
        )
    return change(Recipe(**({} if name is None else RECIPES[name])), **overrides)


def read_recipe(path: str | Path) -> Recipe:
    """Return the recipe in a JSON file, such as `recipe.json` of a run folder.

    Args:
        path: the file.

    Examples:
        >>> import tempfile, dcnet
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "mine.json"
        ...     _ = path.write_text(dcnet.make_recipe("demo", seed=3).to_json())
        ...     recipe = dcnet.read_recipe(path)
        >>> recipe.seed
        3
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not a recipe: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a recipe: it holds {type(values).__name__}, expected an object")
    return recorded(values)


# Values of fields in records from before these fields existed, if they differ from today's defaults.
_BEFORE = {"recalibrate": 0}


def recorded(values: dict[str, Any]) -> Recipe:
    """Return the recipe of a record with these values, from this version or one with fewer fields."""
    whole = len(values) > len(hints) // 2  # a record has all fields of its time; a few fields are written by hand
    return change(Recipe(), **((_BEFORE | values) if whole else values))


def recipe_differences(there: Recipe, here: Recipe) -> dict[str, str]:
    """Return the fields in which two recipes differ, with words for each."""
    pairs = {field.name: (getattr(there, field.name), getattr(here, field.name)) for field in fields(Recipe)}
    return {name: f"{name}={old!r} there, {new!r} here" for name, (old, new) in pairs.items() if old != new}
