"""A formula cut down to the results asked for.

A formula returns its value and all its slopes, with α and the like as variables. The forward pass needs the value
alone, and a multiplication by α = 1 is a pass over memory for nothing. So each choice of a formula is recorded once
with torch.fx, simplified, and stripped of what does not lead to the results wanted.
"""

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import fx, nn

from dcnet.formulas import Choice

# (operation, which argument) -> the number that makes it the identity in its other argument
_NEUTRAL = {
    (operator.mul, 0): 1.0,
    (operator.mul, 1): 1.0,
    (operator.truediv, 1): 1.0,
    (operator.add, 0): 0.0,
    (operator.add, 1): 0.0,
    (operator.sub, 1): 0.0,
}

Program = Callable[..., tuple[Any, ...]]


@cache
def program(choice: Choice, results: int, overrides: tuple[tuple[str, float], ...] = ()) -> Program:
    """A function (first, rho, *learned) that gives the formula's first so many results, rho None where it takes none."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    first, rho, *learned = (fx.Proxy(graph.placeholder(name), tracer) for name in ("first", "rho", *(f"learned_{name}" for name in choice.learned)))
    outputs = choice(first, rho, dict(zip(choice.learned, learned, strict=True)), **dict(overrides))[:results]
    graph.output(tuple(result.node if isinstance(result, fx.Proxy) else result for result in outputs))
    for node in graph.nodes:
        for position, argument in enumerate(node.args):
            if isinstance(argument, int | float) and _NEUTRAL.get((node.target, position)) == argument:
                node.replace_all_uses_with(node.args[1 - position])
    graph.eliminate_dead_code()
    return fx.GraphModule(nn.Module(), graph).forward
