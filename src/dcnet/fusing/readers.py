"""Find the modules that read a convolution's result, one after the other: by torch.fx, or by running the model."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

from torch import fx, nn
from torch.utils._pytree import tree_leaves

from dcnet.fusing.following import IDEMPOTENT, Following, activation_of, is_timm_norm
from dcnet.fusing.running import Call, Made, in_mode, run_once
from dcnet.fusing.wrappers import unwrap
from dcnet.layers.decoupled import Decoupled, decoupled_layers
from dcnet.layers.types import ExampleInput
from dcnet.util.compat import BatchNorm
from dcnet.util.text import few

# The modules that a convolution's result goes through one after the other, each the only reader. The last entry may be
# a reason why the chain ends.
Chains = dict[str, list[str]]
Modes = tuple[bool, ...]  # of training
BOTH, EVALUATION = (True, False), (False,)
END = "!"
_KEPT = f"{END}the model keeps its result"


class Seen(NamedTuple):
    """What is known about a model's code.

    Attributes:
        chains: what each decoupled layer's result goes through.
        calls: how often each module is called.
        sources: what computes the input of each BatchNorm: the name of a module or of a function.
        read: the modules with parameters that other code reads.
    """

    chains: Chains
    calls: Mapping[str, int]
    sources: Mapping[str, str] = {}
    read: frozenset[str] = frozenset()


def look(model: nn.Module, example_input: ExampleInput | None = None, modes: Modes = BOTH) -> tuple[Seen, str]:
    """Return what happens to every decoupled layer's result, and why that is unknown ("" if it is known).

    Run the model on the example; without one, record it with torch.fx, which not every model allows.
    """
    if example_input is not None:
        try:
            return by_running(model, example_input, modes), ""
        except OnlyInEvaluation as error:
            why = f"in training the model cannot be run on this example_input ({error}); give one that it takes there"
            return Seen({}, {}), why
    watched = [name for name, module in model.named_modules() if module._modules and name and _has_hooks(module)]
    if watched:
        why = f"{watched[0]} has hooks, which torch.fx would call with stand-ins for tensors; give an example_input"
        return Seen({}, {}), why
    try:
        return by_tracing(model, modes), ""
    except Exception as error:
        return Seen({}, {}), f"torch.fx cannot trace this model ({type(error).__name__}); give an example_input"


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = isinstance(m, Decoupled | Following) or is_timm_norm(m)
        return known or super().is_leaf_module(m, module_qualified_name)


def by_tracing(model: nn.Module, modes: Modes = BOTH) -> Seen:
    """Record the model with torch.fx, and return what happens to every convolution's result, in all of the modes."""
    inner = unwrap(model)
    if inner is not model:
        names = {module: name for name, module in model.named_modules()}
        seen = by_tracing(inner, modes)
        full = {name: f"{names[inner]}.{name}" for name, _ in inner.named_modules(remove_duplicate=False)}
        return Seen(
            {full[name]: [full.get(one, one) for one in chain] for name, chain in seen.chains.items()},
            {full[name]: count for name, count in seen.calls.items()},
            {full[name]: full.get(source, source) for name, source in seen.sources.items()},
            frozenset(full[name] for name in seen.read),
        )
    found = []
    for training in modes:
        with in_mode(model, training):
            found.append(_traced(model))
    return _in_all(found)


def by_running(model: nn.Module, example_input: ExampleInput, modes: Modes = BOTH) -> Seen:
    """Run the model, and return what happens to every convolution's result, in all of the modes."""
    found = [_ran(model, example_input, training=False)]
    if True in modes:
        try:
            found.append(_ran(model, example_input, training=True))
        except Exception as error:
            message = " ".join(str(error).split())
            raise OnlyInEvaluation(f"{type(error).__name__}: {message[:200]}") from error
    return _in_all(found)


class OnlyInEvaluation(RuntimeError):
    """The model runs on the example in evaluation, but not in training."""


def _in_all(found: list[Seen]) -> Seen:
    """Return what holds in every mode. A chain ends where the modes differ."""
    one, other = found[0], found[-1]
    chains: Chains = {}
    for name in {**one.chains, **other.chains}:
        here, there = one.chains.get(name), other.chains.get(name)
        if here is None or there is None:  # it is called in one of the modes only
            chains[name] = here or there or []
            continue
        same = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(here, there, strict=False))]
        chains[name] = here if here == there else [*same, f"{END}what follows is not the same in training"]
    calls = {name: max(one.calls.get(name, 0), other.calls.get(name, 0)) for name in {**one.calls, **other.calls}}
    return Seen(chains, Counter(calls), {**one.sources, **other.sources}, one.read | other.read)


