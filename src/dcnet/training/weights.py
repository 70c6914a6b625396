"""Weights in safetensors files: dcnet's own with recipe and formulas in the metadata, and others; never pickles."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dcnet.deploy.weights import FORMAT as CONVERTED
from dcnet.deploy.weights import conversion_in
from dcnet.formulas.sources import check_source, execute_source
from dcnet.robustness.records import check_up_at, eps_of
from dcnet.training.checkpoint import FORMAT as CHECKPOINT
from dcnet.training.checkpoint import load_state
from dcnet.training.own_formulas import FILE as FORMULAS
from dcnet.training.own_formulas import names_of
from dcnet.training.recipe import Recipe
from dcnet.training.recipes import recorded
from dcnet.training.run import OPERATOR, Conversion, Run, build_model
from dcnet.util.files import write_atomically
from dcnet.util.text import few, one_mismatch

WEIGHTS = "dcnet weights 1"
LIBRARY = "library"
Source = Run | Path | str
_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".tar")
_OF_DECOUPLED = ("raw_", "running_norm")  # tensors that only decoupled layers have
_EXTRAS = (*_OF_DECOUPLED, "num_batches_tracked")  # and BatchNorm


class Origin(NamedTuple):
    """What is known about the network of saved weights."""

    name: str
    operator: dict[str, Any]  # fields of recipes; empty if nothing is known
    conversion: Conversion | None  # of a network that was plain first; for an exported one, all decoupled layers
    decoupled: str | None = None  # a tensor that only decoupled layers have
    exported: bool = False


class Trained(NamedTuple):
    """A trained network, its description (recipe, shape, result, conversion, robustness), and its own formulas."""

    model: nn.Module
    about: dict[str, Any]
    formulas: str | None


def trained_by(run: Run) -> Trained:
    """Return the network of a run."""
    if not run.checkpoint.is_file():
        raise FileNotFoundError(
            f"{run.folder} has no weights, as there is no {run.checkpoint.name}; of a table's cell, --keep-weights "
            "keeps them in a file of their own"
        )
    where, own = run.recipe.pretrained, run.folder / FORMULAS
    about = {
        "recipe": asdict(run.recipe) | {"pretrained": where and Path(where).name},  # without its folder
        "shape": run.shape,
        "classes": list(run.classes),
        "result": run.result,
        "step": load_state(run.checkpoint)["step"],
        "conversion": run.conversion,
        "robustness": robustness_of(run),
    }
    return Trained(run.model, about, own.read_text(encoding="utf-8") if own.is_file() else None)


def trained_in(path: Path, *, trust_formulas: bool = False) -> Trained:
    """Return the network of a file of `save_weights`, in evaluation mode."""
    tensors, metadata = read_weights(path)
    about, formulas = about_of(path, metadata), metadata.get("formulas")
    recipe = recorded(about["recipe"])
    check_own_formulas(path, formulas, recipe, trust_formulas)
    model = build_model(recipe, about["shape"], about.get("conversion"))
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the recipe in it: {one_mismatch(error)}") from error
    return Trained(model.eval(), about, formulas)


def save_weights(trained: Run | Trained, path: Path, bf16: bool = False) -> None:
    """Write the weights of a run's network to a file that `load` reads.

    The file also has recipe and formulas, but no optimizer state.

    Args:
        trained: a run with its checkpoint, or a network with its description.
        path: the file, ending in .safetensors.
        bf16: write parameters in bfloat16, half as large; running averages keep their dtype.
    """
    model, about, formulas = trained_by(trained) if isinstance(trained, Run) else trained
    path.parent.mkdir(parents=True, exist_ok=True)
    parameters = {name for name, _ in model.named_parameters()} if bf16 else set()
    tensors = {
        name: (tensor.to(torch.bfloat16) if name in parameters else tensor).contiguous()
        for name, tensor in model.state_dict().items()
    }
    metadata = {"format": WEIGHTS, "about": json.dumps(about)}
    write_atomically(path, save(tensors, metadata if formulas is None else metadata | {"formulas": formulas}))


def robustness_of(run: Run) -> dict[str, Any] | None:
    """Return a summary of the attacks on a run, accuracies and the verdict of the check-up; None without attacks."""
    return summary_of(run.attacks)


def summary_of(attacks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return a summary of the records of attacks on the network itself."""
    records = [record for record in attacks if not record["transfer"]]
    if not records:
        return None
    last = records[-1]
    left = {entry["attack"]: entry["accuracy"] for entry in last["attacks"] if "accuracy" in entry}
    check_up = check_up_at(records, eps) if (eps := eps_of(last)) is not None else None
    verdict = None if check_up is None else check_up["verdict"]
    return {
        "images": last.get("images"),
        "eps": last.get("eps"),
        "clean": last.get("clean"),
        "attacks": left,
        "verdict": verdict,
    }


def read_weights(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file and its metadata."""
    with _open(Path(path)) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    if path.suffix.lower() in _PICKLES:
        raise ValueError(
            f"{path} is a pickle by its name, and pickles, which can execute code, are never loaded; "
            "possible: a .safetensors file "
            "(safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors') makes one of it)"
        )
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} (looked at {path.resolve()})")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_about(path: Path) -> dict[str, Any]:
    """Return the description of the network in a file of `save_weights`, without reading its weights."""
    with _open(path) as file:
        return about_of(path, file.metadata() or {})


def about_of(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """Return the description of the network in a file of `save_weights`: recipe, shape, result and so on."""
    if metadata.get("format") != WEIGHTS:
        hint = ""
        if metadata.get("format") == CONVERTED:
            hint = "; it has the weights of any model: build that model, then dcnet.load_weights_(model, path)"
        raise ValueError(
            f"{path} does not hold weights of ours: its format is {metadata.get('format')!r}, expected "
            f"{WEIGHTS!r}{hint}"
        )
    try:
        about = json.loads(metadata["about"])
        assert isinstance(about, dict)
        assert {"recipe", "shape"} <= set(about)
    except (KeyError, ValueError, AssertionError) as error:
        raise ValueError(f"{path} is damaged: what it says of its network cannot be read") from error
    return about


def check_own_formulas(path: Path, text: str | None, recipe: Recipe, trust: bool = False) -> None:
    """Check the user's own formulas against those registered here, or execute those in the file if it is trusted."""
    if trust and text is not None:
        execute_source(text, f"{path}: {FORMULAS}")
    check_source(text, names_of(recipe), path, f"{path}: {FORMULAS}")


def find_weights(name: str) -> Source:
    """Return where weights are: a run, a file, or "library"; raise if there are none."""
    if name == LIBRARY:
        return LIBRARY
    path = Path(name)
    if path.is_dir():
        run = Run(path)
        run.shape  # noqa: B018  # raises if it has no checkpoint
        return run
    if path.suffix.lower() == ".safetensors" or path.suffix.lower() in _PICKLES or path.is_file():
        _, metadata = read_weights(path)
        if metadata.get("format") == CHECKPOINT:
            raise ValueError(f"{path} is the checkpoint of a run; give its folder: {path.parent}")
        return path
    raise FileNotFoundError(
        f"{name} is not a run folder, and not a file (looked at {path.resolve()}); "
        f"possible: a run folder, a .safetensors file, or {LIBRARY} for the weights of timm and torchvision"
    )


def origin_of(source: Source | None) -> Origin:
    """Return what a run, or a file, says about the network of its weights."""
    if isinstance(source, Run):
        return Origin(str(source.folder), operator_of(source.recipe), source.conversion)
    if source is None or source == LIBRARY:
        return Origin(str(source), {}, None)
    tensors, metadata = read_weights(source)
    path, marked = Path(source), next((name for name in tensors if name.split(".")[-1].startswith(_OF_DECOUPLED)), None)
    if metadata.get("format") == WEIGHTS:
        about = about_of(path, metadata)
        return Origin(str(path), operator_of(recorded(about["recipe"])), about.get("conversion"), marked)
    if metadata.get("format") == CONVERTED:
        conversion = conversion_in(path)
        first = next(iter(conversion.values()), {})
        operator = {name: first[name] for name in ("magnitude", "angular") if first}
        return Origin(str(path), operator, conversion or None, marked, exported=True)
    return Origin(str(path), {}, None, marked)


def operator_of(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of a recipe that say which layers are decoupled, and how."""
    return {name: getattr(recipe, name) for name in OPERATOR}


def check_operator(recipe: Recipe, name: str, operator: dict[str, Any]) -> None:
    """Raise if the recipe would continue the decoupled network of this name and operator with another operator."""
    other = [
        f"{field}={value!r} there, {getattr(recipe, field)!r} here"
        for field, value in operator.items()
        if value != getattr(recipe, field)
    ]
    if other:
        raise ValueError(f"the network in {name} is decoupled already: {', '.join(other)}; start from a plain one")


def load_weights_(model: nn.Module, source: Source) -> None:
    """Load weights into a network of the same structure.

    A classifier with a different number of classes keeps its new weights, and a warning says so.
    """
    if isinstance(source, Run):
        name, tensors = str(source.folder), source.model.state_dict()
    else:
        name, tensors = str(source), read_weights(source)[0]
    there = model.state_dict()
    if not set(tensors) & set(there) and any(f"net.{key}" in there for key in tensors):  # names in their library
        tensors = {f"net.{key}": tensor for key, tensor in tensors.items()}
    # leave out radii and statistics of another operator
    tensors = {k: v for k, v in tensors.items() if k in there or not k.split(".")[-1].startswith(_EXTRAS)}
    other = [key for key in tensors if key in there and tensors[key].shape != there[key].shape]
    classifier = _classifier(model)
    wrong = [key for key in other if key.rpartition(".")[0] != classifier]
    if wrong:
        shapes = f"shape {tuple(tensors[wrong[0]].shape)} there, {tuple(there[wrong[0]].shape)} here"
        raise ValueError(
            f"pretrained={name!r} does not fit the recipe's network; for one: size mismatch for {wrong[0]}, {shapes}"
        )
    if other:
        warnings.warn(
            f"the classifier {classifier} starts anew: {name} has {len(tensors[other[0]])} classes, "
            f"the data {len(there[other[0]])}",
            stacklevel=2,
        )
        tensors |= {key: there[key] for key in other}
    missing, unknown = model.load_state_dict(tensors, strict=False)  # a decoupled layer needs only a kernel
    if missing or unknown:
        reasons = [f"it lacks {few(missing)}"] * bool(missing) + [f"the network has no {few(unknown)}"] * bool(unknown)
        raise ValueError(f"pretrained={name!r} does not fit the recipe's network: {'; '.join(reasons)}")


def _classifier(model: nn.Module) -> str:
    """Return the name of the last linear layer or convolution, which computes the logits."""
    kinds = (nn.Linear, nn.Conv2d)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)][-1]  # type: ignore[no-any-return]
