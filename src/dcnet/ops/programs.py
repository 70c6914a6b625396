"""A forward and a backward pass over the same tensors, recorded once and made into lean programs.

In a training step on a CPU a decoupled network's own share is passes over memory. So what is to be computed is recorded with
torch.fx, value and gradients in one graph, and then

- what is computed twice is computed once, and what no result needs is not computed;
- in products, small factors (one for each position, or for each kernel) come last, and behind sums where they can;
- results of slow functions (tanh takes as long as twenty products) are kept by the forward pass for the backward pass;
- a result that nobody reads any more is written over, and the last operation writes where its result is wanted.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

# (operation, which argument) -> the number that makes it the identity in its other argument
_NEUTRAL = {
    (operator.mul, 0): 1.0,
    (operator.mul, 1): 1.0,
    (operator.truediv, 1): 1.0,
    (operator.add, 0): 0.0,
    (operator.add, 1): 0.0,
    (operator.sub, 1): 0.0,
}
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
}

# slower than writing their results to memory and reading them again (benchmarks/NOTES.md); asin, at half the time of tanh, is not
_SLOW = (torch.tanh, operator.pow)

Program = Callable[..., tuple[Any, ...]]


class Pair(NamedTuple):
    """The two programs; their parameters come in the order of `record`'s, without those that are None."""

    forward: Program  # (out, *kept, *inputs) -> the other results
    backward: Program  # (out if there is a first result, *kept, *inputs, *later) -> the other results
    kept: int


def record(
    forward: Callable[..., Sequence[Any]],
    backward: Callable[..., Sequence[Any]],
    inputs: Mapping[str, Tensor | None],
    later: Mapping[str, Tensor | None],
    size: torch.Size,
    keep: bool,
    direct: bool = True,
) -> Pair:
    """The programs of two functions, the first of the inputs by name, the second also of what there is later, such as the incoming gradient.

    The first result of each, of the given size, goes to a tensor of the caller's. The inputs given are examples in float64: their sizes
    matter, in which no two dimensions may be alike. keep: whether the forward pass may keep results for the other; direct: whether the
    caller's tensors have the dtype of the arithmetic.
    """
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    examples = {**inputs, **later}
    proxies = {name: None if example is None else fx.Proxy(graph.placeholder(name), tracer) for name, example in examples.items()}
    ahead, behind = forward(**{name: proxies[name] for name in inputs}), backward(**proxies)
    graph.output(tuple(tuple(result.node if isinstance(result, fx.Proxy) else result for result in results) for results in (ahead, behind)))
    present = [example for example in examples.values() if example is not None]
    _note_sizes(graph, size, present)
    _simplify(graph)
    _small_factors_last(graph)
    _note_sizes(graph, size, present)
    _simplify(graph)
    given = [node for node in graph.nodes if node.op == "placeholder"]
    before = sum(example is not None for example in inputs.values())
    ahead, behind = cast(tuple[Any, Any], graph.output_node().args[0])
    kept = _kept(graph, ahead, behind) if keep else []
    return Pair(
        _cut(graph, given[:before], [ahead[0], *kept], ahead[1:], direct),
        _cut(graph, [*kept, *given], [] if behind[0] is None else [behind[0]], behind[1:], direct),
        len(kept),
    )


def _note_sizes(graph: fx.Graph, size: torch.Size, examples: Iterable[Tensor]) -> None:
    """Notes the sizes of all results, which are as large as the output, and which have the dtype of the inputs, float64.

    A formula may multiply by `c > 0`, or by `(c > 0) * 1.0`, which has the default dtype: results of other dtypes are no place to write to.
    """
    results: dict[fx.Node, Any] = {}
    given = iter(examples)
    for node in graph.nodes:
        if node.op == "output":  # comes last
            return
        arguments, named = fx.map_arg((node.args, node.kwargs), results.__getitem__)
        if node.op == "placeholder":
            result = next(given)
        else:
            result = node.target(*arguments, **named) if node.op == "call_function" else getattr(arguments[0], node.target)(*arguments[1:], **named)
        results[node] = result
        node.meta["size"] = result.shape if isinstance(result, Tensor) else None
        node.meta["full"] = node.meta["size"] == size
        node.meta["arithmetic"] = isinstance(result, Tensor) and result.dtype == torch.float64


def _simplify(graph: fx.Graph) -> None:
    """Drops what changes nothing, what has been computed before, and what leads to no result."""
    seen: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.target is operator.pos:
            node.replace_all_uses_with(node.args[0])
        for position, argument in enumerate(node.args):
            if isinstance(argument, int | float) and _NEUTRAL.get((node.target, position)) == argument:
                other = node.args[1 - position]
                if isinstance(other, fx.Node) and other.meta["arithmetic"]:
                    node.replace_all_uses_with(other)
        if node.op in ("call_function", "call_method"):
            earlier = seen.setdefault((node.op, node.target, node.args, tuple(node.kwargs.items())), node)
            if earlier is not node:
                node.replace_all_uses_with(earlier)
    graph.eliminate_dead_code()


