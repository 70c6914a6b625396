"""Which layers of a model can be converted, and why the others cannot."""

from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from dcnet.layers.conv import DecoupledConv1d, DecoupledConv2d, DecoupledConv3d
from dcnet.layers.decoupled import Decoupled
from dcnet.layers.linear import DecoupledLinear
from dcnet.layers.optimization import Where
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
    """Return the class of PyTorch that a layer is, or is derived from."""
    return next(plain for plain in TWINS if isinstance(module, plain))


def what_it_overrides(kind: type[nn.Module]) -> str:
    """Name what of its arithmetic a subclass has overridden, such as "forward".

    Nothing if it computes what the plain layer does.
    """
    plain = next(plain for plain in TWINS if issubclass(kind, plain))
    return " and ".join(name for name in _ARITHMETIC if getattr(kind, name, None) is not getattr(plain, name, None))


def refuse_wrapped(model: nn.Module) -> None:
    """Raise where something manages the gradients of the model's parameters.

    New parameters would then differ between ranks.
    """
    wrapped = [module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel)]
    wrapped += modules_of_fsdp(model, "FSDPModule") + modules_of_fsdp(model, "FullyShardedDataParallel")
    if not wrapped and any(is_sharded(p) for p in model.parameters()):
        raise ValueError(
            "decouple_ cannot add parameters to a model whose parameters are sharded (DTensor); convert it "
            "first, then shard it"
        )
    if wrapped:
        kind = type(wrapped[0]).__name__
        raise ValueError(
            f"decouple_ cannot add parameters to a model wrapped already ({kind}); convert it first, then wrap it"
        )


def reason_to_leave(
    name: str, module: nn.Module, parent: nn.Module | None, types: tuple[type[nn.Module], ...], where: Where | None
) -> str:
    """Say why a layer is not to be converted, or nothing; raise where it was asked for by its class and cannot be."""
    kind, plain = type(module), plain_class(module)
    if isinstance(module, Decoupled):
        return "decoupled already"
    if isinstance(module, LazyModuleMixin):
        return "its shape is not known yet; run the model once, then convert"
    if parametrize.is_parametrized(module):
        reason = _parametrized(module)
        if kind in types and (where is None or where(name, module)):
            raise ValueError(
                f"decouple_ cannot convert {name or '(the model itself)'!r}: {reason}. Nothing has been changed"
            )
        return reason
    if isinstance(parent, nn.MultiheadAttention) and type(parent).forward is nn.MultiheadAttention.forward:
        return "nn.MultiheadAttention multiplies by its weight without calling it"
    if kind not in types:
        if kind in TWINS:
            return f"a nn.{kind.__name__}, which is not among types"
        overridden = what_it_overrides(kind)
        if overridden:
            why = f"a subclass, {kind.__name__}, with a {overridden} of its own"
            return f"{why}; name it in types to convert it, which drops that arithmetic"
        if plain not in types:
            return f"a subclass, {kind.__name__}, of nn.{plain.__name__}, which is not among types"
    if where is not None and not where(name, module):
        return "where(name, module) said no"
    return ""


def _parametrized(module: nn.Module) -> str:
    names = list(module.parametrizations) if isinstance(module.parametrizations, nn.ModuleDict) else []
    parametrizations: Any = module.parametrizations
    by = ", ".join(type(p).__name__.lstrip("_") for name in names for p in parametrizations[name])
    return (
        f"its {' and '.join(names)} is computed by a parametrization ({by}); take that off with "
        f"torch.nn.utils.parametrize.remove_parametrizations(layer, {names[0]!r}), convert, and put it on again"
    )
