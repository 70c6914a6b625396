"""A decoupled layer as a linear map of its input: h·g(θ) = [h·g(θ)/⟨ŵ, x⟩]·⟨ŵ, x⟩, with the bracket as a constant."""

from typing import Any

import torch
from torch import Tensor

from dcnet.ops import kernel_norm


class Explaining:
    """One explanation mode, which layers refer to while it is active.

    Copies of a layer refer to the same mode, and leave it when the layer does.
    """

    def __init__(self, over: bool = False) -> None:
        self.over = over

    def __deepcopy__(self, memo: dict[int, Any]) -> "Explaining":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Explaining, (True,)  # a layer that is saved and loaded is not explained


def is_explained(layer: Any) -> bool:
    """Tell whether a decoupled layer is inside `dcnet.explanations`, where it is a linear map of its input."""
    return any(not mode.over for mode in layer.explained_by)


def linear_form(layer: Any, x: Tensor) -> Tensor:
    """Return the output of a decoupled layer as a linear map of x; to autograd, factors and kernels are constants.

    If g is not 0 at a right angle, as it may be in your own angular function, that part of the output does not come
    from the direction of x. It is a constant, like a bias.
    """
    if layer.training:
        raise RuntimeError(
            f"a {type(layer).__name__} was put into training mode inside dcnet.explanations, where E{{‖x‖}} of the "
            "batch mixes images; call model.eval() first"
        )
    with torch.no_grad():
        weight = layer.effective_weight
        w_norm = kernel_norm(weight, layer.eps)
        unit = weight.to(w_norm.dtype) * _inverse(w_norm).reshape(-1, *[1] * (weight.dim() - 1))
        unit = unit.to(layer.weight.dtype)
    dot = layer._plain(x, unit)
    with torch.no_grad():
        scale, constant = _fixed(layer, layer._patch_norms(x), dot, w_norm)
        bias = None if layer.bias is None else layer.bias.reshape(_kernel_shape(layer))
        if constant is not None:
            bias = constant if bias is None else constant + bias
    y = dot * scale.to(dot.dtype)
    return y if bias is None else y + bias.to(dot.dtype)  # type: ignore[no-any-return]


def _fixed(layer: Any, norms: Tensor, dot: Tensor, w_norm: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the factor of ⟨ŵ, x⟩ for every patch and kernel, and the constant added to the product (None for 0)."""
    operator, (kernels, groups), shape = layer.operator, layer._kernels_and_groups(), _kernel_shape(layer)

    def per_kernel(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.to(norms.dtype).reshape(shape)

    n = norms.repeat_interleave(kernels // groups, dim=-len(shape))
    one_over_n = _inverse(n)
    raw = dot.to(n.dtype) * one_over_n
    rho = layer.effective_radius
    radius = rho
    if layer.running_norm is not None:
        radius = (rho.unflatten(0, (groups, -1)) * layer.running_norm.unsqueeze(1)).flatten()
        radius = torch.where(radius > 0.0, radius, 1.0)
    learned = {name: per_kernel(value) for name, value in layer.learned_parameters.items()}
    w_norm = w_norm.to(n.dtype).reshape(shape)
    h = operator.patch_magnitude(n * w_norm if operator.weighting == "joint" else n, per_kernel(radius), learned)[0]
    factor = operator.kernel_factor(w_norm, per_kernel(rho), learned)
    if factor is not None:
        h = factor * h
    g, slope, *_ = operator.angle(raw.clamp(-1.0, 1.0), learned)
    at_right_angle = operator.angle(raw.new_zeros(()), learned)[0]
    orthogonal = raw == 0.0
    # the slope is the limit of (g(c) − g(0))/c, so that an explanation does not jump near a right angle
    relative = torch.where(orthogonal, slope, (g - at_right_angle) / torch.where(orthogonal, 1.0, raw))
    scale = relative * h * one_over_n
    starts_at_zero = not bool(torch.as_tensor(at_right_angle != 0.0).any())
    return scale, None if starts_at_zero else (h * at_right_angle).expand(dot.shape)


def _kernel_shape(layer: Any) -> tuple[int, ...]:
    """Return the shape in which one value for each kernel broadcasts with the output: channels before positions."""
    return (-1, *[1] * (layer.weight.dim() - 2))


def _inverse(norm: Tensor) -> Tensor:
    """Return 1/norm, and 0 where the norm is 0."""
    return torch.where(norm > 0.0, norm.reciprocal(), 0.0)