def _traced(model: nn.Module) -> Seen:
    with _undisturbed(model) as kept:
        graph = _Tracer().trace(model)
    calling: list[Any] = [node for node in graph.nodes if node.op == "call_module"]
    calls = Counter(node.target for node in calling)
    modules = dict(model.named_modules(remove_duplicate=False))
    chains: Chains = {}
    for node in calling:
        if not isinstance(modules[node.target], Decoupled):
            continue
        if calls[node.target] > 1:
            chains[node.target] = [f"{END}called {calls[node.target]} times"]
            continue
        chain, current = [], node
        while True:
            users = list(current.users)
            if current in kept or len(users) != 1 or users[0].op != "call_module" or len(users[0].all_input_nodes) != 1:
                names = [user.target if user.op == "call_module" else user.name for user in users]
                chain.append(_KEPT if current in kept else _end(names))
                break
            current = users[0]
            if calls[current.target] > 1 and not _may_be_shared(modules[current.target]):
                chain.append(f"{END}{current.target} is called {calls[current.target]} times")
                break
            chain.append(current.target)
            if len(chain) > 4:
                break
        chains[node.target] = chain
    norms = [node for node in calling if isinstance(modules[node.target], BatchNorm)]
    read = {node.target.rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    return Seen(chains, calls, {node.target: _source(node, modules) for node in norms}, frozenset(read))


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[set[fx.Node]]:
    """On exit, undo attributes that traced code set on modules: caches would keep stand-ins for tensors.

    Yield the set of stored nodes, which is filled on exit.
    """
    kept: set[fx.Node] = set()
    stores = [one for m in model.modules() for one in (vars(m), *vars(m).values()) if isinstance(one, dict | list)]
    before = [(store, store.copy()) for store in stores]
    try:
        yield kept
    finally:
        for store, old in before:
            kept |= {leaf.node for leaf in tree_leaves(_values(store)) if isinstance(leaf, fx.Proxy)}
            if len(store) == len(old) and all(a is b for a, b in zip(_values(store), _values(old), strict=True)):
                continue
            store.clear()
            store.extend(old) if isinstance(store, list) else store.update(old)


def _values(store: Any) -> list[Any]:
    return list(store) if isinstance(store, list) else [*store, *store.values()]


def _source(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    """Return what computes the input of a call, apart from calls of nn.Identity."""
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        if node.op != "call_module" or type(modules[str(node.target)]) is not nn.Identity:
            break
    return str(node.target) if node.op == "call_module" else node.name


def _may_be_shared(module: nn.Module) -> bool:
    found = activation_of(module)
    return found is not None and found[0] in (None, *IDEMPOTENT)


def _end(readers: list[str]) -> str:
    """Return the end of a chain: the readers of its result."""
    return f"{END}its result is read by {few(readers) or 'the caller'}"


def _ran(model: nn.Module, example_input: ExampleInput, training: bool) -> Seen:
    flow, returned = run_once(model, example_input, model.modules(), model.parameters(), training)
    kept, own = flow.alive - returned, f"the code of {type(model).__name__}"
    names = {module: name for name, module in model.named_modules()}
    calls = Counter(one.module for one in flow.calls)
    made = {one.module: one.output for one in flow.calls if one.output is not None}
    taken: dict[Made, Call] = {}  # by a leaf, as its only input
    for one in flow.calls:
        leaf = not list(one.module.children()) or is_timm_norm(one.module)
        if leaf and one.single and one.input and one.output and type(one.module) is not nn.Identity:
            taken.setdefault(one.input, one)
    chains: Chains = {}
    for name, layer in decoupled_layers(model).items():
        if calls[layer] != 1:
            chains[name] = [f"{END}called {calls[layer]} times"]
            continue
        chain: list[str] = []
        current = made[layer]
        while len(chain) < 3:
            next_one = taken.get(current)
            follower, output = (None, None) if next_one is None else (next_one.module, next_one.output)
            inner = set() if follower is None else set(follower.modules())
            inside = [reader in inner for reader in current.readers]
            # an in-place activation returns the same tensor: those who read it afterward read its result
            before = current.readers[: inside.index(True)] if any(inside) and output is current else current.readers
            others = {"" if reader is None else names[reader] or own for reader in before if reader not in inner}
            if current in kept and output is not current:
                chain.append(_KEPT)
                break
            if follower is None or output is None or others or (current in returned and output is not current):
                chain.append(_end(sorted(others)))
                break
            if calls[follower] > 1 and not _may_be_shared(follower):
                chain.append(f"{END}{names[follower]} is called {calls[follower]} times")
                break
            chain.append(names[follower])
            if output is current:
                break
            current = output
        chains[name] = chain
    makers: dict[Made | None, str] = {None: "other code"}
    for one in flow.calls:  # the innermost module comes first
        makers.setdefault(one.output, names[one.module])
    norms = [one for one in flow.calls if isinstance(one.module, BatchNorm)]
    sources = {names[one.module]: makers[one.input] for one in norms}
    read = set()
    for module, name in names.items():
        found = [flow.of(parameter) for parameter in module._parameters.values()]
        readers = {reader for made in found if made is not None for reader in made.readers} - {module}
        if any(not isinstance(reader, Decoupled) for reader in readers):  # in a Block, these run the norm
            read.add(name)
    return Seen(chains, {names[module]: count for module, count in calls.items()}, sources, frozenset(read))
