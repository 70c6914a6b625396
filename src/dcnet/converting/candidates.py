"""Which layers of a model can be converted, and why the others cannot."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from dcnet.layers.conv import DecoupledConv1d, DecoupledConv2d, DecoupledConv3d
from dcnet.layers.decoupled import Decoupled
from dcnet.layers.linear import DecoupledLinear
from dcnet.layers.own_arithmetic import own_twin
from dcnet.layers.selection import Selection
from dcnet.layers.sharding import is_sharded, modules_of_fsdp

TWINS: dict[type[nn.Module], type[Decoupled]] = {
    nn.Conv1d: DecoupledConv1d,
    nn.Conv2d: DecoupledConv2d,
    nn.Conv3d: DecoupledConv3d,
    nn.Linear: DecoupledLinear,
}
CONVERTIBLE: tuple[type[nn.Module], ...] = tuple(TWINS)

# A subclass that overrides none of these computes what the plain layer does
_ARITHMETIC = ("forward", "_conv_forward", "__call__", "__getattr__", "weight", "bias")


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the PyTorch class of a layer, or the one that it is derived from."""
    return next(plain for plain in TWINS if isinstance(module, plain))


def twin_of(kind: type[nn.Module]) -> type[Decoupled]:
    """Return the decoupled class that a layer of this class becomes."""
    return own_twin(kind) or next(twin for plain, twin in TWINS.items() if issubclass(kind, plain))


def what_it_overrides(kind: type[nn.Module]) -> str:
    """Return which arithmetic methods a subclass overrides and would lose, such as "forward".

    Return "" if the decoupled twin computes the same.
    """
    if own_twin(kind) is not None:
        return ""
    plain = next(plain for plain in TWINS if issubclass(kind, plain))
    return " and ".join(name for name in _ARITHMETIC if getattr(kind, name, None) is not getattr(plain, name, None))


def refuse_wrapped(model: nn.Module, what: str = "decouple_ cannot add parameters to", verb: str = "convert") -> None:
    """Raise if the model is inside a wrapper such as DDP or FSDP, which reduces the gradients of its parameters.

    The wrapper would miss new parameters, which would then differ between ranks.
    """
    wrapped = [module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel)]
    wrapped += modules_of_fsdp(model, "FSDPModule") + modules_of_fsdp(model, "FullyShardedDataParallel")
    if not wrapped and any(is_sharded(p) for p in model.parameters()):
        raise ValueError(f"{what} a model whose parameters are sharded (DTensor); {verb} it first, then shard it")
    if wrapped:
        kind = type(wrapped[0]).__name__
        raise ValueError(f"{what} a model wrapped already ({kind}); {verb} it first, then wrap it")


def reason_to_leave(
    name: str,
    module: nn.Module,
    parent: nn.Module | None,
    types: tuple[type[nn.Module], ...],
    selection: Selection,
    special: Mapping[nn.Module, str],
) -> str:
    """Say why a layer is not to be converted, or nothing; raise if its class was asked for, but it cannot be converted.

    special: other layers to leave, with the reason; a reason of `selection` comes first.
    """
    kind, plain = type(module), plain_class(module)
    if isinstance(module, Decoupled):
        return "decoupled already"
    if isinstance(module, LazyModuleMixin):
        return "its shape is not known yet; run the model once, then convert"
    if parametrize.is_parametrized(module):
        reason = _parametrized(module)
        if kind in types and not selection.reason_to_leave(name, module):
            raise ValueError(
                f"decouple_ cannot convert {name or '(the model itself)'!r}: {reason}. Nothing has been changed"
            )
        return reason
    weight = module._parameters.get("weight")
    if weight is not None and not weight.is_floating_point():
        return f"its weight has dtype {weight.dtype}; decoupled operators take real floating-point numbers"
    if isinstance(parent, nn.MultiheadAttention) and type(parent).forward is nn.MultiheadAttention.forward:
        return "nn.MultiheadAttention multiplies by its weight without calling it"
    if kind not in types:
        if kind in TWINS:
            return f"an nn.{kind.__name__}, which is not among types"
        overridden = what_it_overrides(kind)
        if overridden:
            why = f"a subclass, {kind.__name__}, with a {overridden} of its own"
            return f"{why}; name it in types to convert it, which drops that arithmetic"
        if plain not in types:
            return f"a subclass, {kind.__name__}, of nn.{plain.__name__}, which is not among types"
    return selection.reason_to_leave(name, module) or special.get(module, "")


def _parametrized(module: nn.Module) -> str:
    names = list(module.parametrizations) if isinstance(module.parametrizations, nn.ModuleDict) else []
    parametrizations: Any = module.parametrizations
    by = ", ".join(type(p).__name__.lstrip("_") for name in names for p in parametrizations[name])
    return (
        f"its {' and '.join(names)} is computed by a parametrization ({by}); take that off with "
        f"torch.nn.utils.parametrize.remove_parametrizations(layer, {names[0]!r}), convert, and put it on again"
    )
