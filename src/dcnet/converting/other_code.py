"""Keep other code from using the weight of a converted layer without calling the layer, where that is possible."""

from inspect import Parameter, ismethod, signature
from typing import Any, NoReturn

from torch import nn

from dcnet.layers.decoupled import Decoupled

# Methods without arguments that timm's `reparameterize_model` and other tools call to make a block merge its
# convolutions and BatchNorms
_MERGING = ("fuse", "reparameterize", "switch_to_deploy")


def use_layers_(model: nn.Module, layers: dict[str, nn.Module]) -> list[str]:
    """Make transformer layers call their converted linear layers in evaluation too; return notes on that.

    PyTorch's fast path would not call them.
    """
    converted, slow = set(layers.values()), 0
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and converted & set(module.children()):
            module.activation_relu_or_gelu = 0  # PyTorch's own mark of a layer that its fast path does not support
            slow += 1
        if isinstance(module, nn.TransformerEncoder) and converted & set(module.modules()):
            module.use_nested_tensor = False  # only the fast path can read nested tensors
    if not slow:
        return []
    return [
        f"{slow} nn.TransformerEncoderLayer no longer take PyTorch's fast path in evaluation, which would not "
        "call converted layers"
    ]


class Refusal:
    """Replaces a method that would give wrong results now; raises when it is called."""

    def __init__(self, name: str, method: str, layer: str) -> None:
        self.name, self.method, self.layer = name, method, layer

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        raise RuntimeError(
            f"{self.name or 'the model'}.{self.method}() merges kernels as if layers were linear in them, and "
            f"{self.layer!r} is decoupled; "
            "use the model as it is, or leave the block out of decouple_ with where=",
        )


def refuse_fusion_(model: nn.Module, layers: dict[str, nn.Module]) -> list[str]:
    """Make methods raise that would merge kernels in modules around these layers; return notes on that."""
    names = {layer: name for name, layer in layers.items() if not _is_plain(layer)}
    notes = []
    for name, module in model.named_modules():
        inside = [names[child] for child in module.modules() if child in names and child is not module]
        wraps = isinstance(
            module._modules.get("base_layer"), Decoupled
        )  # peft's: its adapters would go into the kernels
        for method in (*_MERGING, *["merge"] * wraps) if inside else ():
            if _takes_nothing(getattr(module, method, None)):
                setattr(module, method, Refusal(name, method, inside[0]))
                notes.append(
                    f"{name or 'the model'}.{method}() would merge decoupled kernels wrongly; it raises from now on"
                )
    return notes


def merging_method(module: nn.Module) -> str:
    """Return the name of a method with which a module merges its convolutions and BatchNorms; empty if it has none."""
    methods = {name: getattr(module, name, None) for name in _MERGING}
    return next((name for name, one in methods.items() if isinstance(one, Refusal) or _takes_nothing(one)), "")


def _is_plain(layer: nn.Module) -> bool:
    """Tell whether a layer computes the same as the plain one, so that its kernels may be merged."""
    return isinstance(layer, Decoupled) and layer.operator.is_inner_product and layer.weighting is not None


def _takes_nothing(method: Any) -> bool:
    """Tell whether this is a method that can be called without arguments, unlike methods that fuse features."""
    if not ismethod(method):
        return False
    return all(
        p.default is not Parameter.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        for p in signature(method).parameters.values()
    )
