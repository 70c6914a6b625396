"""Decoupling with PyTorch's own operators: a convolution, a box sum of x², and one lean pass over the output."""

from torch import Tensor

from dcnet.ops.epilogue import epilogue
from dcnet.ops.geometry import convolve
from dcnet.ops.inputs import Inputs
from dcnet.ops.norms import compute_dtype, inverse, kernel_norm, norm_map


def decouple(inputs: Inputs) -> Tensor:
    """h(‖w‖, ‖x‖)·g(θ) for every patch and kernel, finished: (N, out_channels, *positions)."""
    operator, where, weight, finish = inputs.operator, inputs.geometry, inputs.weight, inputs.finish
    if operator.is_inner_product:
        y = convolve(inputs.x, inner_product_kernel(inputs), inputs.bias, where)
        return y if finish is None else finish.apply(y)
    norms = norm_map(inputs.x, where, inputs.eps)
    w_norm = kernel_norm(weight, inputs.eps)
    dot = convolve(inputs.x, unit_kernel(weight, w_norm), None, where)
    rho, radius = inputs.radii(norms)
    relu = finish is not None and finish.is_relu
    y = epilogue(
        dot,
        norms,
        operator,
        factor=operator.kernel_factor(w_norm, rho, inputs.learned),
        gain=w_norm if operator.weighting == "joint" else None,
        radius=radius,
        bias=inputs.bias,
        learned=inputs.learned,
        relu=relu,
    )
    return y if finish is None or relu else finish.apply(y)


def unit_kernel(weight: Tensor, w_norm: Tensor) -> Tensor:
    """w/‖w‖ in the dtype of w. Normalised before the convolution, not after it: the dot product of a bounded operator
    then cannot overflow because of a large kernel, and its gradient in ‖w‖ costs a pass over w, not over the output."""
    return (weight.to(w_norm.dtype) * inverse(w_norm).reshape(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)


def inner_product_kernel(inputs: Inputs) -> Tensor:
    """The kernel whose plain convolution is LinearConv with cosine; every weighting puts ‖w‖ back once."""
    weight, alpha = inputs.weight, inputs.operator.magnitude.value("alpha", 1.0)
    if inputs.operator.weighting is None:
        weight = unit_kernel(weight, kernel_norm(weight, inputs.eps))
    return weight if alpha == 1.0 else (weight.to(compute_dtype(weight)) * alpha).to(weight.dtype)
