"""Decide where results of a recorded graph go: to the caller's memory, over other results, or to scratch memory."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from dcnet.ops.cpu.tanh_interpolation import tanh_of_product

_COMMUTATIVE = (operator.mul, operator.add)


def _subtract_from(number: float, tensor: Tensor, out: Tensor) -> Tensor:
    return torch.sub(torch.scalar_tensor(number, dtype=out.dtype), tensor, out=out)  # torch.sub needs a tensor first


# operation (a function, or a method by its name) -> the method that works in place, and the function that takes out=
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
    tanh_of_product: ("", tanh_of_product),  # its arguments are small: none is overwritten
}


def write_to(graph: fx.Graph, node: fx.Node, place: fx.Node, direct: bool, wanted: set[fx.Node]) -> None:
    """Make a node write its result to a place, directly where possible, otherwise by a copy.

    The results that lead to this one are written to the same place before, as long as nothing else reads them.
    """

    def can_be(node: Any) -> bool:
        computed = isinstance(node, fx.Node) and node.op != "placeholder" and node.target in _VARIANTS
        return computed and node.meta["full"] and node.meta["arithmetic"] and "out" not in node.kwargs

    if not (direct and can_be(node) and isinstance(node.args[0], fx.Node)):
        # parameters stay together: those added later come after all others
        made = node if node.op != "placeholder" else [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(made):
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


def write_over(graph: fx.Graph) -> None:
    """Make operations overwrite an argument that is not read again.

    That is safe because no recorded operation returns its argument, or a view of it.
    """
    last = {argument: node for node in graph.nodes for argument in node.all_input_nodes}
    for node in graph.nodes:
        if (
            node.op == "placeholder"
            or node.target not in _VARIANTS
            or "out" in node.kwargs
            or not (node.meta["full"] and node.meta["arithmetic"])
        ):
            continue
        from_number = node.target is operator.sub and isinstance(node.args[0], int | float)
        for position in (0, 1) if node.target in _COMMUTATIVE or from_number else (0,):
            argument = node.args[position]
            if not isinstance(argument, fx.Node) or argument.op == "placeholder" or "out" in argument.kwargs:
                continue
            if argument.meta["full"] and argument.meta["arithmetic"] and last[argument] is node:
                if from_number:
                    node.target, node.kwargs = _subtract_from, {"out": argument}
                    break
                rest = tuple(other for number, other in enumerate(node.args) if number != position)
                node.op, node.target, node.args = "call_method", _VARIANTS[node.target][0], (argument, *rest)
                break


def write_to_scratch(graph: fx.Graph) -> int:
    """Make operations write intermediate results to buffers, which become the last parameters; return their number."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    owner: dict[fx.Node, fx.Node] = {}  # the node whose memory holds the result
    for node in graph.nodes:
        if node.op == "call_method" and str(node.target).endswith("_"):
            owner[node] = owner[node.args[0]]
        else:
            owner[node] = owner[node.kwargs["out"]] if "out" in node.kwargs else node
    last = {owner[argument]: order[node] for node in graph.nodes for argument in node.all_input_nodes}
    returned = {owner[result] for result in graph.output_node().all_input_nodes}
    busy: list[int] = []  # for each buffer: when it is read for the last time
    places: list[fx.Node] = []
    for node in list(graph.nodes):
        if (
            node.op == "placeholder"
            or node in returned
            or node.target not in _VARIANTS
            or "out" in node.kwargs
            or not (node.meta["full"] and node.meta["arithmetic"] and node in last)
            or not isinstance(node.args[0], fx.Node)
        ):
            continue
        number = next((i for i, until in enumerate(busy) if until < order[node]), len(busy))
        if number == len(busy):
            busy.append(0)
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                places.append(graph.placeholder(f"scratch_{number}"))
        busy[number] = last[node]
        node.op, node.target = "call_function", _VARIANTS[node.target][1]
        node.kwargs = {**node.kwargs, "out": places[number]}
    return len(busy)
