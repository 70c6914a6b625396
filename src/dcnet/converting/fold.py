"""Fold BatchNorms into the plain layers right before them, wherever the model's code calls the two."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from dcnet.converting.other_code import merging_method
from dcnet.fusing.following import is_timm_norm
from dcnet.fusing.fuse import crossed_by
from dcnet.fusing.fusion import Place
from dcnet.fusing.readers import END, Seen
from dcnet.layers.block import Block
from dcnet.util.compat import BatchNorm, hooked

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(eq=False)
class _Pair:
    """A layer, and the BatchNorm that is the only reader of its output, by name."""

    layer: str
    norm: str
    place: Place  # of the BatchNorm
    crossed: tuple[nn.Module, ...] = ()  # modules that contain only one of them


def fold_(model: nn.Module, layers: Mapping[str, nn.Module], seen: Seen, why: str) -> tuple[dict[str, str], list[str]]:
    """Fold the BatchNorms behind these plain layers, in place, where that is safe.

    Args:
        model: the model.
        layers: the layers that were made plain, by name.
        seen: what was found out about the model's code before that.
        why: why `seen` is incomplete; empty if it is complete.

    Returns:
        The names of the folded BatchNorms by the names of their layers, and notes on why others were not folded.
    """
    folded: dict[str, str] = {}
    reasons: dict[str, str] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    uses = Counter(modules.values())
    owners = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    for pair in _pairs(model, layers, seen, modules):
        layer, norm = layers[pair.layer], pair.place.module
        reason = _reason_not_to_fold(layer, norm, isinstance(pair.place.parent, Block))
        if uses[layer] > 1 or uses[norm] > 1:
            reason = reason or "one of them is used in several places"
        if any(owners[p] > 1 for p in layer._parameters.values() if p is not None):
            reason = reason or f"the parameters of {pair.layer} are those of another module too"
        if any(hooked(module) for module in (layer, norm, *pair.crossed)):
            reason = reason or "one of them has hooks, which would see something else"
        if merged_by := _merged_by(pair.norm, modules):
            reason = reason or f"{merged_by} merges them, and would not find it"
        if {pair.layer, pair.norm} & seen.read:
            reason = reason or "other code reads the parameters of one of them"
        if reason:
            reasons[pair.norm] = f"{pair.norm} was not folded into {pair.layer}: {reason}"
            continue
        _fold_into(layer, norm)
        pair.place.parent._modules[pair.place.name] = None if isinstance(pair.place.parent, Block) else rest_of(norm)
        folded[pair.layer] = pair.norm
    left = [name for name, module in model.named_modules() if isinstance(module, BatchNorm) and name not in reasons]
    return folded, [*reasons.values(), *_other_reasons(left, layers, seen, why)]


def _other_reasons(norms: list[str], layers: Mapping[str, nn.Module], seen: Seen, why: str) -> list[str]:
    """Return why these other BatchNorms, which are not the only readers of a plain layer, were not folded."""
    if norms and why:
        return [f"{', '.join(norms)}: not folded, since it is not known what they follow; {why}"]
    notes = []
    for name in norms:
        source = seen.sources.get(name, "")
        if source in layers:
            chain = [one for one in seen.chains.get(source, []) if one != name]
            ends = chain[0].removeprefix(END) if chain and chain[0].startswith(END) else "other modules come between"
            notes.append(f"{name} was not folded into {source}: {ends}")
        elif source not in seen.chains:  # if it follows a layer that was left, the report says why at that layer
            behind = f"it follows {source}, no layer that was made plain" if source else "it is not called"
            notes.append(f"{name} was not folded: {behind}")
    return notes


def _pairs(
    model: nn.Module, layers: Mapping[str, nn.Module], seen: Seen, modules: Mapping[str, nn.Module]
) -> list[_Pair]:
    """Return the layers that a BatchNorm follows: in a `Block`, and in other code as far as that is known.

    Neighbors in an `nn.Sequential` are not enough: other code may call them one by one.
    """
    names = {layer: name for name, layer in layers.items()}
    blocks = {path: module for path, module in model.named_modules() if isinstance(module, Block)}
    pairs = [
        _Pair(names[block.conv], f"{path}.norm".lstrip("."), Place(block, "norm"))
        for path, block in blocks.items()
        if block.conv in names and isinstance(block.norm, BatchNorm)
    ]
    in_blocks = {block.conv for block in blocks.values()}
    for name, layer in layers.items():
        chain = [one for one in seen.chains.get(name, []) if type(modules.get(one)) is not nn.Identity]
        # a Block may have done more than its layer before the next module saw the result
        if layer in in_blocks or not chain or not isinstance(modules.get(chain[0]), BatchNorm):
            continue
        parent, _, place = chain[0].rpartition(".")
        crossed = tuple(modules[one] for one in crossed_by([name, chain[0]]))
        pairs.append(_Pair(name, chain[0], Place(modules[parent], place), crossed))
    return pairs


def _reason_not_to_fold(layer: nn.Module, norm: Any, in_block: bool) -> str:
    if norm.training or layer.training:
        return "it is in training mode; model.eval() first"
    if norm.running_mean is None:
        return "it keeps no running averages"
    if rest_of(norm) is None:
        return f"it is a {type(norm).__name__}, which may compute something else"
    if isinstance(layer, nn.Linear) and not in_block:
        return "behind a linear layer it may be another dimension that it normalizes"
    return ""


def _merged_by(norm: str, modules: Mapping[str, nn.Module]) -> str:
    """Return which method of a module around a BatchNorm merges it into the convolution before it; "" if none does."""
    around = ["", *(norm[:at] for at, sign in enumerate(norm) if sign == ".")]
    methods = {name: merging_method(modules[name]) for name in around}
    return next((f"{name or 'model'}.{method}()" for name, method in methods.items() if method), "")


def rest_of(norm: nn.Module) -> nn.Module | None:
    """Return what is left of a BatchNorm after folding: timm's dropout and activation, else nothing.

    Return None for an unknown class.
    """
    if type(norm) not in BATCH_NORMS and not is_timm_norm(norm):
        return None
    inside = [(name, module) for name in ("drop", "act") if (module := norm._modules.get(name)) is not None]
    rest = nn.Sequential(OrderedDict(inside)) if inside else nn.Identity()
    rest.training = norm.training  # not .train(), which would change the modes of the modules inside
    return rest


@torch.no_grad()
def _fold_into(layer: nn.Module, norm: Any) -> None:
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)
    fuse = fuse_linear_bn_weights if isinstance(layer, nn.Linear) else fuse_conv_bn_weights
    weight, bias = fuse(layer.weight, layer.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
    layer.weight.copy_(weight)
    if layer.bias is None:
        layer.bias = nn.Parameter(bias.detach().to(layer.weight.dtype), requires_grad=layer.weight.requires_grad)
    else:
        layer.bias.copy_(bias)
