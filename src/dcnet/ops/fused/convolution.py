"""`impl="fused"`: the decoupled convolution, finished or not, out of the fused operators."""

from typing import Any

import torch
from torch import Tensor

from dcnet.ops.finish import ACTIVATIONS, Finish
from dcnet.ops.fused import block, launch, library
from dcnet.ops.geometry import convolve
from dcnet.ops.inputs import Inputs


def decouple(inputs: Inputs) -> Tensor:
    """h(‖w‖, ‖x‖)·g(θ) for every patch and kernel, finished: (N, out_channels, *positions)."""
    if inputs.operator.is_inner_product:
        y = _inner_product(inputs)
        return y if inputs.finish is None else inputs.finish.apply(y)
    arguments = _epilogue_arguments(inputs)
    if inputs.finish is None:
        return library.epilogue(*arguments)
    return _finished(arguments, inputs.finish)


def _inner_product(inputs: Inputs) -> Tensor:
    operator, weight = inputs.operator, inputs.weight
    if operator.weighting is None:
        weight = library.unit_kernel(launch.dense(weight), inputs.eps, weight.dtype)[0]
    alpha = operator.magnitude.value("alpha", 1.0)
    return convolve(inputs.x, weight if alpha == 1.0 else weight * alpha, inputs.bias, inputs.geometry)


def _epilogue_arguments(inputs: Inputs) -> tuple[Any, ...]:
    """What the epilogue takes: dot product, norms, vectors, learned parameters, and the names of the formulas."""
    operator, where = inputs.operator, inputs.geometry
    dtype = _convolution_dtype(inputs.x)
    x = inputs.x.to(dtype)
    padding = [before for before, _ in where.padding]
    if where.padding_mode != "zeros" or any(before != after for before, after in where.padding):
        x, padding = where.pad(x), [0] * where.dims
    unit, w_norm = library.unit_kernel(launch.dense(inputs.weight), inputs.eps, dtype)
    dot, norms = library.dot_and_norm(launch.dense(x), unit, where.stride, padding, where.dilation, where.groups, inputs.eps)
    rho, radius = inputs.radii(norms)
    return (
        dot,
        norms,
        operator.kernel_factor(w_norm, rho, inputs.learned),
        w_norm if operator.weighting == "joint" else None,
        radius,
        None if inputs.bias is None else inputs.bias.float(),
        torch.stack([inputs.learned[name].float() for name in operator.learned]) if operator.learned else None,
        *operator.names,
    )


def _finished(arguments: tuple[Any, ...], finish: Finish) -> Tensor:
    """The epilogue, BatchNorm, residual and activation in shared passes; moves BatchNorm's running averages."""
    dot = arguments[0]
    residual = None if finish.residual is None else launch.like(finish.residual.to(dot.dtype), dot)
    # PReLU behind a residual would need the sum's sign, which the output does not tell when its slope is negative
    if dot.numel() == 0 or (residual is not None and finish.activation == "prelu"):
        return finish.apply(library.epilogue(*arguments))
    slope = None if finish.slope is None else finish.slope.float().expand(dot.shape[1]).contiguous()
    statistics = (finish.running_mean, finish.running_var)
    options = (finish.training, finish.eps, ACTIVATIONS.index(finish.activation))
    out, mean, variance = block.block(*arguments[:7], finish.gamma, finish.beta, *statistics, residual, slope, *options, *arguments[7:])
    if finish.training and finish.running_mean is not None and finish.running_var is not None:
        with torch.no_grad():
            count = dot.numel() // dot.shape[1]
            finish.running_mean.lerp_(mean.to(finish.running_mean.dtype), finish.momentum)
            finish.running_var.lerp_((variance * (count / max(1, count - 1))).to(finish.running_var.dtype), finish.momentum)
    return out


def _convolution_dtype(x: Tensor) -> torch.dtype:
    """The dtype PyTorch's convolution would compute in: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype
