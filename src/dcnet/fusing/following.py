"""The modules behind a fused convolution, which return its result unchanged since it has done their work."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.fx import Proxy

if TYPE_CHECKING:
    from dcnet.fusing.fusion import Fusion

# Activations that change nothing when they are applied again: one module may then follow several convolutions
IDEMPOTENT = ("relu", "relu6")


def activation_of(module: nn.Module | None) -> tuple[str | None, Any] | None:
    """Return a module's activation by name and its slope (a number, a tensor or None); None if it cannot be fused."""
    if module is None:
        return None, None
    kind = plain_class(module) if isinstance(module, Following) else type(module)
    if kind is nn.Identity:
        return None, None
    if kind in _ACTIVATIONS:
        return _ACTIVATIONS[kind], None
    if kind is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh", None
    if kind is nn.LeakyReLU:
        return "prelu", module.negative_slope
    return ("prelu", module.weight) if kind is nn.PReLU else None


_ACTIVATIONS: dict[type, str] = {nn.ReLU: "relu", nn.ReLU6: "relu6", nn.SiLU: "silu", nn.Hardswish: "hardswish"}


class Following:
    """Mixin; list it before a norm or an activation in the bases. It returns fused results unchanged."""

    fusions: "list[Fusion]"

    def forward(self, input: Tensor) -> Any:
        if isinstance(input, Proxy):  # a leaf, like the layers of torch.nn
            name = input.tracer.path_of_module(self)
            return input.tracer.create_proxy("call_module", name, (input,), {})
        if isinstance(self, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            done = any(fusion.hands_norm_through(input) for fusion in self.fusions)
        else:
            shared = len(self.fusions) > 1
            done = any(fusion.hands_activation_through(input, shared) for fusion in self.fusions)
        return input if done else super().forward(input)  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        found = [(fusion, fusion.convolution()) for fusion in self.fusions]
        return state | {"convolutions": [(fusion, conv) for fusion, conv in found if conv is not None]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled state, and give the convolutions their fusions, which their own state lacks.

        So a convolution that is copied without the modules behind it does not do their work.
        """
        for fusion, conv in state.pop("convolutions", ()):
            vars(conv)["fusion"] = fusion  # conv may not have its own state yet
        super().__setstate__(state)  # type: ignore[misc]

    def extra_repr(self) -> str:
        text = super().extra_repr()  # type: ignore[misc]
        names = ", ".join(fusion.name for fusion in self.fusions)
        return ", ".join(filter(None, (text, f"fused into {names}")))


def _fused(kind: type) -> type:
    return type(f"Fused{kind.__name__}", (Following, kind), {"__module__": __name__})


_KINDS = (*(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), *_ACTIVATIONS, nn.GELU, nn.LeakyReLU, nn.PReLU)
_FUSED: dict[type, type] = {kind: _fused(kind) for kind in _KINDS}


def is_timm_norm(module: nn.Module) -> bool:
    """Tell whether a module is timm's BatchNorm with an activation inside."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("timm.layers.norm_act", "BatchNormAct2d")


def fused_class(module: nn.Module) -> type | None:
    """Return the `Following` class for a module of this class; None if there is none."""
    if is_timm_norm(module):
        return _FUSED.setdefault(type(module), _fused(type(module)))
    return _FUSED.get(type(module))


def is_fused_class(kind: type) -> bool:
    """Tell whether this is a `Following` class made here, and not one derived from it."""
    return kind in _FUSED.values()


def __getattr__(name: str) -> Any:
    """Return a fused class by its name, for pickle; timm's is made on demand."""
    if name == "FusedBatchNormAct2d":
        from timm.layers.norm_act import BatchNormAct2d

        return _FUSED.setdefault(BatchNormAct2d, _fused(BatchNormAct2d))
    for kind in _FUSED.values():
        if kind.__name__ == name:
            return kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def plain_class(module: nn.Module) -> type:
    """Return the class that a fused module had before."""
    return next(kind for kind, fused in _FUSED.items() if isinstance(module, fused))
