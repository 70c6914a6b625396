"""Find which modules a convolution's result goes through, one after the other: by torch.fx, or by running the model."""

from collections import Counter
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from torch import fx, nn

from dcnet.layers.decoupled import Decoupled, decoupled_layers
from dcnet.layers.fusion import IDEMPOTENT, Following, activation_of, is_timm_norm
from dcnet.layers.running import Call, Made, in_mode, run_once
from dcnet.layers.wrappers import unwrap

# The modules that a convolution's result goes through one after the other, each the only reader. The last entry may be
# a reason why the chain ends.
Chains = dict[str, list[str]]
_Found = tuple[Chains, Mapping[str, int]]  # and how often each module is called
END = "!"


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = isinstance(m, Decoupled | Following) or is_timm_norm(m)
        return known or super().is_leaf_module(m, module_qualified_name)


def by_tracing(model: nn.Module) -> tuple[Chains, Mapping[str, int]]:
    """Record the model with torch.fx, and see what becomes of every convolution's result, whatever the mode."""
    inner = unwrap(model)
    if inner is not model:
        names = {module: name for name, module in model.named_modules()}
        chains, calls = by_tracing(inner)
        full = {name: f"{names[inner]}.{name}" for name, _ in inner.named_modules(remove_duplicate=False)}
        chains = {full[name]: [full.get(one, one) for one in chain] for name, chain in chains.items()}
        return chains, {full[str(name)]: count for name, count in calls.items()}
    found = []
    for training in (True, False):
        with in_mode(model, training):
            found.append(_traced(model))
    return _in_both(*found)


def by_running(model: nn.Module, example_input: Any) -> tuple[Chains, Mapping[str, int]]:
    """Run the model, and see what becomes of every convolution's result, whatever the mode."""
    evaluated = _ran(model, example_input, training=False)
    try:
        return _in_both(_ran(model, example_input, training=True), evaluated)
    except Exception as error:
        message = " ".join(str(error).split())
        raise OnlyInEvaluation(f"{type(error).__name__}: {message[:200]}") from error


class OnlyInEvaluation(RuntimeError):
    """A model runs on an example in evaluation, but not in training."""


def _in_both(in_training: _Found, in_evaluation: _Found) -> _Found:
    """Return what becomes of results in training as in evaluation. A chain ends where the two differ."""
    chains: Chains = {}
    for name in {**in_training[0], **in_evaluation[0]}:
        one, other = (found[0].get(name) for found in (in_training, in_evaluation))
        if one is None or other is None:  # it is called in one of the modes only
            chains[name] = one or other or []
            continue
        same = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
        chains[name] = one if one == other else [*same, f"{END}what follows is not the same in training"]
    return chains, Counter(in_training[1]) | Counter(in_evaluation[1])


def _traced(model: nn.Module) -> _Found:
    graph = _Tracer().trace(model)
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    modules = dict(model.named_modules(remove_duplicate=False))
    chains: Chains = {}
    for node in graph.nodes:
        if node.op != "call_module" or not isinstance(modules[node.target], Decoupled):
            continue
        if calls[node.target] > 1:
            chains[node.target] = [f"{END}called {calls[node.target]} times"]
            continue
        chain, current = [], node
        while True:
            users = list(current.users)
            if len(users) != 1 or users[0].op != "call_module" or len(users[0].all_input_nodes) != 1:
                chain.append(_end([user.target if user.op == "call_module" else user.name for user in users]))
                break
            current = users[0]
            if calls[current.target] > 1 and not _may_be_shared(modules[current.target]):
                chain.append(f"{END}{current.target} is called {calls[current.target]} times")
                break
            chain.append(current.target)
            if len(chain) > 4:
                break
        chains[node.target] = chain
    return chains, calls


def _may_be_shared(module: nn.Module) -> bool:
    found = activation_of(module)
    return found is not None and found[0] in (None, *IDEMPOTENT)


def _end(readers: list[str]) -> str:
    """Return the end of a chain: who reads its result."""
    few = ", ".join(readers[:3]) + (f" and {len(readers) - 3} more" if len(readers) > 3 else "")
    return f"{END}its result is read by {few or 'the caller'}"


def _ran(model: nn.Module, example_input: Any, training: bool) -> _Found:
    flow, returned = run_once(model, example_input, model.modules(), training)
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
            # an activation in place returns the same tensor: what is read after it is its result
            before = current.readers[: inside.index(True)] if any(inside) and output is current else current.readers
            others = {"" if reader is None else names[reader] for reader in before if reader not in inner}
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
    return chains, {names[module]: count for module, count in calls.items()}
