"""What the layers of a model cost: their parameters, and the multiply-adds of one call of the model."""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from dcnet.fusing.running import call, evaluating, hooks
from dcnet.layers.decoupled import Decoupled
from dcnet.layers.recording import Vectors, operations, record_epilogue
from dcnet.layers.types import ExampleInput
from dcnet.ops import Operator

Shapes = list[tuple[torch.Size, torch.Size]]  # of the input and the output, for each call of a layer


def shapes_in(model: nn.Module, layers: Iterable[nn.Module], example_input: ExampleInput) -> dict[nn.Module, Shapes]:
    """Return the shapes of inputs and outputs of each layer when the model is called with the example.

    The call is in evaluation mode and without gradients.
    """
    seen: dict[nn.Module, Shapes] = {layer: [] for layer in layers}

    def note(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        given = next(iter((*inputs, *named.values())), None)
        if isinstance(given, Tensor) and isinstance(output, Tensor):
            seen[layer].append((given.shape, output.shape))

    try:
        with torch.no_grad(), evaluating(model), hooks() as handles:
            handles += [layer.register_forward_hook(note, with_kwargs=True) for layer in seen]
            call(model, example_input)
    except Exception as error:
        raise ValueError(
            f"example_input: {type(model).__name__} cannot be called with it ({type(error).__name__}: {error}). "
            "Nothing has been changed"
        ) from error
    return seen


def parameters(layer: nn.Module) -> int:
    """Return how many parameters a layer has; 0 for one whose shape is not known yet."""
    return sum(0 if isinstance(p, UninitializedParameter) else p.numel() for p in layer.parameters())


def multiply_adds(layer: nn.Module, shapes: Shapes) -> int:
    """Return the multiply-adds of a layer in these calls.

    A decoupled layer has those of its products, and more for the norms and formulas: one for each input (its square),
    one for each number that a window sums, and one for each operation of h and g and each output.
    """
    weight = layer.weight
    assert isinstance(weight, Tensor)
    total = sum(output.numel() for _, output in shapes) * weight[0].numel()
    if not isinstance(layer, Decoupled) or layer.operator.is_inner_product:
        return total
    window = math.prod(getattr(layer, "kernel_size", ()))
    each = _operations(layer.operator, layer.eps > 0.0, layer.bias is not None)
    for given, output in shapes:
        patches = output.numel() // weight.shape[0] * getattr(layer, "groups", 1)
        total += given.numel() + (window if window > 1 else 0) * patches + each * output.numel()
    return total


@lru_cache(1024)
def _operations(operator: Operator, nonzero: bool, biased: bool) -> int:
    """Return the operations for each output of a layer whose kernels have different radii, parameters and so on."""
    vector = torch.tensor([1.5, 2.5], device="cpu")
    vectors = Vectors(
        factor=None if operator.weighting in (None, "joint") else vector,
        gain=vector if operator.weighting == "joint" else None,
        radius=vector if operator.magnitude.formula.has_radius else None,
        bias=vector if biased else None,
        learned=dict.fromkeys(operator.learned, vector),
    )
    return operations(record_epilogue(operator, vectors, 0, float(nonzero)))
