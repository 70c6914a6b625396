"""The fused operators as `torch.library` operators, with fake implementations and gradients.

So `torch.compile`, `torch.export`, CUDA graphs and activation checkpointing see them as they see PyTorch's own. Their
gradients are operators without a gradient: a second derivative is an error, not a wrong number.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dcnet.ops.fused import launch
from dcnet.ops.fused.launch_epilogue import FIXED_SUMS, Epilogue
from dcnet.ops.operator import make_operator

# -- w/‖w‖ and ‖w‖ -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("dcnet::unit_kernel", mutates_args=())
def unit_kernel(weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return launch.unit_kernel(weight, eps, dtype)


@unit_kernel.register_fake
def _(weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight, dtype=dtype), weight.new_empty(weight.shape[0], dtype=torch.float32)


@torch.library.custom_op("dcnet::unit_kernel_backward", mutates_args=())
def unit_kernel_backward(weight: Tensor, norm: Tensor, e: Tensor | None, e_norm: Tensor | None) -> Tensor:
    return launch.unit_kernel_backward(weight, norm, e, e_norm)


@unit_kernel_backward.register_fake
def _(weight: Tensor, norm: Tensor, e: Tensor | None, e_norm: Tensor | None) -> Tensor:
    return torch.empty_like(weight)


def _unit_kernel_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])


def _unit_kernel_gradient(ctx: Any, e: Tensor | None, e_norm: Tensor | None) -> tuple[Any, ...]:
    weight, norm = ctx.saved_tensors
    return unit_kernel_backward(weight, norm, e, e_norm), None, None


unit_kernel.register_autograd(_unit_kernel_gradient, setup_context=_unit_kernel_context)

# -- the convolution and the patch norms: one operator, so that their gradients in x are added in one pass ----------------


@torch.library.custom_op("dcnet::dot_and_norm", mutates_args=())
def dot_and_norm(
    x: Tensor, unit: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    dot = _convolution(x, unit, stride, padding, dilation, groups)
    return launch.dense(dot), launch.patch_norms(x, unit.shape[2:], stride, padding, dilation, groups, eps)


@dot_and_norm.register_fake
def _(
    x: Tensor, unit: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    dot = _convolution(x, unit, stride, padding, dilation, groups)
    return dot, x.new_empty((x.shape[0], groups, *dot.shape[2:]), dtype=torch.float32)


def _convolution(x: Tensor, unit: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    if not stride:  # no dimensions: a linear map
        return x @ unit.t()
    return torch.ops.aten.convolution(x, unit, None, stride, padding, dilation, False, [0] * len(stride), groups)


@torch.library.custom_op("dcnet::dot_and_norm_backward", mutates_args=())
def dot_and_norm_backward(
    e: Tensor,
    e_norm: Tensor,
    x: Tensor,
    unit: Tensor,
    n: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    want_x: bool,
    want_unit: bool,
) -> tuple[Tensor, Tensor]:
    grad_x: Tensor | None
    if not stride:
        grad_x = e @ unit if want_x else None
        grad_unit = e.t() @ x if want_unit else None
    else:
        zeros = [0] * len(stride)
        grad_x, grad_unit, _ = torch.ops.aten.convolution_backward(
            e, x, unit, None, stride, padding, dilation, False, zeros, groups, (want_x, want_unit, False)
        )
    if want_x:
        grad_x = launch.patch_norms_backward(e_norm, x, n, unit.shape[2:], stride, padding, dilation, grad_x)
    return x.new_empty(0) if grad_x is None else grad_x, unit.new_empty(0) if grad_unit is None else grad_unit


@dot_and_norm_backward.register_fake
def _(e, e_norm, x, unit, n, stride, padding, dilation, groups, want_x, want_unit):
    return torch.empty_like(x) if want_x else x.new_empty(0), torch.empty_like(unit) if want_unit else unit.new_empty(0)


def _dot_and_norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, unit, *ctx.geometry, _ = inputs
    ctx.save_for_backward(x, unit, output[1])


def _dot_and_norm_gradient(ctx: Any, e: Tensor, e_norm: Tensor) -> tuple[Any, ...]:
    x, unit, n = ctx.saved_tensors
    want_x, want_unit = ctx.needs_input_grad[:2]
    grad_x, grad_unit = dot_and_norm_backward(e, e_norm, x, unit, n, *ctx.geometry, want_x, want_unit)
    return grad_x if want_x else None, grad_unit if want_unit else None, None, None, None, None, None


dot_and_norm.register_autograd(_dot_and_norm_gradient, setup_context=_dot_and_norm_context)

# -- the epilogue ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("dcnet::epilogue", mutates_args=())
def epilogue(
    dot: Tensor,
    norms: Tensor,
    factor: Tensor | None,
    gain: Tensor | None,
    radius: Tensor | None,
    bias: Tensor | None,
    learned: Tensor | None,
    magnitude: str,
    angular: str,
    weighting: str,
) -> Tensor:
    operator = make_operator(magnitude, angular, weighting or None)
    return Epilogue(dot, norms, operator, (factor, gain, radius, bias), learned).output(None, None, None, 0)


@epilogue.register_fake
def _(dot, norms, factor, gain, radius, bias, learned, magnitude, angular, weighting):
    return torch.empty_like(dot)


@torch.library.custom_op("dcnet::epilogue_backward", mutates_args=())
def epilogue_backward(
    e: Tensor,
    dot: Tensor,
    norms: Tensor,
    factor: Tensor | None,
    gain: Tensor | None,
    radius: Tensor | None,
    bias: Tensor | None,
    learned: Tensor | None,
    magnitude: str,
    angular: str,
    weighting: str,
) -> tuple[Tensor, Tensor, Tensor]:
    operator = make_operator(magnitude, angular, weighting or None)
    return Epilogue(dot, norms, operator, (factor, gain, radius, bias), learned).gradients(e)


@epilogue_backward.register_fake
def _(e, dot, norms, factor, gain, radius, bias, learned, magnitude, angular, weighting):
    rows = FIXED_SUMS + (0 if learned is None else learned.shape[0])
    return torch.empty_like(dot), torch.empty_like(norms), norms.new_empty((rows, dot.shape[1]))


def _epilogue_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, magnitude, angular, weighting = inputs
    ctx.names = (magnitude, angular, weighting)
    ctx.save_for_backward(*tensors)


def _epilogue_gradient(ctx: Any, e: Tensor) -> tuple[Any, ...]:
    grad_d, grad_n, sums = epilogue_backward(e, *ctx.saved_tensors, *ctx.names)
    wanted = ctx.needs_input_grad
    vectors = [sums[i] if wanted[2 + i] else None for i in range(FIXED_SUMS)]
    learned = sums[FIXED_SUMS:] if wanted[6] else None
    return grad_d, grad_n, *vectors, learned, None, None, None


epilogue.register_autograd(_epilogue_gradient, setup_context=_epilogue_context)
