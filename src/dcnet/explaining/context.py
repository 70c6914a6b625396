"""The explanation mode of a network."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from dcnet.layers import Explaining, decoupled_layers
from dcnet.robustness.checks import check_evaluating


@contextmanager
def explanations(model: nn.Module) -> Iterator[nn.Module]:
    """Inside this context, make every decoupled layer a linear map of its input for autograd, its scaling held fixed.

    Outputs are what they are outside. A gradient in the input, times the input, is then what each pixel adds to the
    output: `dcnet.explain` does that. No gradient reaches the parameters of decoupled layers. Contexts may be nested; a
    copy made inside is in the same mode, and leaves it when the context ends.

    Args:
        model: any model with decoupled layers, in evaluation mode.

    Examples:
        >>> import torch, dcnet
        >>> model = dcnet.create_model("cnn9_narrow", in_channels=1, input_size=8).eval()
        >>> x = torch.rand(2, 1, 8, 8, requires_grad=True)
        >>> with dcnet.explanations(model):
        ...     (slopes,) = torch.autograd.grad(model(x)[:, 3].sum(), x)
        >>> contributions = slopes * x
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"explanations are of an nn.Module, got {type(model).__name__}")
    check_evaluating(model)
    layers = list(decoupled_layers(model).values())
    mode = Explaining()
    for layer in layers:
        layer.explained_by = (*layer.explained_by, mode)
    try:
        yield model
    finally:
        mode.over = True
        for layer in layers:
            layer.explained_by = tuple(other for other in layer.explained_by if other is not mode)
