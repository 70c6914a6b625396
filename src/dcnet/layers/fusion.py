"""Let a decoupled convolution do the work of the BatchNorm or the activation after it, in a model we did not write.

All modules stay where they are, with their parameters and state-dict keys. The convolution applies what follows it in
its own pass, and the modules after it return its result unchanged. Before every call the convolution checks that this
is still right: modules that were replaced or got a hook in the meantime compute for themselves.
"""

import threading
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from dcnet.layers.post_ops import post_ops_of
from dcnet.ops import ONLY, PostOps
from dcnet.util.compat import backward_pass, hooked

# What computes the same when it is applied twice: one module may then stand behind several convolutions
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


@dataclass(eq=False)
class Place:
    """Where a module is registered, so that a replacement can be seen."""

    parent: nn.Module
    name: str

    def holds(self, module: nn.Module) -> bool:
        """Tell whether this module is still there."""
        return self.parent._modules.get(self.name) is module

    @property
    def module(self) -> nn.Module:
        module = self.parent._modules[self.name]
        assert module is not None
        return module


class _Waiting(threading.local):
    """Which modules wait for a convolution's result, in this thread: a model may be used by several at once."""

    norm: bool = False  # whether the norm is to hand the next input through
    activation: bool = False
    result: "ReferenceType[Tensor] | None" = None  # what the convolution has returned
    backward: int = -1  # the backward pass in which it was called last; -1 outside of one


EAGER = "eager"  # set by code that was not compiled


