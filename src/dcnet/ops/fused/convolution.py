"""`impl="fused"`: the decoupled convolution, finished or not, out of the fused operators."""

from typing import Any

import torch
from torch import Tensor

from dcnet.ops.eager import inner_product_kernel
from dcnet.ops.finish import ACTIVATIONS
from dcnet.ops.fused import launch
from dcnet.ops.fused.dot_and_norm import dot_and_norm
from dcnet.ops.fused.epilogue import AVERAGES, BATCH, NONE, epilogue
from dcnet.ops.geometry import convolve
from dcnet.ops.inputs import Inputs, LearnedRadius
from dcnet.ops.mean_norm import BatchMean


def decouple(inputs: Inputs) -> Tensor:
    """h(‖w‖, ‖x‖)·g(θ) for every patch and kernel, finished: (N, out_channels, *positions)."""
    _check_devices(inputs)
    finish = inputs.finish
    if inputs.operator.is_inner_product:
        y = convolve(inputs.x, inner_product_kernel(inputs), inputs.bias, inputs.geometry)
        return y if finish is None else finish.apply(y)
    arguments, names = _arguments(inputs)
    dot = arguments[0]
    # PReLU behind a residual would need the sum's sign, which the output does not tell when its slope is negative
    if finish is None or dot.numel() == 0 or (finish.residual is not None and finish.activation == "prelu"):
        radius_kind = names.pop(0)
        y, _ = epilogue(*arguments, *[None] * 6, radius_kind, NONE, 0.0, 0, *names)
        return y if finish is None else finish.apply(y)
    return _finished(inputs, arguments, names)


def _check_devices(inputs: Inputs) -> None:
    """Kernels read whatever address they are given: everything must be where x is."""
    radius = inputs.radius.raw if isinstance(inputs.radius, LearnedRadius) else inputs.radius
    tensors = {"weight": inputs.weight, "bias": inputs.bias, "radius": radius, **inputs.learned}
    if isinstance(inputs.mean_norm, Tensor):
        tensors["mean_norm"] = inputs.mean_norm
    if inputs.finish is not None:
        tensors |= {name: getattr(inputs.finish, name) for name in ("gamma", "beta", "running_mean", "running_var", "residual", "slope")}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != inputs.x.device:
            raise ValueError(f"the input is on {inputs.x.device}, but {name} is on {tensor.device}")


def _arguments(inputs: Inputs) -> tuple[list[Any], list[Any]]:
    """What the epilogue takes: dot product, norms, vectors, mean, learned parameters; then the radius' kind and the names of the formulas."""
    operator, where = inputs.operator, inputs.geometry
    dtype = _convolution_dtype(inputs.x)
    x = inputs.x.to(dtype)
    padding = [before for before, _ in where.padding]
    if where.padding_mode != "zeros" or any(before != after for before, after in where.padding):
        x, padding = where.pad(x), [0] * where.dims
    batch_mean = inputs.mean_norm if inputs.radius is not None and isinstance(inputs.mean_norm, BatchMean) else None
    wants_mean = batch_mean is not None and not batch_mean.sync
    geometry = (where.stride, padding, where.dilation, where.groups)
    effects = batch_mean if wants_mean else None
    dot, norms, w_norm, mean, _ = dot_and_norm(launch.dense(x), launch.dense(inputs.weight), *geometry, inputs.eps, wants_mean, effects=effects)
    if batch_mean is None:
        mean = inputs.mean_norm if inputs.radius is not None else None
    elif batch_mean.sync:
        mean = batch_mean.of(norms)
    elif torch.compiler.is_compiling():
        batch_mean.track(mean.detach())

    rho = inputs.radius
    radius_kind = 1
    if isinstance(rho, LearnedRadius):
        # where ρ is also needed outside the kernels, it comes as it is; else the kernels make it of what is learned
        rho, radius_kind = (rho.rho, 1) if operator.weighting == "separate" else (rho.raw, 2)
    factor = operator.kernel_factor(w_norm, rho, inputs.learned)
    gain = w_norm if operator.weighting == "joint" else None
    learned = torch.stack([inputs.learned[name].float() for name in operator.learned]) if operator.learned else None
    return [dot, norms, factor, gain, rho, inputs.bias, mean, learned], [radius_kind, *operator.names]


def _finished(inputs: Inputs, arguments: list[Any], names: list[Any]) -> Tensor:
    """The epilogue, BatchNorm, residual and activation in shared passes; moves BatchNorm's running averages."""
    finish, dot = inputs.finish, arguments[0]
    assert finish is not None
    residual = None if finish.residual is None else launch.like(finish.residual.to(dot.dtype), dot)
    slope = None if finish.slope is None else finish.slope.expand(dot.shape[1]).contiguous()
    averages = (finish.running_mean, finish.running_var)
    moves = finish.training and finish.running_mean is not None and finish.running_var is not None
    radius_kind, *formulas = names
    options = (radius_kind, BATCH if finish.training else AVERAGES, finish.eps, ACTIVATIONS.index(finish.activation))
    out, norm = epilogue(
        *arguments, finish.gamma, finish.beta, *averages, residual, slope, *options, *formulas, effects=finish.momentum if moves else None
    )
    if moves and torch.compiler.is_compiling():
        with torch.no_grad():
            count = dot.numel() // dot.shape[1]
            finish.running_mean.lerp_(norm[0].to(finish.running_mean.dtype), finish.momentum)
            finish.running_var.lerp_((norm[1] * (count / max(1, count - 1))).to(finish.running_var.dtype), finish.momentum)
    return out


def _convolution_dtype(x: Tensor) -> torch.dtype:
    """The dtype PyTorch's convolution would compute in: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype
