"""The start of a run: a network with new weights or given weights, or a converted plain network."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dcnet.converting import conversion_of, decouple_, restore_conversion_
from dcnet.converting.convert import CONVOLUTIONS
from dcnet.data import ImageFolder, Resident
from dcnet.layers import decoupled_layers
from dcnet.layers.selection import ALL, Selection
from dcnet.models import check_logits, is_external
from dcnet.models.external import External
from dcnet.training.checkpoint import load_state
from dcnet.training.ranks import Ranks
from dcnet.training.recipe import Recipe
from dcnet.training.run import Conversion, build_model, fuse_untraced_, layer_options, plain_recipe
from dcnet.training.weights import LIBRARY, Origin, Source, check_operator, find_weights, load_weights_, origin_of

_STRUCTURE = (
    *("norm", "activation", "penultimate_activation", "penultimate_norm"),
    *("root_activation", "head", "plain_kernels"),
)


@dataclass(frozen=True)
class Start:
    """A network, and the layers that were converted after it was built, with their options; None if there are none."""

    model: nn.Module
    conversion: Conversion | None = None


def go_on(recipe: Recipe, shape: dict[str, int], checkpoint: Path) -> Start:
    """Return the network of a run that has begun, before its checkpoint is loaded."""
    conversion = load_state(checkpoint).get("conversion")
    return Start(build_model(recipe, shape, conversion), conversion)


def begin(recipe: Recipe, shape: dict[str, int], data: "Resident | ImageFolder", ranks: Ranks) -> Start:
    """Return the network that the recipe starts from; look for its weights before anything is built."""
    external = is_external(recipe.model)
    if external:
        _check_structure(recipe)
    source = None if recipe.pretrained is None else find_weights(recipe.pretrained)
    if source == LIBRARY and not external:
        raise ValueError(
            f"pretrained={LIBRARY!r}: {recipe.model} is a network of ours, for which no library has weights"
        )
    origin = origin_of(source)
    if origin.conversion is not None:
        # an exported network lists all decoupled layers, even if the recipe alone would build it with them
        made_so = origin.exported and not external and conversion_of(build_model(recipe, shape)) == origin.conversion
        if not made_so:
            return _as_it_was(recipe, shape, source, origin)
    if not external and not recipe.calibrate and not recipe.where:
        model = build_model(recipe, shape)
        if source is not None:
            load_weights_(model, source)
        return Start(model)
    if origin.operator.get("magnitude") is not None:
        wish = f"calibrate={recipe.calibrate}" if recipe.calibrate else f"where={list(recipe.where)}"
        raise ValueError(
            f"{wish}: the network in {origin.name} is decoupled already ({origin.operator['magnitude']}); "
            "possible: a plain network's weights, or calibrate=0 without where"
        )
    if origin.decoupled is not None:
        raise ValueError(
            f"pretrained={origin.name!r} has the weights of a decoupled network, such as {origin.decoupled}, and does "
            "not say with which operator; possible: a run folder, a file that dcnet.export or dcnet export has "
            "written, or a plain network's weights"
        )
    return _converted(recipe, shape, source, _Batches(recipe, data, ranks))


def _as_it_was(recipe: Recipe, shape: dict[str, int], source: "Source | None", origin: Origin) -> Start:
    """Rebuild a network that was converted already; raise if the recipe has another operator."""
    check_operator(recipe, origin.name, origin.operator)
    assert source is not None
    assert origin.conversion is not None
    model = build_model(plain_recipe(recipe), shape)
    names = dict(model.named_modules())
    prefix = "" if any(name in names for name in origin.conversion) else "net."  # names in their library
    conversion = {prefix + name: options for name, options in origin.conversion.items()}
    restore_conversion_(model, conversion)
    load_weights_(model, source)
    return Start(model, conversion)


def _converted(recipe: Recipe, shape: dict[str, int], source: "Source | None", batches: "_Batches") -> Start:
    model = build_model(plain_recipe(recipe), shape, library_weights=source == LIBRARY)
    if source is not None and source != LIBRARY:
        load_weights_(model, source)
    model.to(batches.ranks.device)
    images = next(iter(batches))[:2]
    check_logits(model, recipe.model, images, shape["num_classes"])
    if recipe.magnitude is None:
        return Start(model)
    options = _what_to_convert(model, recipe, shape)
    calibrate = batches if recipe.calibrate else None
    report = decouple_(model, recipe.magnitude, recipe.angular, calibrate=calibrate, **options, **layer_options(recipe))
    if not report.converted:
        raise ValueError(f"nothing was converted in {recipe.model}: {report}")
    fuse_untraced_(model, images)
    return Start(model, {name: how for name, how in conversion_of(model).items() if name in report.converted})


def _what_to_convert(model: nn.Module, recipe: Recipe, shape: dict[str, int]) -> dict[str, Any]:
    """Return `types` and `where` for `decouple_`.

    In another library's network, choose the convolutions; in one of dcnet's own, the layers that are decoupled when it
    is built decoupled. The recipe's `where` removes layers from these, by their names in their own library.
    """
    if is_external(recipe.model):
        types: tuple[type[nn.Module], ...] = CONVOLUTIONS
        layers = {name: module for name, module in model.named_modules() if isinstance(module, types)}
        _check_convolutions(recipe, model, layers)
    else:
        types = (*CONVOLUTIONS, nn.Linear)
        twins = set(decoupled_layers(build_model(replace(recipe, where=()), shape)))
        layers = {name: module for name, module in model.named_modules() if name in twins}
    prefix = "net." if isinstance(model, External) else ""
    selection = Selection(recipe.where or None, {name.removeprefix(prefix): layer for name, layer in layers.items()})
    left = {name: selection.reason_to_leave(name, layer) for name, layer in selection.layers.items()}
    if left and all(left.values()):
        reasons = "; ".join(dict.fromkeys(f"{name!r}: {why}" for name, why in list(left.items())[:3]))
        raise ValueError(
            f"where={list(recipe.where)} leaves nothing to decouple of the {len(left)} layers of {recipe.model} "
            f"({reasons}{'; …' if len(left) > 3 else ''})"
        )
    names = {name for name in layers if not left[name.removeprefix(prefix)]}
    chosen: list[Any] = [lambda name, module: name in names]
    return {"types": types, "where": [ALL, *chosen] if selection.takes_gates else chosen}


def _check_convolutions(recipe: Recipe, model: nn.Module, convolutions: dict[str, nn.Module]) -> None:
    """Raise where another library's network has nothing that a recipe converts, or that is decoupled already."""
    if convolutions or decoupled_layers(model):
        return
    linear = any(isinstance(module, nn.Linear) for module in model.modules())
    others = "; in Python, dcnet.decouple_(model, types=(nn.Linear,)) converts its linear layers"
    raise ValueError(
        f"there is nothing to convert in {recipe.model}: it has no convolution, and of other libraries' networks and "
        "your own, recipes convert convolutions only; possible: a network with convolutions, or magnitude=None "
        f"(--magnitude none), which trains the plain network{others if linear else ''}"
    )


class _Batches:
    """The first training batches, the same on all ranks."""

    def __init__(self, recipe: Recipe, data: "Resident | ImageFolder", ranks: Ranks) -> None:
        self.recipe, self.data, self.ranks = recipe, data, ranks

    def __iter__(self) -> Iterator[Tensor]:
        for images, _ in islice(self.data.train_batches(0, 0, self.recipe.batch), max(1, self.recipe.calibrate)):
            yield images


def _check_structure(recipe: Recipe) -> None:
    """Raise if the recipe asks another library's network for something that only dcnet's own networks have."""
    usual = Recipe()
    for name in _STRUCTURE:
        if getattr(recipe, name) != getattr(usual, name):
            raise ValueError(
                f"recipe: {name}={getattr(recipe, name)!r} is for dcnet's own networks; "
                f"{recipe.model} is as its library makes it"
            )