@dataclass(eq=False)
class Fusion:
    """What a convolution does for the modules behind it, and whether it has just done so."""

    name: str  # of the convolution
    conv: Place
    norm: Place | None
    activation: Place | None = None
    crossed: tuple[nn.Module, ...] = ()  # the modules that hold some of these and not the others
    within: Any = None  # the module in whose rewritten code the convolution does this (`layers/rewritten.py`)
    waiting: _Waiting = field(default_factory=_Waiting)
    # The same for compiled code, which cannot look into `waiting`: convolution and norm may be in two of its graphs.
    # In eager code it counts only where compiled code has set it.
    norm_waits: bool | str = False
    activation_waits: bool | str = False

    def forward(self, conv: Any, x: Tensor) -> Tensor:
        """Return the convolution of x, finished if the modules behind it will hand it through."""
        fused = self.finishes(conv) and self.takes(conv, x)
        y = conv.decouple(x, self.post_ops() if fused else None)[0]
        norm, activation = fused and self.norm is not None, fused and self.activation is not None
        if torch.compiler.is_compiling():
            self.norm_waits, self.activation_waits = norm, activation
        else:
            self.norm_waits, self.activation_waits = norm and EAGER, activation and EAGER
            self.waiting.norm, self.waiting.activation = norm, activation
            self.waiting.result = ref(y) if fused else None
            self.waiting.backward = backward_pass()
        return y  # type: ignore[no-any-return]

    def finishes(self, conv: Any) -> bool:
        """Tell whether the convolution does the work of the modules behind it when it is called by itself.

        Not where rewritten code would have done so: this call comes from somewhere else, such as a part of the model
        that is used alone.
        """
        within = self.within
        elsewhere = within is not None and (within.fused_code is not None or within.code_is_due)
        return not elsewhere and self.holds(conv)

    def takes(self, conv: Any, x: Tensor) -> bool:
        """Tell whether x is a batch: in other inputs a norm may take another dimension for the channels."""
        return self.norm is None or x.dim() == conv._geometry().dims + 2

    def one_by_one(self, conv: Any, x: Tensor) -> Tensor:
        """Return the convolution of x, with every module behind it doing its own work."""
        y = conv.decouple(x, None)[0]
        self.norm_waits = self.activation_waits = False
        if not torch.compiler.is_compiling():
            self.waiting.norm = self.waiting.activation = False
        for place in (self.norm, self.activation):
            y = y if place is None else place.module(y)
        return y  # type: ignore[no-any-return]

    def holds(self, conv: Any) -> bool:
        """Tell whether the modules are those that were fused, without hooks that want to see what lies between them."""
        # a replica of nn.DataParallel shares this object with the others, each on a device of its own
        if not self.conv.holds(conv) or hooked(conv) or getattr(conv, "_is_replica", False):
            return False
        if conv.explained_by:  # every module shows by itself what it does
            return False
        if any(hooked(module) for module in self.crossed):
            return False
        for place in (self.norm, self.activation):
            if place is None:
                continue
            module = place.parent._modules.get(place.name)
            if not isinstance(module, Following) or self not in module.fusions:
                return False
            if any(hooked(inner) for inner in (module, *module._modules.values()) if inner is not None):
                return False
        return True

    def post_ops(self) -> PostOps:
        """Return what the convolution does for the modules behind it."""
        norm = None if self.norm is None else self.norm.module
        inside = None if norm is None else norm._modules.get("act")  # timm's BatchNormAct2d
        found = activation_of(inside if self.activation is None else self.activation.module)
        assert found is not None
        name, slope = found
        if norm is None:
            assert name is not None
            return ONLY[name]
        if isinstance(slope, int | float):
            candidates: list[Any] = [norm.running_mean, norm.weight, self.conv.module.weight]
            like = next(tensor for tensor in candidates if tensor is not None)
            slope = torch.full((1,), float(slope), dtype=like.dtype, device=like.device)
        return post_ops_of(norm, None, name, slope)

    def hands_norm_through(self, x: Tensor) -> bool:
        """Tell whether the norm has nothing to do for x; raise if x is not what the convolution returned."""
        waits, self.norm_waits = self.norm_waits, False
        if torch.compiler.is_compiling():
            return bool(waits)
        waits, self.waiting.norm = self.waiting.norm or waits is True, False
        if waits:
            self._check(x, "BatchNorm")
        return waits or self._is_outside_checkpoint()

    def hands_activation_through(self, x: Tensor, shared: bool) -> bool:
        """Tell whether the activation has nothing to do for x; raise as the norm does, but for a shared activation.

        That may get other tensors too, and is one that may be applied twice.
        """
        waits, self.activation_waits = self.activation_waits, False
        if torch.compiler.is_compiling():
            return bool(waits) and not shared
        waits, self.waiting.activation = self.waiting.activation or waits is True, False
        if waits and not shared:
            self._check(x, "activation")
        return self._is_result(x) or (not shared and self._is_outside_checkpoint())

    def _is_outside_checkpoint(self) -> bool:
        """Tell whether activation checkpointing repeats what follows the convolution, and not the convolution itself.

        What it begins with is then the convolution's result, finished, as another object.
        """
        if backward_pass() in (-1, self.waiting.backward):
            return False
        conv = self.convolution()
        return conv is not None and self.finishes(conv)

    def convolution(self) -> Any:
        """Return the convolution that has this fusion; None where it was replaced or removed."""
        conv = self.conv.parent._modules.get(self.conv.name)
        return conv if getattr(conv, "fusion", None) is self else None

    def _check(self, x: Tensor, applied: str) -> None:
        if not self._is_result(x):
            raise RuntimeError(
                f"{self.name} has applied the {applied} behind it, but its result was changed before it got there; "
                "dcnet.unfuse_(model) takes the fusion back"
            )

    def _is_result(self, x: Tensor) -> bool:
        return self.waiting.result is not None and self.waiting.result() is x

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"norm_waits": False, "activation_waits": False}
        del state["waiting"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, waiting=_Waiting())


class Following:
    """Goes before a norm or an activation among the bases: hands through what a convolution has done already."""

    fusions: list[Fusion]

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
        """Take over a copied or unpickled state, and give the convolutions their fusions, which they do not take along.

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
    """Return the class that hands through for a module of this class; None if there is none."""
    if is_timm_norm(module):
        return _FUSED.setdefault(type(module), _fused(type(module)))
    return _FUSED.get(type(module))


def is_fused_class(kind: type) -> bool:
    """Tell whether this is a class that hands through, and not one derived from it."""
    return kind in _FUSED.values()


def __getattr__(name: str) -> Any:
    """Return a fused class by its name, for pickle; timm's is made where timm is installed."""
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
