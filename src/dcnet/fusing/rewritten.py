"""Rewrite the forward of modules around fused convolutions: additions join their passes, and maps hand energies on.

An addition, as in timm's `Bottleneck`, is not a module: it is in the code of the module around it. torch.fx records
that code, and the rewritten recording runs instead of it. There a convolution adds the residual in its own pass, and
hands on the energy of its result if only fused convolutions read that.
"""

from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from dcnet.fusing.fused_code import Code, Joined, rewritten_code
from dcnet.util.compat import hooked


class Rewritten:
    """Mixin; list it before a module's class in the bases. It runs the rewritten code as long as that is valid."""

    fused_code: Code | None = None
    code_is_due = False  # in a copy: its code is recorded at the first call, when all modules of the model are there

    def __init_subclass__(cls) -> None:
        """Skip what the module's class does for its subclasses, such as registering them."""

    def runs_fused_code(self, x: Any) -> bool:
        """Tell whether to run the rewritten code on x: the modules are the same, and none has a hook."""
        assert isinstance(self, nn.Module)
        if any(isinstance(one, Proxy) for one in (x if isinstance(x, tuple | list) else (x,))):
            return False  # torch.fx has to see the modules one by one
        if self.code_is_due and not torch.compiler.is_compiling():
            self.code_is_due = False
            self.fused_code = rewritten_code(self)
        code = self.fused_code
        if code is None or code.sources[0].module is not self:  # a replica
            return False
        if not all(source.holds() for source in code.sources):
            return False
        for conv in code.convs:
            if conv.fusion is None or not conv.fusion.holds(conv):
                return False
        return not any(hooked(one) for one in code.skipped)

    def __reduce_ex__(self, protocol: Any) -> Any:  # generated code cannot be pickled; it is generated again
        state: Any = super().__getstate__()
        state = {key: value for key, value in state.items() if key != "fused_code"}
        # if a fusion has modules, these take it along (`Following`)
        convs = () if self.fused_code is None else self.fused_code.convs
        empty = [(conv.fusion, conv) for conv in convs if conv.fusion is not None and conv.fusion.is_empty]
        return _restored, (plain_kind(self),), state | {"convolutions": empty}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for fusion, conv in state.pop("convolutions", ()):
            vars(conv)["fusion"] = fusion  # conv may not have its own state yet
        super().__setstate__(state)  # type: ignore[misc]
        self.code_is_due = True


def _restored(kind: type[nn.Module]) -> nn.Module:
    fused: nn.Module = object.__new__(_rewritten_class(kind))
    return fused


# the input keeps its name in the class, for callers that pass it by keyword, and for torch.fx
_FORWARD = """
def forward(self, {input}):
    if self.runs_fused_code({input}):
        return self.fused_code.function(self, {input})
    return super(Rewritten, self).forward({input})
"""
_CLASSES: dict[type, type[Any]] = {}


def _rewritten_class(kind: type) -> type[Any]:
    if kind not in _CLASSES:
        _, input_name = signature(kind.forward).parameters  # type: ignore[attr-defined]
        names: dict[str, Any] = {"Rewritten": Rewritten}
        exec(_FORWARD.format(input=input_name), names)
        members = {"__module__": __name__, "forward": names["forward"]}
        _CLASSES[kind] = type(f"Fused{kind.__name__}", (Rewritten, kind), members)
    return _CLASSES[kind]


def plain_kind(module: Rewritten) -> type[nn.Module]:
    """Return the class that a rewritten module had before."""
    return next(kind for kind in type(module).__mro__ if kind in _CLASSES)  # FSDP may have derived a class from it


def rewrite_(module: nn.Module) -> dict[str, Joined]:
    """Rewrite a module's forward if there are fused convolutions in it.

    Return what these convolutions do now in addition to the modules behind them.
    """
    code = None if isinstance(module, Rewritten) else rewritten_code(module)
    if code is None:
        return {}
    module.__class__ = _rewritten_class(type(module))
    module.fused_code = code  # type: ignore[assignment]
    for conv in code.convs:
        assert conv.fusion is not None
        conv.fusion.within = module
    return code.joined


def restore_(module: Rewritten) -> None:
    """Let a module run its own code again."""
    for name in ("fused_code", "code_is_due"):
        vars(module).pop(name, None)
    if type(module) is _CLASSES.get(plain_kind(module)):  # else FSDP has derived a class from it
        module.__class__ = plain_kind(module)  # type: ignore[assignment]
