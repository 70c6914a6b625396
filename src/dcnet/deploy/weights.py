"""Weights of any converted model as safetensors, with a record of the conversion.

Together they are enough to make the converted model again from the plain one.
"""

import copy
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dcnet.layers import conversion_of, restore_conversion_
from dcnet.version import __version__

FORMAT = "dcnet converted 1"


def save_model_weights(model: nn.Module) -> bytes:
    """Return the file that `load_weights_` reads."""
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    about = {"version": __version__, "model": type(model).__name__, "conversion": conversion_of(model)}
    return save(tensors, {"format": FORMAT, "about": json.dumps(about, ensure_ascii=False)})


def load_weights_(model: nn.Module, path: str | Path) -> nn.Module:
    """Convert a plain model as the one in the file was, load its weights, and return it.

    A file never executes anything. If it does not fit nothing is changed.

    Args:
        model: the same architecture, built anew, not converted yet (or converted in the same way).
        path: a file that `dcnet.export` has written, ending in .safetensors.
    """
    tensors, about = _read(Path(path))
    conversion = about["conversion"]
    trial = copy.deepcopy(model)
    try:
        if conversion_of(trial) != conversion:
            restore_conversion_(trial, conversion)
    except ValueError as error:
        raise ValueError(f"{path} does not fit {type(model).__name__}: {error}") from error
    own = {name: tensor.shape for name, tensor in trial.state_dict().items()}
    missing, unknown = [n for n in own if n not in tensors], [n for n in tensors if n not in own]
    wrong = [name for name in own if name in tensors and tensors[name].shape != own[name]]
    if missing or unknown or wrong:
        what = [f"it lacks {_some(missing)}"] * bool(missing) + [f"the model has no {_some(unknown)}"] * bool(unknown)
        what += [f"{name} is {tuple(tensors[name].shape)} there, {tuple(own[name])} here" for name in wrong[:3]]
        raise ValueError(
            f"{path} (weights of a {about['model']}) does not fit {type(model).__name__}: {'; '.join(what)}"
        )
    if conversion_of(model) != conversion:
        restore_conversion_(model, conversion)
    model.load_state_dict(tensors)
    return model


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if metadata.get("format") != FORMAT:
        hint = "; dcnet.load reads it" if str(metadata.get("format")).startswith("dcnet weights") else ""
        raise ValueError(
            f"{path} does not hold weights of dcnet.export: its format is {metadata.get('format')!r}, "
            f"expected {FORMAT!r}{hint}"
        )
    try:
        about = json.loads(metadata["about"])
        assert isinstance(about["conversion"], dict)
    except (KeyError, ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"{path} is damaged: its metadata cannot be read") from error
    return tensors, about


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
