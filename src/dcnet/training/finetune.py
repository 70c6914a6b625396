"""The recipe that converts a trained network and trains it further."""

from pathlib import Path
from typing import Any

from dcnet.data import FOLDER
from dcnet.models import is_external, is_own, list_models
from dcnet.training.recipe import Recipe, change
from dcnet.training.run import OPERATOR, Run

FINETUNE: dict[str, Any] = {"epochs": 5.0, "lr": 3e-4, "schedule": "onecycle", "warmup": 0.1, "calibrate": 10}
# Of a run that is fine-tuned: what its network is, and what it was trained on.
_OF_THE_RUN = (
    *("data", "image_size", "model", "norm", "activation", "penultimate_activation", "penultimate_norm"),
    *("root_activation", "head", "batch", "augment", "pad", "cutout"),
)


def finetune_recipe(model: str, weights: str | None = None, base: Recipe | None = None, **fields: Any) -> Recipe:
    """Return the recipe that converts a trained network to an operator, calibrates it, and trains it for some epochs.

    Where the network of a run is decoupled already, it keeps its operator.

    Args:
        model: a run folder, timm:NAME, torchvision:NAME, MODULE:CALLABLE, or a name of `dcnet.list_models()`.
        weights: a .safetensors file, a run folder, or "library" for those that timm or torchvision downloads. Only a
            run folder, of which the own weights are used, and MODULE:CALLABLE, which may load its own, do without.
        base: a recipe to change, instead of the usual one for fine-tuning.
        **fields: fields of the recipe. `magnitude=None` trains the plain network further.
    """
    usual = Recipe() if base is None else base
    values: dict[str, Any] = dict(FINETUNE) if base is None else {"calibrate": FINETUNE["calibrate"]}
    if (Path(model) / "recipe.json").is_file():
        run = Run(model)
        if weights is not None:
            raise ValueError(f"weights={weights!r}: {model} is a run folder, and has weights of its own")
        values |= {name: getattr(run.recipe, name) for name in _OF_THE_RUN} | {"pretrained": model}
        if run.recipe.magnitude is not None:
            values |= {name: getattr(run.recipe, name) for name in OPERATOR} | {"calibrate": 0}
    else:
        if ("/" in model or Path(model).exists()) and ":" not in model:
            raise ValueError(f"{model} is not a run folder: it has no recipe.json (looked at {Path(model).resolve()})")
        values |= {"model": model} | ({} if weights is None else {"pretrained": weights})
        data = fields.get("data", usual.data)
        if data.startswith(FOLDER):
            values["augment"] = "none"
        elif data.startswith("cifar") and base is None:
            values["augment"] = "crop+flip"
    values |= fields
    if values.get("magnitude", usual.magnitude) is None and "calibrate" not in fields:
        values["calibrate"] = 0
    recipe = change(usual, **values)
    if recipe.pretrained is None and (model in list_models() or (is_external(model) and not is_own(model))):
        library = ", or library for those that it downloads" if is_external(model) else ""
        raise ValueError(
            f"{model} has no trained weights to start from: give --weights (in Python, weights=); possible: a "
            f".safetensors file, a run folder{library}. dcnet train starts with new weights"
        )
    return recipe
