"""Record the code of a module and of those inside it that hold fused convolutions, as calls of all other modules.

Code is recorded by torch.fx, and only where it cannot depend on more than the children and settings of its module.
"""

from dis import get_instructions
from inspect import Parameter, isfunction, signature
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from dcnet.layers.decoupled import Decoupled
from dcnet.layers.fusion import Following
from dcnet.util.compat import hooked

# What code may name beside the children and settings of its module. Other names, such as `isinstance`, could tell a
# recording from a real run, and so lead to other code.
_HARMLESS = {"torch", "F", "getattr", "add", "add_", "cat", "flatten", "mean", "relu"}
_SETTINGS = (bool, int, float, str, type(None), torch.dtype, nn.Module)
_MISSING = object()


class Source(NamedTuple):
    """A module whose code was recorded, with the children and the settings that this code depends on."""

    module: nn.Module
    children: dict[str, nn.Module | None]
    settings: dict[str, Any]

    def holds(self) -> bool:
        """Tell whether they are as they were."""
        attributes = vars(self.module)
        if any(attributes.get(name, _MISSING) is not value for name, value in self.settings.items()):
            return False
        children = self.module._modules
        if not torch.compiler.is_compiling():
            return children == self.children
        # torch.compile does not compare dictionaries of modules
        pairs = zip(children.items(), self.children.items(), strict=True)
        return len(children) == len(self.children) and all(a[0] == b[0] and a[1] is b[1] for a, b in pairs)


class Recording(NamedTuple):
    """The code of a module as a graph of calls, and whose code is part of it: the module first, then those inside.

    in_place: whether sums are written as `x += y`, which torch.fx records as `x + y`.
    """

    graph: fx.Graph
    sources: list[Source]
    in_place: bool


def record(module: nn.Module) -> Recording | None:
    """Return a module's code; None where it cannot be recorded, or is another one in training than in evaluation."""
    if not _holds_fused(module) or not _can_be_recorded(module):
        return None
    modes = {inner: inner.training for inner in module.modules()}
    recordings: list[Recording] = []
    try:
        for training in (True, False):
            for inner in modes:
                inner.__dict__["training"] = training
            tracer = _Tracer()
            graph = tracer.trace(module)
            inside = (module, *tracer.inside)
            signs = set().union(*(_operators(_forward_of(one).__code__) for one in inside))
            if signs >= {"+", "+="}:  # the graph does not tell which is which
                return None
            recordings.append(Recording(graph, [_source(one) for one in inside], "+=" in signs))
    except Exception:  # torch.fx raises whatever the code does when it meets a stand-in for a tensor
        return None
    finally:
        for inner, training in modes.items():
            inner.__dict__["training"] = training
    return recordings[0] if str(recordings[0].graph) == str(recordings[1].graph) else None


class _Tracer(fx.Tracer):
    """Follows the code of modules that hold fused convolutions; all others are single calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[nn.Module] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        follows = _holds_fused(m) and not hooked(m) and _can_be_recorded(m)
        if follows:
            self.inside.append(m)
        return not follows


def _holds_fused(module: nn.Module) -> bool:
    if isinstance(module, Decoupled | Following):
        return False
    return any(isinstance(inner, Decoupled) and inner.fusion is not None for inner in module.modules())


def _can_be_recorded(module: nn.Module) -> bool:
    """Tell whether a module runs a plain function of its class, of one input, and of its settings only."""
    forward = _forward_of(module)
    if not isfunction(forward) or "forward" in vars(module):
        return False
    _, *inputs = signature(forward).parameters.values()
    if len(inputs) != 1 or inputs[0].kind is not Parameter.POSITIONAL_OR_KEYWORD:
        return False
    code = forward.__code__
    if inputs[0].default is not Parameter.empty or code.co_freevars:
        return False
    if any(isinstance(constant, type(code)) for constant in code.co_consts):  # a function inside
        return False
    stores = any(one.opname in ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL") for one in get_instructions(code))
    if stores or any(sign.endswith("=") and sign != "+=" for sign in _operators(code)):
        return False
    for name in set(code.co_names) - _HARMLESS:
        value = module._modules[name] if name in module._modules else getattr(module, name, _MISSING)
        if not isinstance(value, _SETTINGS):
            return False
    return True


def _operators(code: CodeType) -> set[str]:
    """Return the signs of the operators in code, such as "+" and "+="."""
    return {one.argrepr for one in get_instructions(code) if one.opname == "BINARY_OP"}


def _forward_of(module: nn.Module) -> Any:
    """Return the function that a module runs, below what `rewritten.py` put before it."""
    return next(vars(k)["forward"] for k in type(module).__mro__ if "forward" in vars(k) and not is_rewritten(k))


def is_rewritten(kind: type) -> bool:
    """Tell whether this is a class that `rewritten.py` made."""
    return kind.__module__ == "dcnet.layers.rewritten"


def _source(module: nn.Module) -> Source:
    code, attributes = _forward_of(module).__code__, vars(module)
    # names are in the code itself, those that `getattr` takes among its constants
    names = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())}
    settings = {name: attributes.get(name, _MISSING) for name in names - _HARMLESS - {"training"}}
    return Source(module, dict(module._modules), settings)
