"""A run folder made from a file of weights, for what reads run folders: attacks, figures, reports."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcnet.models.external import HUB
from dcnet.training.checkpoint import save_checkpoint, with_prefix
from dcnet.training.folder import open_run
from dcnet.training.hub import weights_file
from dcnet.training.own_formulas import FILE as FORMULAS
from dcnet.training.recipe import Recipe
from dcnet.training.recipes import recipe_differences, recorded
from dcnet.training.run import Run
from dcnet.training.weights import about_of, check_own_formulas, read_weights
from dcnet.util.files import write_atomically
from dcnet.util.lock import locked

_ELSEWHERE = "Possible: rename the file, remove that folder, or in Python restore_run(weights, another_folder)"


def restore_run(weights: str | Path, folder: str | Path | None = None, *, trust_formulas: bool = False) -> Run:
    """Make a run folder of a trained network in a file.

    It has recipe, result and weights, but neither the metrics of training nor what training goes on with.

    Args:
        weights: a .safetensors file that `dcnet table --keep-weights` or `dcnet export --to safetensors` has written,
            or "hub:NAME".
        folder: the run folder, which may have the records of the same training already; runs/NAME by default. Records
            or weights of another training are an error.
        trust_formulas: execute the copy of your own formulas in the file, if they are not registered here.

    Returns:
        The run. If the folder has these weights already, nothing is done.

    Examples:
        >>> import tempfile, dcnet
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as place:
        ...     run = dcnet.training.restore_run("hub:cnn9-narrow-seg-digits", Path(place) / "run")
        ...     run.recipe.magnitude
        'seg'
    """
    path = weights_file(weights)
    place = _folder_of(weights) if folder is None else Path(folder)
    tensors, metadata = read_weights(path)
    about, formulas = about_of(path, metadata), metadata.get("formulas")
    recipe, result = recorded(about["recipe"]), about.get("result")
    check_own_formulas(path, formulas, recipe, trust_formulas)
    _check_there(place, weights, about, tensors)
    run = open_run(place, recipe)
    if run.checkpoint.is_file() and (result is None or run.result is not None):
        return run
    with locked(run.folder):  # a process may train there
        _check_there(place, weights, about, tensors)
        if formulas is not None:
            write_atomically(run.folder / FORMULAS, formulas.encode())
        if not run.checkpoint.is_file():
            save_checkpoint(run.checkpoint, *_checkpoint(recipe, about, tensors))
        if result is not None and run.result is None:
            run.finish(result)
    return run


def restored_run(weights: str | Path) -> Run | None:
    """Return the run that `restore_run` has made of a file in runs/NAME; None if it has not."""
    path = weights_file(weights)
    tensors, metadata = read_weights(path)
    return _check_there(_folder_of(weights), weights, about_of(path, metadata), tensors)


def _folder_of(weights: str | Path) -> Path:
    name = str(weights)
    return Path("runs", name.removeprefix(HUB) if name.startswith(HUB) else Path(name).stem)


def _check_there(folder: Path, weights: str | Path, about: dict[str, Any], tensors: dict[str, Tensor]) -> Run | None:
    """Return the run in a folder, None if there is none; raise if it is not the one that a file of weights is from."""
    if not (folder / "recipe.json").is_file():
        return None
    run, result = Run(folder), about.get("result")
    if other := recipe_differences(run.recipe, recorded(about["recipe"])):
        words = ", ".join(other.values())
        raise ValueError(f"{folder} has a run of another recipe than {weights}: {words}. {_ELSEWHERE}")
    if run.checkpoint.is_file():
        if not _same(run.weights, tensors):
            raise ValueError(f"{folder} has other weights of the same recipe than {weights}. {_ELSEWHERE}")
    elif run.result != result and (run.result or run.metrics or run.attacks):
        raise ValueError(
            f"{folder} has records of another training of the same recipe than {weights}: {_in_words(run.result)} "
            f"there, {_in_words(result)} here. {_ELSEWHERE}"
        )
    return run


def _same(there: dict[str, Tensor], here: dict[str, Tensor]) -> bool:
    """Return whether weights are the same, where files may have them rounded to bfloat16."""
    return set(there) == set(here) and all(
        torch.equal(there[name].to(tensor.dtype), tensor) for name, tensor in here.items()
    )


def _in_words(result: dict[str, Any] | None) -> str:
    return "no result" if result is None else f"{result['accuracy']:.2f}% in {result['seconds']:.1f} s"


def _checkpoint(recipe: Recipe, about: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors and the state of a checkpoint that has weights alone."""
    finished = about.get("result") or {}
    state = {
        "recipe": json.loads(recipe.to_json()),
        "shape": about["shape"],
        "conversion": about.get("conversion"),
        "data": {"classes": about.get("classes", [])},
        "step": about.get("step", finished.get("steps", 0)),
        "weights_only": True,
    }
    return with_prefix("model/" if recipe.ema is None else "ema/", tensors), state
