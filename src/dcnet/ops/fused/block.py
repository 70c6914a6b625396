"""The fused block as a `torch.library` operator: act(BatchNorm(s·h·g + b) + residual).

Forward reads the dot product twice (statistics; normalised output) and writes once; the decoupled map itself is never
stored. Backward reads dot product and incoming gradient twice and writes the dot product's gradient.
"""

from typing import Any

import torch
from torch import Tensor

from dcnet.ops.fused.launch import like
from dcnet.ops.fused.launch_epilogue import FIXED_SUMS, Epilogue, normalisation, operator_named
from dcnet.ops.fused.register import register, register_differentiable


def _block(
    dot: Tensor,
    norms: Tensor,
    factor: Tensor | None,
    gain: Tensor | None,
    radius: Tensor | None,
    bias: Tensor | None,
    learned: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None,
    slope: Tensor | None,
    training: bool,
    eps: float,
    activation: int,
    magnitude: str,
    angular: str,
    weighting: str,
) -> tuple[Tensor, Tensor, Tensor]:
    epilogue = Epilogue(dot, norms, operator_named(magnitude, angular, weighting), (factor, gain, radius, bias), learned)
    if training or running_mean is None or running_var is None:
        around = dot.new_zeros(dot.shape[1], dtype=torch.float32) if running_mean is None else running_mean.float()
        mean, variance = epilogue.statistics(around)
    else:
        mean, variance = running_mean.float().clone(), running_var.float().clone()
    norm = normalisation(mean, variance, gamma, beta, eps)
    return epilogue.output((norm.scale, norm.shift), residual, slope, activation), mean, variance


def _block_fake(dot, norms, *_):
    vector = dot.new_empty(dot.shape[1], dtype=torch.float32)
    return torch.empty_like(dot), vector, torch.empty_like(vector)


def _block_backward(
    e: Tensor,
    out: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    dot: Tensor,
    norms: Tensor,
    factor: Tensor | None,
    gain: Tensor | None,
    radius: Tensor | None,
    bias: Tensor | None,
    learned: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    slope: Tensor | None,
    residual: bool,
    training: bool,
    eps: float,
    activation: int,
    magnitude: str,
    angular: str,
    weighting: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of dot and norms; sums for the vectors; (3, channels) for β, γ and slope; the residual's gradient (empty if it is e)."""
    epilogue = Epilogue(dot, norms, operator_named(magnitude, angular, weighting), (factor, gain, radius, bias), learned)
    norm = normalisation(mean, variance, gamma, beta, eps)
    e = like(e, dot)
    behind_activation = residual and activation != 0
    of_norm, behind = epilogue.reduce(e, dot if out is None else out, norm, behind_activation, slope, activation)
    means = of_norm[:2] / (dot.numel() // dot.shape[1]) if training else None
    grad_d, grad_n, sums = epilogue.gradients(behind, norm, means, slope, 0 if behind_activation else activation)
    return grad_d, grad_n, sums, of_norm, behind if behind_activation else dot.new_empty(0)


def _block_backward_fake(
    e, out, mean, variance, dot, norms, factor, gain, radius, bias, learned, gamma, beta, slope, residual, training, eps, activation, *_
):
    rows = FIXED_SUMS + (0 if learned is None else learned.shape[0])
    behind = torch.empty_like(dot) if residual and activation != 0 else dot.new_empty(0)
    vectors = norms.new_empty((rows, dot.shape[1])), norms.new_empty((3, dot.shape[1]))
    return torch.empty_like(dot), torch.empty_like(norms), *vectors, behind


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, running_mean, _, residual, slope, training, eps, activation, magnitude, angular, weighting = inputs
    out, mean, variance = output
    ctx.mark_non_differentiable(mean, variance)
    ctx.options = (residual is not None, training or running_mean is None, eps, activation, magnitude, angular, weighting)
    needs_out = residual is not None and activation != 0  # else the sign before the activation is computed again
    ctx.save_for_backward(out if needs_out else None, mean, variance, *tensors, slope)


def _gradient(ctx: Any, backward: Any, e: Tensor, *_: Any) -> tuple[Any, ...]:
    grad_d, grad_n, sums, of_norm, behind = backward(e, *ctx.saved_tensors, *ctx.options)
    residual, _, _, activation, *_ = ctx.options
    wanted = ctx.needs_input_grad
    vectors = [sums[i] if wanted[2 + i] else None for i in range(FIXED_SUMS)]
    learned = sums[FIXED_SUMS:] if wanted[6] else None
    of_residual = (behind if activation != 0 else e) if residual else None
    slope = of_norm[2] if wanted[12] else None
    gamma, beta = of_norm[1] if wanted[7] else None, of_norm[0] if wanted[8] else None
    return grad_d, grad_n, *vectors, learned, gamma, beta, None, None, of_residual, slope, *[None] * 6


block = register_differentiable(
    "block",
    _block,
    _block_fake,
    _context,
    _gradient,
    register("block_backward", _block_backward, _block_backward_fake),
    _block_backward,
)
