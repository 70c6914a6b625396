"""A run folder made of a file of weights, for what reads run folders: attacks, figures, reports."""

import json
from pathlib import Path

import torch

from dcnet.models.external import HUB
from dcnet.training.checkpoint import save_checkpoint, with_prefix
from dcnet.training.folder import open_run
from dcnet.training.hub import weights_file
from dcnet.training.own_formulas import FILE as FORMULAS
from dcnet.training.recipes import recorded
from dcnet.training.run import Run
from dcnet.training.weights import about_of, check_own_formulas, read_weights
from dcnet.util.files import write_atomically


def restore_run(weights: str | Path, folder: str | Path | None = None, *, trust_formulas: bool = False) -> Run:
    """Make a run folder of a trained network in a file.

    It has recipe, result and weights, but neither the metrics of training nor what training goes on with.

    Args:
        weights: a .safetensors file that `dcnet table --keep-weights` or `dcnet export --to safetensors` has written,
            or "hub:NAME".
        folder: the run folder, which may have the records of the same run already; runs/NAME by default.
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
    place = Path("runs", str(weights).removeprefix(HUB) if str(weights).startswith(HUB) else path.stem)
    tensors, metadata = read_weights(path)
    about, formulas = about_of(path, metadata), metadata.get("formulas")
    recipe = recorded(about["recipe"])
    check_own_formulas(path, formulas, recipe, trust_formulas)
    run = open_run(place if folder is None else Path(folder), recipe)
    if run.checkpoint.is_file():
        there = run.model.state_dict()
        same = set(there) == set(tensors) and all(
            torch.equal(there[name].to(tensor.dtype), tensor)  # files may have them rounded to bfloat16
            for name, tensor in tensors.items()
        )
        if not same:
            raise ValueError(
                f"{run.folder} has other weights of the same recipe than {weights}; remove that folder, or give "
                "another one (in Python restore_run(weights, folder))"
            )
        return run
    if formulas is not None:
        write_atomically(run.folder / FORMULAS, formulas.encode())
    result = about.get("result")
    state = {
        "recipe": json.loads(recipe.to_json()),
        "shape": about["shape"],
        "conversion": about.get("conversion"),
        "data": {"classes": about.get("classes", [])},
        "step": 0 if result is None else result.get("steps", 0),
        "weights_only": True,
    }
    save_checkpoint(run.checkpoint, with_prefix("model/" if recipe.ema is None else "ema/", tensors), state)
    if result is not None and run.result is None:
        run.finish(result)
    return run
