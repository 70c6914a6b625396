"""Let a decoupled convolution do the work of the BatchNorm or the activation after it, in any model.

All modules stay where they are, with their parameters and state-dict keys. The convolution runs them as post-ops in its
own pass, and the modules themselves return its result unchanged. Before every call the convolution checks that this is
still right: modules that were replaced or got a hook in the meantime compute for themselves.
"""

import threading
import warnings
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from dcnet.fusing.following import Following, activation_of
from dcnet.fusing.surroundings import Surroundings
from dcnet.layers.post_ops import post_ops_of
from dcnet.ops import ONLY, PostOps
from dcnet.util.compat import backward_pass, hooked


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
    """Which modules wait for a convolution's result; one for each thread, since several may use a model at once."""

    norm: bool = False  # whether the norm has to return its next input unchanged
    activation: bool = False
    result: "ReferenceType[Tensor] | None" = None  # what the convolution has returned
    backward: int = -1  # the backward pass in which it was called last; -1 outside of one


EAGER = "eager"  # set by code that was not compiled


@dataclass(eq=False)
class Fusion:
    """The modules whose work a convolution does, and whether it has just done it."""

    name: str  # of the convolution
    conv: Place
    norm: Place | None
    activation: Place | None = None
    crossed: tuple[nn.Module, ...] = ()  # modules that contain some of these, but not all
    around: tuple[Surroundings, ...] = ()  # the code that calls them, where nothing else checks that it is the same
    within: Any = None  # the module whose rewritten code calls the convolution (`fusing/rewritten.py`)
    waiting: _Waiting = field(default_factory=_Waiting)
    warned: bool = False
    # The same for compiled code, which cannot read `waiting`; the convolution and the norm may be in different graphs.
    # Eager code only uses it if compiled code has set it.
    norm_waits: bool | str = False
    activation_waits: bool | str = False

    def forward(self, conv: Any, x: Tensor) -> Tensor:
        """Return the convolution of x, with post-ops if the modules behind it will return it unchanged."""
        fused = self.fuses(conv) and self.takes(conv, x)
        y = conv.decouple(x, self.post_ops() if fused else None)[0]
        norm, activation = fused and self.norm is not None, fused and self.activation is not None
        if torch.compiler.is_compiling():
            self.norm_waits, self.activation_waits = norm, activation
        else:
            if (self.waiting.norm or self.waiting.activation) and self.waiting.backward == backward_pass() == -1:
                self._warn()
            self.norm_waits, self.activation_waits = norm and EAGER, activation and EAGER
            self.waiting.norm, self.waiting.activation = norm, activation
            self.waiting.result = ref(y) if fused else None
            self.waiting.backward = backward_pass()
        return y  # type: ignore[no-any-return]

    def _warn(self) -> None:
        """Warn that the modules whose work the last call has done were not called after it."""
        if not self.warned:
            self.warned = True
            norm = self.norm if self.waiting.norm else self.activation
            assert norm is not None
            warnings.warn(
                f"{self.name} does the work of {norm.name} too, which was not called after it: what came out was the "
                "fused result. If that call was not interrupted, the model's code goes another way than when it was "
                "fused: dcnet.unfuse_(model) takes the fusion back",
                RuntimeWarning,
                stacklevel=2,
            )

    def fuses(self, conv: Any) -> bool:
        """Tell whether the convolution does the work of the modules behind it when it is called by itself.

        It is False while the parent's rewritten code is active: then this call bypasses the parent, as where a part of
        the model is used alone.
        """
        within = self.within
        elsewhere = within is not None and (within.fused_code is not None or within.code_is_due)
        return not elsewhere and self.holds(conv) and all(one.hold() for one in self.around)

    def takes(self, conv: Any, x: Tensor) -> bool:
        """Tell whether x is a batch: in other inputs, a norm may see another dimension as the channels."""
        return self.norm is None or x.dim() == conv._dims + 2

    def one_by_one(self, conv: Any, x: Tensor) -> Tensor:
        """Return the convolution of x after the modules behind it, each computed by itself."""
        y = conv.decouple(x, None)[0]
        self.norm_waits = self.activation_waits = False
        if not torch.compiler.is_compiling():
            self.waiting.norm = self.waiting.activation = False
        for place in (self.norm, self.activation):
            y = y if place is None else place.module(y)
        return y  # type: ignore[no-any-return]

    def holds(self, conv: Any) -> bool:
        """Tell whether the modules are still those that were fused, without hooks on intermediate results."""
        # replicas of nn.DataParallel share this object, though each is on another device
        if not self.conv.holds(conv) or hooked(conv) or getattr(conv, "_is_replica", False):
            return False
        if conv.explained_by:  # explanations need the result of every module
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

    @property
    def is_empty(self) -> bool:
        """Whether it has no modules. The convolution then only does what rewritten code asks for."""
        return self.norm is None and self.activation is None

    @property
    def activates(self) -> bool:
        """Whether one of the modules is an activation."""
        return self._activation()[0] is not None

    def can_apply(self, activation: str) -> bool:
        """Tell whether the convolution's pass can apply this activation behind the modules."""
        return self.norm is not None or activation in ONLY

    def _activation(self) -> tuple[str | None, Any]:
        inside = None if self.norm is None else self.norm.module._modules.get("act")  # timm's BatchNormAct2d
        found = activation_of(inside if self.activation is None else self.activation.module)
        assert found is not None
        return found

    def post_ops(self, activation: str | None = None, slope: float | None = None) -> PostOps | None:
        """Return the post-ops for the modules behind the convolution, and for an activation function behind these."""
        name, of_module = self._activation()
        name, found = (activation, slope) if name is None else (name, of_module)
        if self.norm is None:
            return None if name is None else ONLY[name]
        return post_ops_of(
            self.norm.module, None, name, self.as_tensor(found) if isinstance(found, int | float) else found
        )

    def as_tensor(self, slope: float) -> Tensor:
        """Return the slope of a LeakyReLU as a tensor, as PReLU has it."""
        norm: Any = None if self.norm is None else self.norm.module
        like = None if norm is None else norm.running_mean
        if like is None:  # parameters, not `weight`, which a parametrization would compute again
            modules = [self.conv.module] if norm is None else [norm, self.conv.module]
            like = next(parameter for module in modules for parameter in module.parameters())
        return torch.full((1,), float(slope), dtype=like.dtype, device=like.device)

    def hands_norm_through(self, x: Tensor) -> bool:
        """Tell whether the norm has nothing to do for x; raise if the convolution did it, but x is not its result."""
        waits, self.norm_waits = self.norm_waits, False
        if torch.compiler.is_compiling():
            return bool(waits)
        waits, self.waiting.norm = self.waiting.norm or waits is True, False
        if waits:
            self._check(x, "BatchNorm")
        return waits or self._is_outside_checkpoint()

    def hands_activation_through(self, x: Tensor, shared: bool) -> bool:
        """Tell whether the activation has nothing to do for x; raise as for the norm, except for a shared activation.

        A shared one may get other tensors too, and may be applied twice.
        """
        waits, self.activation_waits = self.activation_waits, False
        if torch.compiler.is_compiling():
            return bool(waits) and not shared
        waits, self.waiting.activation = self.waiting.activation or waits is True, False
        if waits and not shared:
            self._check(x, "activation")
        return (waits and self._is_result(x)) or (not shared and self._is_outside_checkpoint())

    def _is_outside_checkpoint(self) -> bool:
        """Tell whether activation checkpointing repeats the modules behind the convolution, but not the convolution.

        Its saved input is then the convolution's fused result, as another tensor object.
        """
        if backward_pass() in (-1, self.waiting.backward):
            return False
        conv = self.convolution()
        return conv is not None and self.fuses(conv)

    def convolution(self) -> Any:
        """Return the convolution that has this fusion; None if it was replaced or removed."""
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
        # a part that is copied shall not take along what is around it
        state = self.__dict__ | {"norm_waits": False, "activation_waits": False, "around": ()}
        del state["waiting"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, waiting=_Waiting())
