"""The recipe that converts a trained network and trains it further."""

from pathlib import Path
from typing import Any

from dcnet.data import FOLDER
from dcnet.models import is_external, is_own, list_models
from dcnet.models.external import HUB
from dcnet.training.hub import TrainedFile, is_trained_file, open_trained
from dcnet.training.recipe import Recipe, change
from dcnet.training.run import OPERATOR, Run
from dcnet.training.weights import check_operator, find_weights, operator_of, origin_of

FINETUNE: dict[str, Any] = {"epochs": 5.0, "lr": 3e-4, "schedule": "onecycle", "warmup": 0.1, "calibrate": 10}
# Fields that a fine-tuned run takes over: those of its network and its data.
_OF_THE_RUN = (
    *("data", "image_size", "model", "norm", "activation", "penultimate_activation", "penultimate_norm"),
    *("root_activation", "head", "batch", "augment", "pad", "cutout"),
)


def finetune_recipe(model: str, weights: str | None = None, base: Recipe | None = None, **fields: Any) -> Recipe:
    """Return the recipe that converts a trained network to an operator, calibrates it, and trains it for some epochs.

    If the network of a run is decoupled already, it keeps its operator.

    Args:
        model: a run folder, a .safetensors file of its weights, "hub:NAME", timm:NAME, torchvision:NAME,
            MODULE:CALLABLE, or a name of `dcnet.list_models()`.
        weights: a .safetensors file, a run folder, or "library" for those that timm or torchvision downloads. The
            first three have their own, and MODULE:CALLABLE may load its own; the others need them.
        base: a recipe to change, instead of the usual one for fine-tuning.
        **fields: fields of the recipe. `magnitude=None` trains the plain network further.

    Examples:
        >>> import dcnet
        >>> recipe = dcnet.finetune_recipe("hub:cnn9-narrow-seg-digits", epochs=2.0, lr=1e-3)
        >>> recipe.magnitude, recipe.pretrained
        ('seg', 'hub:cnn9-narrow-seg-digits')
    """
    usual = Recipe() if base is None else base
    values: dict[str, Any] = dict(FINETUNE) if base is None else {"calibrate": FINETUNE["calibrate"]}
    trained = _trained(model)
    if trained is not None:
        if weights is not None:
            raise ValueError(f"weights={weights!r}: {model} is trained already, and has weights of its own")
        values |= {name: getattr(trained.recipe, name) for name in _OF_THE_RUN} | {"pretrained": model}
        if trained.recipe.magnitude is not None:
            values |= {name: getattr(trained.recipe, name) for name in OPERATOR} | {"calibrate": 0}
    else:
        if weights is not None and weights.startswith(HUB):
            raise ValueError(f"weights={weights!r} has its network with it; possible: dcnet finetune {weights}")
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
    _check_weights(model, recipe)
    if trained is not None and trained.recipe.magnitude is not None:
        check_operator(recipe, model, operator_of(trained.recipe))
    elif weights is not None and Path(weights).exists():
        origin = origin_of(find_weights(weights))
        if origin.operator.get("magnitude") is not None:
            check_operator(recipe, weights, origin.operator)
    return recipe


def _trained(model: str) -> Run | TrainedFile | None:
    """Return the trained network of that name; None for a network that has to be built."""
    if (Path(model) / "recipe.json").is_file() or is_trained_file(model):
        return open_trained(model)
    if ("/" in model or Path(model).exists()) and ":" not in model:
        raise ValueError(f"{model} is not a run folder: it has no recipe.json (looked at {Path(model).resolve()})")
    return None


def _check_weights(model: str, recipe: Recipe) -> None:
    """Raise if there are no trained weights to start from."""
    if recipe.pretrained is None and (model in list_models() or (is_external(model) and not is_own(model))):
        library = ", or library for those that it downloads" if is_external(model) else ""
        raise ValueError(
            f"{model} has no trained weights to start from: give --weights (in Python, weights=); possible: a "
            f".safetensors file, a run folder{library}. dcnet train starts with new weights"
        )
