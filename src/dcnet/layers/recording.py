"""Record the epilogue h·g of one layer in evaluation as a small graph of ordinary operations.

Constants are computed in advance.
"""

import operator as python
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dcnet.formulas import Choice
from dcnet.formulas.angulars import cosine, power_cosine, relu_cosine, square_cosine
from dcnet.formulas.magnitudes import ball, linear, seg
from dcnet.ops import Operator

# Functions that a cosine rounded to beyond ±1 does not harm. asin is undefined there; unknown functions may be, too.
_BEYOND_ONE = (cosine, square_cosine, relu_cosine, power_cosine)


class Vectors(NamedTuple):
    """The numbers of an epilogue for each kernel: tensors (out_channels,), or None if it does not use them."""

    factor: Tensor | None  # s and t of y = s·h(t·‖x‖, ρ)·g(cos θ) + b
    gain: Tensor | None
    radius: Tensor | None
    bias: Tensor | None
    learned: Mapping[str, Tensor]


def degree_in_dot(operator: Operator) -> float | None:
    """Return the p for which g(s·cos θ) is s|s|^(p−1)·g(cos θ); None for other functions.

    A factor of the output can then be replaced by a factor of the kernels, its p-th root.
    """
    function, choice = operator.angular.formula.function, operator.angular
    degrees = {cosine: 1.0, square_cosine: 2.0, power_cosine: dict(choice.values).get("p")}
    return degrees.get(function)


def _ball_by_inverse(i: Any, rho: Any, choice: Choice, dims: int) -> Any:
    """α·min(n, ρ)/(ρ·n) = α·min(1/n, 1/ρ)"""
    return torch.minimum(i, 1.0 / rho) * choice.value("alpha", 1.0)


def _linear_by_inverse(i: Any, rho: Any, choice: Choice, dims: int) -> Any:
    """α·n/n"""
    return choice.value("alpha", 1.0)


def _seg_by_inverse(i: Any, rho: Any, choice: Choice, dims: int) -> Any:
    """β + (α − β)·min(1, ρ/n): the straight line β + (α − β)·ρ/n, cut off at α"""
    alpha, beta = choice.value("alpha", 1.0), choice.value("beta", 0.5)
    slope = ((alpha - beta) * rho).reshape(-1, *[1] * (dims + 1))
    # one convolution of the map of 1/n, which onnxruntime cuts off in the same pass
    convolution = (F.linear, F.conv1d, F.conv2d, F.conv3d)[dims]
    line = convolution(i, slope, torch.full((len(slope),), beta).to(slope))
    return line.clamp(max=alpha) if alpha >= beta else line.clamp(min=alpha)


# h(n)/n in terms of 1/n, where that takes fewer operations than h(n) in terms of n
_BY_INVERSE: dict[Any, Any] = {ball: _ball_by_inverse, linear: _linear_by_inverse, seg: _seg_by_inverse}


def takes_inverse(operator: Operator, vectors: Vectors, eps: float, groups: int) -> bool:
    """Tell whether the epilogue takes 1/‖x‖ instead of ‖x‖: h·g is (h/n)·⟨w, x⟩, and for a square · |cos θ|.

    It needs eps, which keeps norms above 0, and a single group, whose map of norms all kernels share.
    """
    magnitude = operator.magnitude
    known = (
        magnitude.formula.function in _BY_INVERSE and not magnitude.learned and operator.weighting in (None, "linear")
    )
    return known and degree_in_dot(operator) in (1.0, 2.0) and vectors.gain is None and eps > 0.0 and groups == 1


def record_epilogue(
    operator: Operator, vectors: Vectors, dims: int, eps: float, inverse: bool = False
) -> fx.GraphModule:
    """Return a module that maps (dot, norm) to s·h(t·‖x‖, ρ)·g(cos θ) + b.

    dot is ⟨w, x⟩/‖w‖, over `dims` spatial dimensions. inverse: where `takes_inverse`, norm is 1/‖x‖.

    The formulas are called once, with stand-ins for the two maps and the numbers of this layer for the rest. What
    depends on neither map is computed now, and slopes are dropped. A vector that is the same for every kernel becomes a
    number, so that a magnitude with such a radius is computed once for each patch instead of once for each output.
    """
    factor, gain, radius, bias = (_constant(vector, dims) for vector in vectors[:4])
    learned = {name: _constant(vector, dims) for name, vector in vectors.learned.items()}

    class Epilogue(nn.Module):
        def forward(self, dot: Any, norm: Any) -> Any:
            y = by_inverse(dot, norm) if inverse else by_norm(dot, norm)
            if factor is not None:
                y = y * factor
            return y if bias is None else y + bias

    def by_norm(dot: Any, norm: Any) -> Any:
        c = dot / norm if eps > 0.0 else dot * _inverse(norm)
        if operator.angular.formula.function not in _BEYOND_ONE:
            c = c.clamp(-1.0, 1.0)
        h = operator.patch_magnitude(norm if gain is None else norm * gain, radius, learned)[0]
        return operator.angle(c, learned)[0] * h

    def by_inverse(dot: Any, i: Any) -> Any:
        magnitude, rho = operator.magnitude, vectors.radius
        if rho is not None:  # as a tensor, of one element if all kernels share it
            rho = rho.detach()[: None if isinstance(radius, Tensor) else 1].reshape(-1, *[1] * dims)
        y = dot * _BY_INVERSE[magnitude.formula.function](i, rho, magnitude, dims)
        return y if degree_in_dot(operator) == 1.0 else y * (dot * i).abs()

    graph = fx.symbolic_trace(Epilogue())
    _simplify(graph.graph)
    graph.recompile()
    return graph


def _inverse(norm: Any) -> Any:
    """Return 1/norm, and 0 where the norm is 0: a patch of zeros only has no direction."""
    return torch.where(norm > 0.0, torch.where(norm > 0.0, norm, 1.0).reciprocal(), 0.0)


def _constant(vector: Tensor | None, dims: int) -> Any:
    """Return the vector in a shape that broadcasts with (N, channels, …), or a number if all kernels share it."""
    if vector is None:
        return None
    vector = vector.detach()
    if bool((vector == vector[:1]).all()):
        return float(vector[0])
    return vector.reshape(-1, *[1] * dims).contiguous()


def _simplify(graph: fx.Graph) -> None:
    """Remove unused operations, products with 1 and sums with 0."""
    graph.eliminate_dead_code()
    neutral = {python.mul: 1.0, torch.mul: 1.0, python.add: 0.0, torch.add: 0.0}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in neutral or len(node.args) != 2:
            continue
        others = [a for a in node.args if not (isinstance(a, int | float) and a == neutral[node.target])]
        if len(others) == 1 and isinstance(others[0], fx.Node):
            node.replace_all_uses_with(others[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def operations(graph: fx.GraphModule) -> int:
    """Return the number of operations of a recorded epilogue, each for every output (or for every patch)."""
    return sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes)
