"""`impl="fused"`: the decoupled convolution out of the fused operators."""

import torch
from torch import Tensor

from dcnet.ops.fused import launch, library
from dcnet.ops.geometry import convolve
from dcnet.ops.inputs import Inputs


def decouple(inputs: Inputs) -> Tensor:
    """h(‖w‖, ‖x‖)·g(θ) for every patch and kernel: (N, out_channels, *positions)."""
    operator, where = inputs.operator, inputs.geometry
    dtype = convolution_dtype(inputs.x)
    x = inputs.x.to(dtype)
    padding = [before for before, _ in where.padding]
    if where.padding_mode != "zeros" or any(before != after for before, after in where.padding):
        x, padding = where.pad(x), [0] * where.dims
    if operator.is_inner_product and operator.weighting is not None:
        weight = inputs.weight * operator.magnitude.value("alpha", 1.0)
        return convolve(inputs.x, weight, inputs.bias, where)
    unit, w_norm = library.unit_kernel(launch.dense(inputs.weight), inputs.eps, dtype)
    if operator.is_inner_product:
        return convolve(inputs.x, unit * operator.magnitude.value("alpha", 1.0), inputs.bias, where)
    dot, norms = library.dot_and_norm(launch.dense(x), unit, where.stride, padding, where.dilation, where.groups, inputs.eps)
    rho, radius = inputs.radii(norms)
    learned = torch.stack([inputs.learned[name].float() for name in operator.learned]) if operator.learned else None
    return library.epilogue(
        dot,
        norms,
        operator.kernel_factor(w_norm, rho, inputs.learned),
        w_norm if operator.weighting == "joint" else None,
        radius,
        None if inputs.bias is None else inputs.bias.float(),
        learned,
        str(operator.magnitude),
        str(operator.angular),
        operator.weighting or "",
    )


def convolution_dtype(x: Tensor) -> torch.dtype:
    """The dtype PyTorch's convolution would compute in: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype
