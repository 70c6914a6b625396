"""A forward and a backward pass over the same tensors, recorded once and made into lean programs.

In a training step on a CPU a decoupled network's own share is passes over memory. So what is to be computed is recorded with
torch.fx, value and gradients in one graph, and then

- what is computed twice is computed once, and what no result needs is not computed;
- in products, small factors (one for each position, or for each kernel) come last, and behind sums where they can;
- tanh of a product of small factors is left to `tanh_interpolation.py`;
- results of slow functions (tanh takes as long as twenty products) are kept by the forward pass for the backward pass;
- a result that nobody reads any more is written over, and the last operation writes where its result is wanted.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from dcnet.ops.cpu.rewriting import note_sizes, simplify, small_factors_last, tanh_of_products
from dcnet.ops.cpu.tanh_interpolation import tanh_of_product

_COMMUTATIVE = (operator.mul, operator.add)

# operation (a function, or a method by its name) -> the method that writes over its tensor, and the function that takes out=
_VARIANTS: dict[Any, tuple[str, Callable[..., Any]]] = {
    operator.mul: ("mul_", torch.mul),
    operator.add: ("add_", torch.add),
    operator.sub: ("sub_", torch.sub),
    operator.truediv: ("div_", torch.div),
    operator.neg: ("neg_", torch.neg),
    "clamp": ("clamp_", torch.clamp),
    torch.abs: ("abs_", torch.abs),
    torch.rsqrt: ("rsqrt_", torch.rsqrt),
    torch.tanh: ("tanh_", torch.tanh),
    torch.asin: ("asin_", torch.asin),
    tanh_of_product: ("", tanh_of_product),  # its arguments are small: none is written over
}

# slower than writing their results to memory and reading them again (benchmarks/NOTES.md); asin, at half the time of tanh, is not
_SLOW = (torch.tanh, tanh_of_product, operator.pow)

Pass = Callable[..., tuple[Any, ...]]  # over a piece


class Pair(NamedTuple):
    """The two programs. Given what is the same for every piece, each makes ready what depends on that alone, and is the pass over a piece then.

    Parameters come in the order of `record`'s, without those that are None.
    """

    forward: Callable[..., Pass]  # (*once) -> (out, *kept, *inputs) -> the other results
    backward: Callable[
        ..., Pass
    ]  # (*once) -> (out if there is a first result, *kept, *inputs, *later) -> the other results
    kept: int


def record(
    forward: Callable[..., Sequence[Any]],
    backward: Callable[..., Sequence[Any]],
    inputs: Mapping[str, Tensor | None],
    later: Mapping[str, Tensor | None],
    size: torch.Size,
    keep: bool,
    direct: bool = True,
    once: Mapping[str, Tensor | None] | None = None,
    inverses: tuple[str, str] | None = None,
) -> Pair:
    """The programs of two functions, the first of the inputs by name, the second also of what there is later, such as the incoming gradient.
    What is the same for every piece comes last, by name too.

    The first result of each, of the given size, goes to a tensor of the caller's. The inputs given are examples in float64: their sizes
    matter, in which no two dimensions may be alike. keep: whether the forward pass may keep results for the other; direct: whether the
    caller's tensors have the dtype of the arithmetic; inverses: two inputs whose product is 1.
    """
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    once = once or {}
    examples = {**inputs, **later, **once}
    proxies = {
        name: None if example is None else fx.Proxy(graph.placeholder(name), tracer)
        for name, example in examples.items()
    }
    ahead, behind = forward(**{name: proxies[name] for name in (*inputs, *once)}), backward(**proxies)
    graph.output(
        tuple(
            tuple(result.node if isinstance(result, fx.Proxy) else result for result in results)
            for results in (ahead, behind)
        )
    )
    present = [example for example in examples.values() if example is not None]
    note_sizes(graph, size, present)
    simplify(graph)
    small_factors_last(graph, inverses)
    note_sizes(graph, size, present)
    simplify(graph)
    tanh_of_products(graph)
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    first, second, same = (
        [placeholders[name] for name in names if examples[name] is not None] for names in (inputs, later, once)
    )
    ahead, behind = cast(tuple[Any, Any], graph.output_node().args[0])
    kept = _kept(graph, ahead, behind) if keep else []
    return Pair(
        _cut(graph, first, same, [ahead[0], *kept], ahead[1:], direct),
        _cut(graph, [*kept, *first, *second], same, [] if behind[0] is None else [behind[0]], behind[1:], direct),
        len(kept),
    )


def _needed(results: Iterable[Any], given: Iterable[fx.Node]) -> set[fx.Node]:
    """Everything that leads from what is given to the results, both included."""
    needed: set[fx.Node] = set()
    waiting = [result for result in results if isinstance(result, fx.Node)]
    stop = set(given)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node in stop else node.all_input_nodes
    return needed


def _kept(graph: fx.Graph, ahead: Iterable[Any], behind: Iterable[Any]) -> list[fx.Node]:
    """The results of slow functions in the forward pass that the backward pass would compute again."""
    computed = _needed(ahead, [])
    slow = [node for node in graph.nodes if node in computed and node.target in _SLOW and node.meta["full"]]
    again = _needed(behind, slow)
    return [node for node in slow if node in again]


def _cut(
    graph: fx.Graph,
    given: Sequence[fx.Node],
    once: Sequence[fx.Node],
    outs: Sequence[fx.Node],
    results: Sequence[Any],
    direct: bool,
) -> Callable[..., Pass]:
    """The part of a graph that computes `outs`, into tensors that come first among the parameters, and `results`."""
    ready = _ready(graph, once, _needed([*outs, *results], [*given, *once]))
    needed = _needed([*outs, *results], [*given, *once, *ready])
    part = fx.Graph()
    places = [part.placeholder(f"out_{number}") for number in range(len(outs))]
    copies = {node: part.placeholder(node.name) for node in (*given, *once, *ready)}
    for node in graph.nodes:
        if node in needed and node not in copies and node.op != "output":
            copies[node] = part.node_copy(node, copies.__getitem__)
    wanted = {copies[result] for result in (*outs, *results) if isinstance(result, fx.Node)}
    for number, (node, place) in enumerate(zip(outs, places, strict=True)):
        _write_to(part, copies[node], place, direct or number > 0, wanted)
    # a result that comes twice, or to every piece, comes as a tensor of its own, which the caller may change
    distinct: list[Any] = []
    for result in results:
        copy = copies[result] if isinstance(result, fx.Node) else result
        shared = isinstance(copy, fx.Node) and (copy in distinct or copy.op == "placeholder")
        distinct.append(part.call_method("clone", (copy,)) if shared else copy)
    part.output(tuple(distinct))
    _write_over(part)
    run = fx.GraphModule(nn.Module(), part).forward

    before = fx.Graph()
    small = {node: before.placeholder(node.name) for node in once}
    on_the_way = _needed(ready, once)
    for node in graph.nodes:
        if node in on_the_way and node not in small:
            small[node] = before.node_copy(node, small.__getitem__)
    before.output(tuple(small[node] for node in ready))
    prepare = fx.GraphModule(nn.Module(), before).forward

    def program(*same: Tensor) -> Pass:
        made_ready = prepare(*same)
        return lambda *piece: run(*piece, *same, *made_ready)

    return program


def _ready(graph: fx.Graph, once: Sequence[fx.Node], needed: set[fx.Node]) -> list[fx.Node]:
    """What can be computed before the first piece, and is not just on the way to something else that can."""
    known = set(once)
    for node in graph.nodes:
        if node in needed and node.op.startswith("call") and node.all_input_nodes and {*node.all_input_nodes} <= known:
            known.add(node)
    return [
        node
        for node in graph.nodes
        if node in known and node not in once and any(user in needed and user not in known for user in node.users)
    ]


def _write_to(graph: fx.Graph, node: fx.Node, place: fx.Node, direct: bool, wanted: set[fx.Node]) -> None:
    """Lets a result be written to a place, directly where that can be, and before it what it alone is made of."""

    def can_be(node: Any) -> bool:
        computed = isinstance(node, fx.Node) and node.op != "placeholder" and node.target in _VARIANTS
        return computed and node.meta["full"] and node.meta["arithmetic"] and "out" not in node.kwargs

    if not (direct and can_be(node) and isinstance(node.args[0], fx.Node)):
        with graph.inserting_after(node):
            graph.call_method("copy_", (place, node))
        return
    order = {other: number for number, other in enumerate(graph.nodes)}
    while True:
        node.op, node.target = "call_function", _VARIANTS[node.target][1]
        node.kwargs = {**node.kwargs, "out": place}
        made_of = node.args[0]
        if not can_be(made_of) or made_of in wanted or not isinstance(made_of.args[0], fx.Node):
            return
        if any(order[user] > order[node] for user in made_of.users):
            return
        node = made_of


def _write_over(graph: fx.Graph) -> None:
    """Lets operations write over an argument that is not read again. No operation recorded gives a view of its argument, or the argument itself."""
    last = {argument: node for node in graph.nodes for argument in node.all_input_nodes}
    for node in graph.nodes:
        if (
            node.op == "placeholder"
            or node.target not in _VARIANTS
            or "out" in node.kwargs
            or not (node.meta["full"] and node.meta["arithmetic"])
        ):
            continue
        for position in (0, 1) if node.target in _COMMUTATIVE else (0,):
            argument = node.args[position]
            if not isinstance(argument, fx.Node) or argument.op == "placeholder" or "out" in argument.kwargs:
                continue
            if argument.meta["full"] and argument.meta["arithmetic"] and last[argument] is node:
                rest = tuple(other for number, other in enumerate(node.args) if number != position)
                node.op, node.target, node.args = "call_method", _VARIANTS[node.target][0], (argument, *rest)
                break
