"""Record the code of a module, and of modules inside it that contain fused convolutions; other modules are calls.

torch.fx records it, and only if it cannot depend on more than the children and settings of its module.
"""

from collections.abc import Sequence
from dis import get_instructions
from inspect import Parameter, isfunction, signature
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from dcnet.fusing.following import Following
from dcnet.layers.decoupled import Decoupled
from dcnet.util.compat import hooked

# Names that code may use besides the children and settings of its module, unless its class defines them. With others,
# such as `isinstance`, code could tell a recording from a real run, and then do something else.
_HARMLESS = {
    *("torch", "nn", "functional", "F", "getattr"),
    *("add", "add_", "cat", "mean", "sum", "softmax", "log_softmax", "sigmoid", "tanh"),
    *("relu", "relu_", "relu6", "silu", "hardswish", "gelu", "leaky_relu"),
    *("size", "shape", "view", "reshape", "flatten", "squeeze", "unsqueeze", "permute", "transpose", "contiguous"),
    *("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "interpolate"),
}
_SETTINGS = (bool, int, float, str, type(None), torch.dtype, nn.Module)
_MISSING = object()
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Source(NamedTuple):
    """A module whose code was recorded, or that this code reads, with the children and settings it depends on."""

    module: nn.Module
    children: dict[str, nn.Module | None]
    settings: dict[str, Any]
    owner: Any = None  # the class that defines its forward, and that function
    forward: Any = None

    def holds(self) -> bool:
        """Tell whether children, settings and forward are unchanged."""
        attributes = vars(self.module)
        if any(attributes.get(name, _MISSING) is not value for name, value in self.settings.items()):
            return False
        if self.owner is not None and self.owner.forward is not self.forward:
            return False
        children = self.module._modules
        if len(children) != len(self.children):
            return False
        if not torch.compiler.is_compiling():
            return [*children.items()] == [*self.children.items()]
        # torch.compile does not compare lists of modules
        return all(a == b and m is n for (a, m), (b, n) in zip(children.items(), self.children.items(), strict=True))


class Recording(NamedTuple):
    """The code of a module as a graph of calls, and the modules whose code it includes: itself, then those inside.

    in_place: whether sums are written as `x += y`, which torch.fx records as `x + y`.
    """

    graph: fx.Graph
    sources: list[Source]
    in_place: bool


def record(module: nn.Module) -> Recording | None:
    """Return a module's code; None if it cannot be recorded, or differs between training and evaluation."""
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
            recordings.append(Recording(graph, _sources(module, inside, graph), "+=" in signs))
    except Exception:  # code may raise anything when it gets a stand-in for a tensor
        return None
    finally:
        for inner, training in modes.items():
            inner.__dict__["training"] = training
    return recordings[0] if str(recordings[0].graph) == str(recordings[1].graph) else None


class _Tracer(fx.Tracer):
    """Records the code inside modules that contain fused convolutions; all other modules are single calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[nn.Module] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        follows = type(m).__call__ is nn.Module.__call__ and _holds_fused(m) and not hooked(m) and _can_be_recorded(m)
        if follows:
            self.inside.append(m)
        return not follows


def _holds_fused(module: nn.Module) -> bool:
    if isinstance(module, Decoupled | Following):
        return False
    return any(isinstance(inner, Decoupled) and inner.fusion is not None for inner in module.modules())


def _can_be_recorded(module: nn.Module) -> bool:
    """Tell whether a module's forward is a plain function of its class that depends on one input and its settings."""
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
    kind, own = type(module), vars(module) | module._modules
    known = (
        isinstance(own[n], _SETTINGS) if n in own else n in _HARMLESS and not hasattr(kind, n) for n in code.co_names
    )
    return all(known) and not _pickles_itself(kind)


def _pickles_itself(kind: type) -> bool:
    """Tell whether a class defines how it is copied, as `torch.fx.GraphModule` does; `Rewritten` would override it."""
    own = (vars(base) for base in kind.__mro__ if base is not object and not is_rewritten(base))
    return any("__reduce__" in names or "__reduce_ex__" in names for names in own)


def _operators(code: CodeType) -> set[str]:
    """Return the signs of the operators in code, such as "+" and "+="."""
    return {one.argrepr for one in get_instructions(code) if one.opname == "BINARY_OP"}


def owner_of_forward(module: nn.Module) -> type:
    """Return the class that defines a module's forward, apart from the class that `rewritten.py` made."""
    return next(kind for kind in type(module).__mro__ if "forward" in vars(kind) and not is_rewritten(kind))


def _forward_of(module: nn.Module) -> Any:
    return vars(owner_of_forward(module))["forward"]


def is_rewritten(kind: type) -> bool:
    """Tell whether this is a class that `rewritten.py` made."""
    return kind.__module__ == "dcnet.fusing.rewritten"


def _sources(module: nn.Module, inside: Sequence[nn.Module], graph: fx.Graph) -> list[Source]:
    """Return the modules whose code was recorded, and the containers that it reads without calling them."""
    called = {module.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
    sources = [_source(one) for one in inside]
    known = {*called, *inside}
    for source in sources:  # the list grows during the loop
        for child in source.children.values():
            if isinstance(child, _CONTAINERS) and child not in known:
                known.add(child)
                sources.append(Source(child, dict(child._modules), {}))
    return sources


def _source(module: nn.Module) -> Source:
    owner = owner_of_forward(module)
    forward, attributes = vars(owner)["forward"], vars(module)
    # attributes are among the names of the code; those for `getattr` are among its constants
    constants = (c for c in forward.__code__.co_consts if isinstance(c, str) and c.isidentifier())
    names = {*forward.__code__.co_names, *constants} - {"training"}
    settings = {name: attributes.get(name, _MISSING) for name in names}
    return Source(module, dict(module._modules), settings, owner, forward)
