"""Record a forward and a backward pass over the same tensors once, and compile them into lean programs.

On a CPU, a decoupled network mainly adds passes over memory to a training step. So the computation is recorded with
torch.fx, value and gradients in one graph, and the graph is improved:

- repeated computations are done once, and those that no result needs are removed;
- in products, small factors (one for each position, or for each kernel) come last, and after sums where possible;
- tanh of a product of small factors is left to `tanh_interpolation.py`;
- the forward pass keeps the results of slow functions (tanh takes as long as twenty products) for the backward pass;
- a result that is not read again is overwritten, and the last operation writes directly to the caller's tensor;
- intermediate results go to memory that is kept, instead of memory that the operating system provides each time.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from dcnet.ops.cpu.chunks import scratch
from dcnet.ops.cpu.placement import write_over, write_to, write_to_scratch
from dcnet.ops.cpu.rewriting import note_sizes, simplify, small_factors_last, tanh_of_products
from dcnet.ops.cpu.tanh_interpolation import tanh_of_product

# Functions slower than storing and loading their results (benchmarks/NOTES.md). asin is not: it takes half the time of
# tanh. `tanh_of_product` is only slower for few results, which take little memory.
_SLOW = (torch.tanh, operator.pow)
_SLOW_IF_FEW = (*_SLOW, tanh_of_product)

Pass = Callable[..., tuple[Any, ...]]  # over one chunk


class Pair(NamedTuple):
    """The two programs that `record` returns.

    Call a program with the tensors that are the same for every chunk. It computes what depends on these alone, and
    returns the pass over one chunk as a function.

    Parameters come in the order of `record`'s, without those that are None.
    """

    # (*once) -> (out, *kept, *inputs) -> the other results
    forward: Callable[..., Pass]
    # (*once) -> (out if there is a first result, *kept, *inputs, *later) -> the other results
    backward: Callable[..., Pass]
    # how many results the forward pass keeps for the backward pass
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
    few: bool = False,
) -> Pair:
    """Return the programs of a forward and a backward function.

    Both are called with keyword arguments only. The forward function takes `inputs` and `once`; the backward function
    also takes `later`, such as the incoming gradient. The first result of each has the given size and is written to a
    tensor of the caller.

    Args:
        forward: returns the result and whatever else is wanted.
        backward: returns the gradients; the first may be None.
        inputs: example tensors by name, in float64, None for those that are absent. Only their sizes matter, and no two
            dimensions may have the same size.
        later: example tensors that only the backward pass gets.
        size: of the first results.
        keep: whether the forward pass may keep results for the backward pass.
        direct: whether the caller's tensors have the dtype of the arithmetic.
        once: example tensors that are the same for every chunk.
        inverses: the names of two inputs whose product is 1.
        few: whether there are too few results to interpolate tanh.
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
    kept = _kept(graph, ahead, behind, _SLOW_IF_FEW if few else _SLOW) if keep else []
    return Pair(
        _cut(graph, first, same, [ahead[0], *kept], ahead[1:], direct),
        _cut(graph, [*kept, *first, *second], same, [] if behind[0] is None else [behind[0]], behind[1:], direct),
        len(kept),
    )


def _needed(results: Iterable[Any], given: Iterable[fx.Node]) -> set[fx.Node]:
    """Return every node on a path from the given nodes to the results, both included."""
    needed: set[fx.Node] = set()
    waiting = [result for result in results if isinstance(result, fx.Node)]
    stop = set(given)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node in stop else node.all_input_nodes
    return needed


def _kept(graph: fx.Graph, ahead: Iterable[Any], behind: Iterable[Any], functions: Sequence[Any]) -> list[fx.Node]:
    """Return the results of slow functions in the forward pass that the backward pass would compute again."""
    computed = _needed(ahead, [])
    slow = [node for node in graph.nodes if node in computed and node.target in functions and node.meta["full"]]
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
    """Return the program for a part of a graph: what computes `outs` and `results`.

    `outs` are written to tensors that come first among the parameters.
    """
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
        write_to(part, copies[node], place, direct or number > 0, wanted)
    # A result that is returned twice, or for every chunk, is returned as a copy: the caller may change it.
    distinct: list[Any] = []
    for result in results:
        copy = copies[result] if isinstance(result, fx.Node) else result
        shared = isinstance(copy, fx.Node) and (copy in distinct or copy.op == "placeholder")
        distinct.append(part.call_method("clone", (copy,)) if shared else copy)
    part.output(tuple(distinct))
    write_over(part)
    buffers = write_to_scratch(part)
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
        return lambda *chunk: run(*chunk, *same, *made_ready, *scratch(buffers, chunk))

    return program


def _ready(graph: fx.Graph, once: Sequence[fx.Node], needed: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes to compute before the first chunk: what depends on `once` alone and is read for each chunk."""
    known = set(once)
    for node in graph.nodes:
        if node in needed and node.op.startswith("call") and node.all_input_nodes and {*node.all_input_nodes} <= known:
            known.add(node)
    return [
        node
        for node in graph.nodes
        if node in known and node not in once and any(user in needed and user not in known for user in node.users)
    ]
