"""Dot products with unit kernels, patch norms and kernel norms as one `torch.library` operator.

One, so that the gradients of dot product and norm in x are added in one pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dcnet.ops.fused import launch
from dcnet.ops.fused.register import register_differentiable
from dcnet.ops.mean_norm import BatchMean


def _plan(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> launch.NormPlan:
    return launch.norm_plan(x.shape, x.stride(), weight.shape[2:], tuple(stride), tuple(padding), tuple(dilation), groups)


def _dot_and_norm(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    eps: float,
    wants_mean: bool,
    effects: BatchMean | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """⟨w, x⟩/‖w‖; ‖x‖ of every patch, (N, groups, …), in float32; ‖w‖; E{‖x‖} if wanted, (groups,), else empty; w/‖w‖, for the gradient.

    `effects` has a running average that follows E{‖x‖}.
    """
    unit, w_norm = launch.unit_kernel(weight, eps, x.dtype)
    dot = launch.dense(_convolution(x, unit, stride, padding, dilation, groups))
    norms, mean = launch.patch_norms(x, _plan(x, weight, stride, padding, dilation, groups), eps, wants_mean, effects)
    return dot, norms, w_norm, mean, unit


def _fake(x, weight, stride, padding, dilation, groups, eps, wants_mean):
    unit = torch.empty_like(weight, dtype=x.dtype)
    dot = _convolution(x, unit, stride, padding, dilation, groups)
    w_norm, mean = (x.new_empty(size, dtype=torch.float32) for size in (weight.shape[0], groups if wants_mean else 0))
    return dot, x.new_empty((x.shape[0], groups, *dot.shape[2:]), dtype=torch.float32), w_norm, mean, unit


def _convolution(x: Tensor, unit: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    if not stride:  # no dimensions: a linear map
        return x @ unit.t()
    return torch.ops.aten.convolution(x, unit, None, stride, padding, dilation, False, [0] * len(stride), groups)


def _backward(
    e: Tensor,
    e_norms: Tensor,
    e_w_norm: Tensor | None,
    e_mean: Tensor | None,
    x: Tensor,
    weight: Tensor,
    unit: Tensor,
    norms: Tensor,
    w_norm: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    want_x: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients in x and in the weight, each empty if it is not wanted."""
    grad_x: Tensor | None
    if not stride:
        grad_x = e @ unit if want_x else None
        grad_unit = e.t() @ x if want_weight else None
    else:
        zeros = [0] * len(stride)
        grad_x, grad_unit, _ = torch.ops.aten.convolution_backward(
            e, x, unit, None, stride, padding, dilation, False, zeros, groups, (want_x, want_weight, False)
        )
    if want_x:
        grad_x = launch.patch_norms_backward(e_norms, e_mean, x, norms, _plan(x, weight, stride, padding, dilation, groups), grad_x)
    grad_weight = None if grad_unit is None else launch.unit_kernel_backward(weight, w_norm, grad_unit, e_w_norm)
    return x.new_empty(0) if grad_x is None else grad_x, weight.new_empty(0) if grad_weight is None else grad_weight


def _backward_fake(e, e_norms, e_w_norm, e_mean, x, weight, unit, norms, w_norm, stride, padding, dilation, groups, want_x, want_weight):
    return torch.empty_like(x) if want_x else x.new_empty(0), torch.empty_like(weight) if want_weight else weight.new_empty(0)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, *ctx.geometry, _, _ = inputs
    _, norms, w_norm, mean, unit = output
    ctx.mark_non_differentiable(unit, *([mean] if mean.numel() == 0 else []))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, unit, norms, w_norm)


def _gradient(ctx: Any, backward: Any, e: Tensor | None, e_norms: Tensor | None, e_w_norm: Any, e_mean: Any, _: Any) -> tuple[Any, ...]:
    x, weight, unit, norms, w_norm = ctx.saved_tensors
    want_x, want_weight = ctx.needs_input_grad[:2]
    grad_x = grad_weight = None
    if e is not None and e_norms is not None:  # they come together, from the epilogue
        grad_x, grad_weight = backward(e, e_norms, e_w_norm, e_mean, x, weight, unit, norms, w_norm, *ctx.geometry, want_x, want_weight)
    return grad_x if want_x else None, grad_weight if want_weight else None, *[None] * 6


dot_and_norm = register_differentiable("dot_and_norm", _dot_and_norm, _fake, _context, _gradient, _backward, _backward_fake)
