"""The fused operators as `torch.library` operators, with fake implementations and gradients.

So `torch.compile`, `torch.export`, CUDA graphs and activation checkpointing see them as they see PyTorch's own. Their
gradients are operators without a gradient: a second derivative is an error, not a wrong number.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dcnet.ops.fused import launch
from dcnet.ops.fused.launch_epilogue import FIXED_SUMS, Epilogue, operator_named
from dcnet.ops.fused.register import register, register_differentiable

# -- w/‖w‖ and ‖w‖ -----------------------------------------------------------------------------------------------------


def _unit_kernel(weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return launch.unit_kernel(weight, eps, dtype)


def _unit_kernel_fake(weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight, dtype=dtype), weight.new_empty(weight.shape[0], dtype=torch.float32)


def _unit_kernel_backward(weight: Tensor, norm: Tensor, e: Tensor | None, e_norm: Tensor | None) -> Tensor:
    return launch.unit_kernel_backward(weight, norm, e, e_norm)


def _unit_kernel_backward_fake(weight: Tensor, norm: Tensor, e: Tensor | None, e_norm: Tensor | None) -> Tensor:
    return torch.empty_like(weight)


def _unit_kernel_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])


def _unit_kernel_gradient(ctx: Any, backward: Any, e: Tensor | None, e_norm: Tensor | None) -> tuple[Any, ...]:
    weight, norm = ctx.saved_tensors
    return backward(weight, norm, e, e_norm), None, None


unit_kernel = register_differentiable(
    "unit_kernel",
    _unit_kernel,
    _unit_kernel_fake,
    _unit_kernel_context,
    _unit_kernel_gradient,
    register("unit_kernel_backward", _unit_kernel_backward, _unit_kernel_backward_fake),
    _unit_kernel_backward,
)

# -- the convolution and the patch norms: one operator, so that their gradients in x are added in one pass ----------------


def _dot_and_norm(
    x: Tensor, unit: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    dot = _convolution(x, unit, stride, padding, dilation, groups)
    return launch.dense(dot), launch.patch_norms(x, unit.shape[2:], stride, padding, dilation, groups, eps)


def _dot_and_norm_fake(
    x: Tensor, unit: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    dot = _convolution(x, unit, stride, padding, dilation, groups)
    return dot, x.new_empty((x.shape[0], groups, *dot.shape[2:]), dtype=torch.float32)


def _convolution(x: Tensor, unit: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    if not stride:  # no dimensions: a linear map
        return x @ unit.t()
    return torch.ops.aten.convolution(x, unit, None, stride, padding, dilation, False, [0] * len(stride), groups)


def _dot_and_norm_backward(
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


def _dot_and_norm_backward_fake(e, e_norm, x, unit, n, stride, padding, dilation, groups, want_x, want_unit):
    return torch.empty_like(x) if want_x else x.new_empty(0), torch.empty_like(unit) if want_unit else unit.new_empty(0)


def _dot_and_norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, unit, *ctx.geometry, _ = inputs
    ctx.save_for_backward(x, unit, output[1])


def _dot_and_norm_gradient(ctx: Any, backward: Any, e: Tensor, e_norm: Tensor) -> tuple[Any, ...]:
    x, unit, n = ctx.saved_tensors
    want_x, want_unit = ctx.needs_input_grad[:2]
    grad_x, grad_unit = backward(e, e_norm, x, unit, n, *ctx.geometry, want_x, want_unit)
    return grad_x if want_x else None, grad_unit if want_unit else None, None, None, None, None, None


dot_and_norm = register_differentiable(
    "dot_and_norm",
    _dot_and_norm,
    _dot_and_norm_fake,
    _dot_and_norm_context,
    _dot_and_norm_gradient,
    register("dot_and_norm_backward", _dot_and_norm_backward, _dot_and_norm_backward_fake),
    _dot_and_norm_backward,
)

# -- the epilogue ------------------------------------------------------------------------------------------------------


def _epilogue(
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
    operator = operator_named(magnitude, angular, weighting)
    return Epilogue(dot, norms, operator, (factor, gain, radius, bias), learned).output(None, None, None, 0)


def _epilogue_fake(dot, norms, factor, gain, radius, bias, learned, magnitude, angular, weighting):
    return torch.empty_like(dot)


def _epilogue_backward(
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
    operator = operator_named(magnitude, angular, weighting)
    return Epilogue(dot, norms, operator, (factor, gain, radius, bias), learned).gradients(e)


def _epilogue_backward_fake(e, dot, norms, factor, gain, radius, bias, learned, magnitude, angular, weighting):
    rows = FIXED_SUMS + (0 if learned is None else learned.shape[0])
    return torch.empty_like(dot), torch.empty_like(norms), norms.new_empty((rows, dot.shape[1]))


def _epilogue_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, magnitude, angular, weighting = inputs
    ctx.names = (magnitude, angular, weighting)
    ctx.save_for_backward(*tensors)


def _epilogue_gradient(ctx: Any, backward: Any, e: Tensor) -> tuple[Any, ...]:
    grad_d, grad_n, sums = backward(e, *ctx.saved_tensors, *ctx.names)
    wanted = ctx.needs_input_grad
    vectors = [sums[i] if wanted[2 + i] else None for i in range(FIXED_SUMS)]
    learned = sums[FIXED_SUMS:] if wanted[6] else None
    return grad_d, grad_n, *vectors, learned, None, None, None


epilogue = register_differentiable(
    "epilogue",
    _epilogue,
    _epilogue_fake,
    _epilogue_context,
    _epilogue_gradient,
    register("epilogue_backward", _epilogue_backward, _epilogue_backward_fake),
    _epilogue_backward,
)
