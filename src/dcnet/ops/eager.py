"""Decoupling with PyTorch's own operators: a convolution, a box sum of x², and one lean pass over the output."""

from typing import Any

import torch
from torch import Tensor

from dcnet.ops.epilogue import epilogue
from dcnet.ops.geometry import Geometry, convolve
from dcnet.ops.inputs import Inputs
from dcnet.ops.norms import (
    box_sum,
    compute_dtype,
    inverse,
    kernel_norm,
    plain_autograd,
    root,
    squares_in_pieces,
    sum_of_squares,
)


def decouple(inputs: Inputs) -> Tensor:
    """h(‖w‖, ‖x‖)·g(θ) for every patch and kernel, finished: (N, out_channels, *positions)."""
    operator, where, weight, finish = inputs.operator, inputs.geometry, inputs.weight, inputs.finish
    if operator.is_inner_product:
        y = convolve(inputs.x, inner_product_kernel(inputs), inputs.bias, where)
        return y if finish is None else finish.apply(y)
    unit, w_norm = unit_kernel(weight, inputs.eps)
    dot, squares = _dot_and_squares(inputs.x, unit, where)
    norms = root(box_sum(squares, where), inputs.eps)
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
        eps=inputs.eps,
        groups=where.groups,
        relu=relu,
    )
    return y if finish is None or relu else finish.apply(y)


class _DotAndSquares(torch.autograd.Function):
    """A convolution, and Σx² over the channels of each group: what both give to the gradient of x is added in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, where: Geometry) -> tuple[Tensor, Tensor]:
        ctx.where = where
        ctx.save_for_backward(x, kernel)
        dot, squares = convolve(x, kernel, None, where), squares_in_pieces(x, where.groups)
        if not ctx.needs_input_grad[0]:  # the kernel has nothing to do with them
            ctx.mark_non_differentiable(squares)
        return dot, squares

    @staticmethod
    def backward(ctx: Any, of_dot: Tensor, of_squares: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, kernel = ctx.saved_tensors
        where, (want_x, want_kernel, _) = ctx.where, ctx.needs_input_grad
        geometry = (where.stride, where.symmetric_padding, where.dilation, False, [0] * where.dims, where.groups)
        grad_x, grad_kernel, _ = torch.ops.aten.convolution_backward(
            of_dot, x, kernel, None, *geometry, (want_x, want_kernel, False)
        )
        if want_x:
            grouped, doubled = x.unflatten(1, (where.groups, -1)), (2.0 * of_squares).unsqueeze(2)
            # what is differentiated itself, or batched, is no place to write to
            if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(of_dot):
                grad_x = grad_x + (grouped * doubled).reshape(x.shape).to(grad_x.dtype)
            else:
                grad_x.unflatten(1, (where.groups, -1)).addcmul_(grouped, doubled)
        return grad_x, grad_kernel, None


def _dot_and_squares(x: Tensor, kernel: Tensor, where: Geometry) -> tuple[Tensor, Tensor]:
    """⟨w, x⟩/‖w‖ of every patch and kernel, and Σx² over the channels of each group."""
    kind = x.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(
        kind
    )  # then the convolution's dtype is its own
    if where.dims == 0 or where.symmetric_padding is None or plain_autograd() or autocast:
        return convolve(x, kernel, None, where), sum_of_squares(x, where.groups)
    return _DotAndSquares.apply(x, kernel, where)


class _UnitKernel(torch.autograd.Function):
    """w/‖w‖ and ‖w‖, in few operations: for a small batch those on kernels take as long as those on maps."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        w_norm = kernel_norm(weight, eps)
        ctx.eps = eps
        ctx.save_for_backward(weight, w_norm)
        ctx.set_materialize_grads(False)  # few operators use ‖w‖
        return _normalised(weight, inverse(w_norm, eps)), w_norm

    @staticmethod
    def backward(ctx: Any, of_unit: Tensor | None, of_norm: Tensor | None) -> tuple[Tensor, None]:
        weight, w_norm = ctx.saved_tensors
        one_over_norm, exact = inverse(w_norm, ctx.eps), weight.to(w_norm.dtype)
        # ‖w‖ has the slope w/‖w‖; w/‖w‖ has 1/‖w‖ less what goes into its length
        along = torch.zeros_like(w_norm) if of_norm is None else of_norm * one_over_norm
        if of_unit is None:
            return (exact * _per_kernel(along, weight)).to(weight.dtype), None
        of_unit = of_unit.to(w_norm.dtype)
        # one factor after another: the cube of a small norm's inverse may be too large a number
        length = (of_unit * exact).sum(tuple(range(1, weight.dim()))) * one_over_norm * one_over_norm
        along = along - length * one_over_norm
        grad = (of_unit * _per_kernel(one_over_norm, weight)).addcmul_(exact, _per_kernel(along, weight))
        return grad.to(weight.dtype), None


def unit_kernel(weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """w/‖w‖ in the dtype of w, and ‖w‖. Normalised before the convolution, not after it: the dot product of a bounded operator
    then cannot overflow because of a large kernel, and its gradient in ‖w‖ costs a pass over w, not over the output."""
    if plain_autograd():
        w_norm = kernel_norm(weight, eps)
        return _normalised(weight, inverse(w_norm, eps)), w_norm
    return _UnitKernel.apply(weight, eps)


def _normalised(weight: Tensor, one_over_norm: Tensor) -> Tensor:
    return (weight.to(one_over_norm.dtype) * _per_kernel(one_over_norm, weight)).to(weight.dtype)


def _per_kernel(values: Tensor, weight: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (weight.dim() - 1))


def inner_product_kernel(inputs: Inputs) -> Tensor:
    """The kernel whose plain convolution is LinearConv with cosine; every weighting puts ‖w‖ back once."""
    weight, alpha = inputs.weight, inputs.operator.magnitude.value("alpha", 1.0)
    if inputs.operator.weighting is None:
        weight, _ = unit_kernel(weight, inputs.eps)
    return weight if alpha == 1.0 else (weight.to(compute_dtype(weight)) * alpha).to(weight.dtype)
