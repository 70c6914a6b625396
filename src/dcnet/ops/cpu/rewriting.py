"""Rewrite a recorded graph of elementwise operations and sums, so that it has fewer and smaller operations."""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from dcnet.ops.cpu.tanh_interpolation import Points, tanh_of_product

# (operation, which argument) -> the number with which the operation returns its other argument
_NEUTRAL = {
    (operator.mul, 0): 1.0,
    (operator.mul, 1): 1.0,
    (operator.truediv, 1): 1.0,
    (operator.add, 0): 0.0,
    (operator.add, 1): 0.0,
    (operator.sub, 1): 0.0,
}


def note_sizes(graph: fx.Graph, size: torch.Size, examples: Iterable[Tensor]) -> None:
    """Store three facts in the `meta` of each node.

    "size" is the size of its result, "full" says whether that is the size of the output, and "arithmetic" says whether
    the result has the dtype of the inputs, float64. A formula may multiply by `c > 0`, or by `(c > 0) * 1.0`, which has
    the default dtype: a result of another dtype cannot be overwritten.
    """
    results: dict[fx.Node, Any] = {}
    given = iter(examples)
    for node in graph.nodes:
        if node.op == "output":  # the last node
            return
        arguments, named = fx.map_arg((node.args, node.kwargs), results.__getitem__)
        if node.op == "placeholder":
            result = next(given)
        else:
            result = (
                node.target(*arguments, **named)
                if node.op == "call_function"
                else getattr(arguments[0], node.target)(*arguments[1:], **named)
            )
        results[node] = result
        node.meta["size"] = result.shape if isinstance(result, Tensor) else None
        node.meta["full"] = node.meta["size"] == size
        node.meta["arithmetic"] = isinstance(result, Tensor) and result.dtype == torch.float64


def simplify(graph: fx.Graph) -> None:
    """Remove operations that change nothing, that repeat an earlier one, or that no result needs."""
    seen: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.target is operator.pos:
            node.replace_all_uses_with(node.args[0])
        if node.target == "sum" and "keepdim" in node.kwargs:
            summand, dims = node.args
            if all(summand.meta["size"][dim] == 1 for dim in dims):  # groups of one kernel each
                node.replace_all_uses_with(summand)
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


def small_factors_last(graph: fx.Graph, inverses: tuple[str, str] | None) -> None:
    """Multiply results by their small factors last, and move common factors out of sums.

    A small factor has one number for each position, or for each kernel. A product with a full tensor is a pass over
    memory; a product of small factors costs almost nothing.
    """
    split: dict[fx.Node, tuple[fx.Node | None, tuple[Any, ...]]] = {}

    def product(value: fx.Node, factors: Iterable[Any]) -> fx.Node:
        for factor in factors:
            full = value.meta["full"]
            value = graph.call_function(operator.mul, (value, factor))
            value.meta.update(full=full, arithmetic=True)
        return value

    def gathered(factors: Iterable[Any]) -> list[Any]:
        """Return fewer factors with the same product: one for each size, which also takes the numbers."""
        alike: dict[torch.Size, list[fx.Node]] = {}
        constant = 1.0
        left = list(factors)
        while inverses is not None and {*inverses} <= {*(names := [str(factor) for factor in left])}:
            for name in inverses:
                del left[names.index(name)], names[names.index(name)]
        for factor in left:
            if isinstance(factor, fx.Node):
                alike.setdefault(factor.meta["size"], []).append(factor)
            else:
                constant *= factor
        small: list[Any] = [product(first, rest) for first, *rest in alike.values()]
        if constant != 1.0:
            small[:1] = [product(small[0], [constant])] if small else [constant]
        return small

    def core(x: Any) -> tuple[fx.Node | None, tuple[Any, ...]]:
        """Return x as a product: a full result (None if there is none) and small factors."""
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
            common = [
                factor for factor in factors if _is_constant(factor, [dim - len(summand.meta["size"]) for dim in dims])
            ]
            with graph.inserting_before(node):
                inner = product(value, gathered(factor for factor in factors if factor not in common))
                total = graph.call_method("sum", (inner, dims), node.kwargs)
                total.meta.update(full=False, arithmetic=True)
                node.replace_all_uses_with(product(total, gathered(common)))

    output = graph.output_node()
    for result in output.all_input_nodes:
        value, factors = core(result)
        if result.meta["full"] and value is not None and factors:
            with graph.inserting_before(output):
                output.replace_input_with(result, product(value, gathered(factors)))


def _is_constant(factor: Any, dims: Iterable[int]) -> bool:
    """Tell whether a factor is a number, or constant along these dimensions, which are counted from the last."""
    return not isinstance(factor, fx.Node) or all(
        -dim > len(factor.meta["size"]) or factor.meta["size"][dim] == 1 for dim in dims
    )


def tanh_of_products(graph: fx.Graph) -> None:
    """Replace tanh of a product of two small factors by `tanh_of_product`.

    One factor has a number for each position, (rows, groups, 1, …), the other for each kernel, (groups, kernels, …).
    """
    for node in graph.nodes:
        if node.target is not torch.tanh or not node.meta["full"] or node.args[0].target is not operator.mul:
            continue
        factors = node.args[0].args
        if all(
            isinstance(factor, fx.Node) and factor.meta["arithmetic"] and not factor.meta["full"] for factor in factors
        ):
            of_position, of_kernel = sorted(factors, key=lambda factor: -len(factor.meta["size"]))
            with graph.inserting_before(node):
                points = graph.call_function(Points, (of_kernel,))
            points.meta["full"] = False
            node.target, node.args = tanh_of_product, (of_position, points)
