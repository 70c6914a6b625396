"""`impl="fused"`: the decoupled convolution, finished or not, out of the fused operator."""

import torch
from torch import Tensor

from dcnet.ops.eager import inner_product_kernel
from dcnet.ops.fused.function import decoupled
from dcnet.ops.fused.layout import dense, energy_maps, on_device
from dcnet.ops.fused.operands import (
    ALONE,
    AVERAGES,
    GIVEN,
    NO_MEAN,
    OF_BATCH,
    OF_RANKS,
    STATISTICS,
    Effects,
    Operands,
    Options,
)
from dcnet.ops.fused.unit import unit_kernel
from dcnet.ops.geometry import convolve
from dcnet.ops.inputs import Inputs, LearnedRadius
from dcnet.ops.mean_norm import BatchMean
from dcnet.ops.post_ops import ACTIVATIONS, NOTHING, Finish


def decouple(inputs: Inputs) -> Tensor:
    """h(‖w‖, ‖x‖)·g(θ) for every patch and kernel, finished: (N, out_channels, *positions)."""
    finish = inputs.finish
    if inputs.operator.is_inner_product:
        y = convolve(inputs.x, _inner_product_kernel(inputs), inputs.bias, inputs.geometry)
        return y if finish is None else finish.apply(y)
    # PReLU behind a residual would need the sum's sign, which the output does not tell when its slope is negative
    if (
        finish is None
        or not finish.normalise
        or inputs.x.shape[0] == 0
        or (finish.residual is not None and finish.activation == "prelu")
    ):
        y = _decouple(inputs, NOTHING if finish is None else NOTHING._replace(carry=finish.carry), ALONE)
        return y if finish is None else finish.apply(y)
    return _decouple(inputs, finish, STATISTICS if finish.training else AVERAGES)


def _inner_product_kernel(inputs: Inputs) -> Tensor:
    """The kernel whose plain convolution is the operator, in the dtype of the convolution."""
    operator = inputs.operator
    if operator.weighting is not None or operator.magnitude.value("alpha", 1.0) != 1.0 or torch.compiler.is_compiling():
        return inner_product_kernel(inputs)
    with on_device(inputs.x):
        return unit_kernel(inputs.weight, inputs.eps, _convolution_dtype(inputs.x))


def _decouple(inputs: Inputs, finish: Finish, follows: int) -> Tensor:
    """The operator with its operands brought into shape; moves the running averages."""
    operator, where = inputs.operator, inputs.geometry
    x, dtype = inputs.x, _convolution_dtype(inputs.x)
    if x.dtype != dtype:
        x = x.to(dtype)
    padding = where.symmetric_padding
    if padding is None:
        x, padding = where.pad(x), (0,) * where.dims
    x, weight = dense(x), dense(inputs.weight)

    radius, radius_kind = (inputs.radius.raw, 2) if isinstance(inputs.radius, LearnedRadius) else (inputs.radius, 1)
    if operator.weighting == "separate":  # ρ is also needed outside the kernels
        radius, radius_kind = inputs.rho, 1
    given = tracked = None
    mean_kind = NO_MEAN
    if radius is not None and isinstance(inputs.mean_norm, BatchMean):
        mean_kind, tracked = OF_RANKS if inputs.mean_norm.sync else OF_BATCH, inputs.mean_norm
    elif radius is not None and isinstance(inputs.mean_norm, Tensor):
        mean_kind, given = GIVEN, inputs.mean_norm.float().contiguous()
    learned = torch.stack([inputs.learned[name].float() for name in operator.learned]) if operator.learned else None

    residual = finish.residual
    if residual is not None and residual.dtype != x.dtype:
        residual = residual.to(x.dtype)
    slope = None if finish.slope is None else finish.slope.expand(weight.shape[0]).contiguous()
    moves = follows == STATISTICS and finish.running_mean is not None and finish.running_var is not None
    activation = ACTIVATIONS.index(finish.activation)
    geometry = (where.stride, padding, where.dilation, where.groups)
    carry = finish.carry
    energy = carry.energy if carry is not None and x is carry.of else None  # of this very tensor, and no other
    if energy is not None and (where.groups > 1 or energy.requires_grad != x.requires_grad):
        energy = None  # gradients reach x by another way, as in a checkpoint's first forward pass
    leaves = carry is not None and carry.wanted and follows != ALONE and energy_maps(weight.shape[0], where.groups) > 0
    options = Options(
        *geometry, inputs.eps, radius_kind, mean_kind, follows, finish.eps, activation, *operator.names, leaves
    )
    bias, radius, gamma, beta = (
        _dense_vector(inputs.bias),
        _dense_vector(radius),
        _dense_vector(finish.gamma),
        _dense_vector(finish.beta),
    )
    operands = Operands(
        x,
        weight,
        bias,
        radius,
        given,
        learned,
        gamma,
        beta,
        finish.running_mean,
        finish.running_var,
        residual,
        slope,
        energy,
    )
    out, left = decoupled(
        operands, options, Effects(tracked, finish.momentum, finish.batches) if moves else Effects(tracked)
    )
    if carry is not None:
        carry.left, carry.left_of = left, out
    return out


def _dense_vector(vector: Tensor | None) -> Tensor | None:
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()


def _convolution_dtype(x: Tensor) -> torch.dtype:
    """The dtype PyTorch's convolution would compute in: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype
