"""Weights of any converted model as safetensors, with a record of the conversion.

Together they are enough to make the converted model again from the plain one.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dcnet.converting import conversion_of, restore_conversion_
from dcnet.converting.candidates import refuse_wrapped
from dcnet.formulas.sources import FILE, check_source, execute_source, formula_names, source_of
from dcnet.fusing.wrappers import unwrap
from dcnet.layers.types import Model
from dcnet.util.text import few
from dcnet.version import __version__

FORMAT = "dcnet converted 1"


def save_model_weights(model: nn.Module, path: Path) -> bytes:
    """Return the file for `load_weights_` as bytes; formulas that do not come with dcnet are in it as source."""
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    conversion = conversion_of(model)
    about = {"version": __version__, "model": type(model).__name__, "conversion": conversion}
    metadata = {"format": FORMAT, "about": json.dumps(about, ensure_ascii=False)}
    source = source_of(_formulas(conversion), path)
    return save(tensors, metadata if source is None else metadata | {"formulas": source})


def _formulas(conversion: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    return formula_names((str(how["magnitude"]), str(how["angular"])) for how in conversion.values())


def load_weights_(model: Model, path: str | Path, *, trust_formulas: bool = False) -> Model:
    """Convert a plain model as the one in the file was converted, load its weights, and return it.

    A file executes nothing unless `trust_formulas` says so. If it does not fit, nothing is changed.

    Args:
        model: a new model of the same architecture, not converted yet (or converted in the same way). It may be in
            torch.compile or DataParallel; in DistributedDataParallel it must be converted already.
        path: a file that `dcnet.export` has written, ending in .safetensors.
        trust_formulas: execute the copy of your own formulas in the file, if they are not registered here.

    Examples:
        >>> import tempfile, dcnet
        >>> from pathlib import Path
        >>> model, again = (nn.Sequential(nn.Conv2d(3, 8, 3)) for _ in range(2))
        >>> report = dcnet.decouple_(model, "ball")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = dcnet.export(model, Path(folder) / "model.safetensors")
        ...     again = dcnet.load_weights_(again, report.path)
        >>> again[0].magnitude
        'ball'
    """
    tensors, about, source = _read(Path(path))
    inside = unwrap(model)
    conversion = about["conversion"]
    if trust_formulas and source is not None:
        execute_source(source, f"{path}: {FILE}")
    check_source(source, _formulas(conversion), path, f"{path}: {FILE}", made="exported")
    if new := conversion_of(inside) != conversion:
        refuse_wrapped(model, "load_weights_ cannot add parameters to", "load")
    trial = copy.deepcopy(inside)
    try:
        if new:
            restore_conversion_(trial, conversion)
    except ValueError as error:
        raise ValueError(f"{path} does not fit {type(inside).__name__}: {error}") from error
    own = {name: tensor.shape for name, tensor in trial.state_dict().items()}
    missing, unknown = [n for n in own if n not in tensors], [n for n in tensors if n not in own]
    wrong = [name for name in own if name in tensors and tensors[name].shape != own[name]]
    if missing or unknown or wrong:
        what = [f"it lacks {few(missing)}"] * bool(missing) + [f"the model has no {few(unknown)}"] * bool(unknown)
        what += [f"{name} is {tuple(tensors[name].shape)} there, {tuple(own[name])} here" for name in wrong[:3]]
        raise ValueError(
            f"{path} (weights of a {about['model']}) does not fit {type(inside).__name__}: {'; '.join(what)}"
        )
    if new:
        restore_conversion_(inside, conversion)
    inside.load_state_dict(tensors)
    return model


def conversion_in(path: Path) -> dict[str, dict[str, Any]]:
    """Return the record of the conversion in a file of `dcnet.export`; it is empty if nothing was converted."""
    return dict(_read(path)[1]["conversion"])


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str | None]:
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
        _formulas(about["conversion"])
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"{path} is damaged: its metadata cannot be read") from error
    return tensors, about, metadata.get("formulas")