def _small_factors_last(graph: fx.Graph) -> None:
    """Multiplies the results by their small factors last, and sums before the factors that they have in common."""
    split: dict[fx.Node, tuple[fx.Node | None, tuple[Any, ...]]] = {}

    def product(value: fx.Node, factors: Iterable[Any]) -> fx.Node:
        for factor in factors:
            full = value.meta["full"]
            value = graph.call_function(operator.mul, (value, factor))
            value.meta.update(full=full, arithmetic=True)
        return value

    def core(x: Any) -> tuple[fx.Node | None, tuple[Any, ...]]:
        """x as the product of a full result (None if it has none) and small factors."""
        if not isinstance(x, fx.Node) or not x.meta["full"]:
            return None, (x,)
        if x in split:
            return split[x]
        if x.target is operator.neg:
            value, factors = core(x.args[0])
            split[x] = (value, (*factors, -1.0))
        elif x.target is operator.mul:
            (a, of_a), (b, of_b) = map(core, x.args)
            if a is None or b is None:
                split[x] = (a or b, (*of_a, *of_b))
            elif (a, b) == x.args:
                split[x] = (x, ())
            else:
                with graph.inserting_before(x):
                    split[x] = (product(a, (b,)), (*of_a, *of_b))
        else:
            split[x] = (x, ())
        return split[x]

    for node in graph.nodes:
        if node.target != "sum" or "keepdim" not in node.kwargs:
            continue
        summand, dims = node.args
        value, factors = core(summand)
        if value is not None and factors:
            common = [factor for factor in factors if _is_constant(factor, [dim - len(summand.meta["size"]) for dim in dims])]
            with graph.inserting_before(node):
                inner = product(value, (factor for factor in factors if factor not in common))
                total = graph.call_method("sum", (inner, dims), node.kwargs)
                total.meta.update(full=False, arithmetic=True)
                node.replace_all_uses_with(product(total, common))

    output = graph.output_node()
    for result in output.all_input_nodes:
        value, factors = core(result)
        if result.meta["full"] and value is not None and factors:
            # factors of one size are multiplied first, and the numbers go with one of those products
            alike: dict[torch.Size, list[fx.Node]] = {}
            for factor in factors:
                if isinstance(factor, fx.Node):
                    alike.setdefault(factor.meta["size"], []).append(factor)
            constant = math.prod(factor for factor in factors if not isinstance(factor, fx.Node))
            with graph.inserting_before(output):
                small: list[Any] = [product(first, rest) for first, *rest in alike.values()]
                small[:1] = [product(small[0], [constant])] if small else [constant]
                output.replace_input_with(result, product(value, small))


def _is_constant(factor: Any, dims: Iterable[int]) -> bool:
    """Whether a factor is a number, or the same along these dimensions, which are counted from the last."""
    return not isinstance(factor, fx.Node) or all(-dim > len(factor.meta["size"]) or factor.meta["size"][dim] == 1 for dim in dims)


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


def _cut(graph: fx.Graph, given: Sequence[fx.Node], outs: Sequence[fx.Node], results: Sequence[Any], direct: bool) -> Program:
    """The part of a graph that computes `outs`, into tensors that come first among the parameters, and `results`."""
    part = fx.Graph()
    places = [part.placeholder(f"out_{number}") for number in range(len(outs))]
    copies = {node: part.placeholder(node.name) for node in given}
    needed = _needed([*outs, *results], given)
    for node in graph.nodes:
        if node in needed and node not in copies and node.op != "output":
            copies[node] = part.node_copy(node, copies.__getitem__)
    for number, (node, place) in enumerate(zip(outs, places, strict=True)):
        _write_to(part, copies[node], place, direct or number > 0)
    # a result that comes twice comes as two tensors, which the caller may change
    distinct: list[Any] = []
    for result in results:
        copy = copies[result] if isinstance(result, fx.Node) else result
        distinct.append(part.call_method("clone", (copy,)) if isinstance(copy, fx.Node) and copy in distinct else copy)
    part.output(tuple(distinct))
    _write_over(part)
    return fx.GraphModule(nn.Module(), part).forward


def _write_to(graph: fx.Graph, node: fx.Node, place: fx.Node, direct: bool) -> None:
    """Lets a result be written to a place, directly where that can be."""
    if direct and node.target in _VARIANTS and node.meta["full"] and isinstance(node.args[0], fx.Node) and "out" not in node.kwargs:
        node.op, node.target = "call_function", _VARIANTS[node.target][1]
        node.kwargs = {**node.kwargs, "out": place}
    else:
        with graph.inserting_after(node):
            graph.call_method("copy_", (place, node))


def _write_over(graph: fx.Graph) -> None:
    """Lets operations write over an argument that is not read again. No operation recorded gives a view of its argument, or the argument itself."""
    last = {argument: node for node in graph.nodes for argument in node.all_input_nodes}
    for node in graph.nodes:
        if node.target not in _VARIANTS or "out" in node.kwargs or not (node.meta["full"] and node.meta["arithmetic"]):
            continue
        for position in (0, 1) if node.target in _COMMUTATIVE else (0,):
            argument = node.args[position]
            if not isinstance(argument, fx.Node) or argument.op == "placeholder" or "out" in argument.kwargs:
                continue
            if argument.meta["full"] and argument.meta["arithmetic"] and last[argument] is node:
                rest = tuple(other for number, other in enumerate(node.args) if number != position)
                node.op, node.target, node.args = "call_method", _VARIANTS[node.target][0], (argument, *rest)
                break
