"""Norms, dot products and normalized kernels as autograd functions."""

from typing import Any

import torch
from torch import Tensor

from dcnet.ops import norms
from dcnet.ops.composite import Composite
from dcnet.ops.cpu import depthwise, native_depthwise, native_layer
from dcnet.ops.cpu.box_sum import box_sum
from dcnet.ops.cpu.chunks import chunks
from dcnet.ops.cpu.convolution import autocast, convolution_gradients
from dcnet.ops.cpu.passes import epilogue
from dcnet.ops.geometry import Geometry, convolve
from dcnet.ops.inputs import Inputs
from dcnet.ops.mean_norm import BatchMean
from dcnet.ops.norms import compute_dtype, inverse, per_kernel
from dcnet.util.compat import is_grads_batched, unprepared_apply, wanted_gradients


class AutogradFunctions(Composite):
    """`impl="eager"` where nothing, such as a compiler, has to follow the operations."""

    def decouple(self, inputs: Inputs) -> Tensor:
        y = native_layer.decouple(inputs, super().decouple)
        return super().decouple(inputs) if y is None else y

    def unit_kernel(self, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return _unit_kernel(weight, eps)

    def map(self, inputs: Inputs, relu: bool) -> Tensor:
        if not depthwise.applies(inputs) or autocast(inputs.x):
            return super().map(inputs, relu)
        y = native_depthwise.decouple(inputs, relu, self)
        if y is not None:
            return y
        unit, w_norm = self.unit_kernel(inputs.weight, inputs.eps)
        stand_in, norm_map, mean = depthwise.patch_norms(inputs)
        # The radii depend on the norms' means only. Over several ranks, they also depend on the number of norms.
        over_ranks = isinstance(inputs.mean_norm, BatchMean) and inputs.mean_norm.sync
        vectors = self.vectors(inputs, w_norm, norm_map if over_ranks else mean)
        return depthwise.epilogue(inputs, stand_in, norm_map, unit, w_norm, vectors, relu)

    def norm_map(self, x: Tensor, geometry: Geometry, eps: float) -> Tensor:
        return norms.root(box_sum(_SumOfSquares.apply(x, geometry.groups), geometry), eps)

    def dot_and_norms(self, inputs: Inputs, unit: Tensor, w_norm: Tensor) -> tuple[Tensor, Tensor]:
        x, geometry, eps = inputs.x, inputs.geometry, inputs.eps
        if geometry.dims == 0 or geometry.symmetric_padding is None or autocast(x):
            return convolve(x, unit, None, geometry), self.norm_map(x, geometry, eps)
        dot, squares = _dot_and_squares(x, unit, inputs.weight, w_norm, geometry, eps)
        return dot, norms.root(box_sum(squares, geometry), eps)

    epilogue = staticmethod(epilogue)


class _UnitKernel(torch.autograd.Function):
    """Computes w/‖w‖ and ‖w‖ in few operations.

    For a small batch, operations on kernels take as long as operations on maps.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        w_norm = norms.kernel_norm(weight, eps)
        ctx.eps = eps
        ctx.save_for_backward(weight, w_norm)
        ctx.set_materialize_grads(False)  # few operators use ‖w‖
        return norms.normalized(weight, inverse(w_norm, eps)), w_norm

    @staticmethod
    def backward(ctx: Any, of_unit: Tensor | None, of_norm: Tensor | None) -> tuple[Tensor, None]:
        weight, w_norm = ctx.saved_tensors
        one_over_norm, exact = inverse(w_norm, ctx.eps), weight.to(w_norm.dtype)
        # the slope of ‖w‖ is w/‖w‖; that of w/‖w‖ is 1/‖w‖, less the part along w
        along = torch.zeros_like(w_norm) if of_norm is None else of_norm * one_over_norm
        if of_unit is None:
            return (exact * per_kernel(along, weight)).to(weight.dtype), None
        of_unit = of_unit.to(w_norm.dtype)
        # one factor at a time: the cube of a small norm's inverse may overflow
        length = (of_unit * exact).sum(tuple(range(1, weight.dim()))) * one_over_norm * one_over_norm
        along = along - length * one_over_norm
        grad = (of_unit * per_kernel(one_over_norm, weight)).addcmul_(exact, per_kernel(along, weight))
        return grad.to(weight.dtype), None


def _squares(x: Tensor, groups: int) -> Tensor:
    """Return Σ over each group's channels of x², in the compute dtype; not for autograd."""
    squares = torch.empty((x.shape[0], groups, *x.shape[2:]), dtype=compute_dtype(x), device=x.device)
    for chunk, sums in chunks(x, squares):
        torch.sum(chunk.to(squares.dtype).square().unflatten(1, (groups, -1)), 2, out=sums)
    return squares if x.numel() else squares.zero_()


class _SumOfSquares(torch.autograd.Function):
    """Computes Σ over each group's channels of x², in the compute dtype.

    It saves only x, which the convolution saves anyway.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int) -> Tensor:
        ctx.save_for_backward(x)
        return _squares(x, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        product = x.unflatten(1, (grad.shape[1], -1)) * (2.0 * grad).unsqueeze(2)
        return product.reshape(x.shape).to(x.dtype), None


class _DotAndSquares(torch.autograd.Function):
    """Computes a convolution, and Σx² over each group's channels; adds both parts of the gradient of x in one pass.

    It also gets w and ‖w‖, which are kept anyway. From these, backward computes the normalized kernels again instead of
    keeping them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, unit: Tensor, weight: Tensor, w_norm: Tensor, geometry: Geometry, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.geometry, ctx.eps = geometry, eps
        ctx.save_for_backward(x, weight, w_norm)
        dot, squares = convolve(x, unit, None, geometry), _squares(x, geometry.groups)
        if not ctx.needs_input_grad[0]:  # the squares depend on x only
            ctx.mark_non_differentiable(squares)
        return dot, squares

    @staticmethod
    def backward(ctx: Any, of_dot: Tensor, of_squares: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, w_norm = ctx.saved_tensors
        g, (want_x, want_unit, *_) = ctx.geometry, wanted_gradients(ctx)
        unit = norms.normalized(weight, inverse(w_norm, ctx.eps))
        grad_x, grad_unit = convolution_gradients(of_dot, x, unit, g, want_x, want_unit)
        if grad_x is not None:
            grouped, doubled = x.unflatten(1, (g.groups, -1)), (2.0 * of_squares).unsqueeze(2)
            # a gradient that is differentiated itself, or batched, cannot be changed in place
            if torch.is_grad_enabled() or is_grads_batched(of_dot):
                grad_x = grad_x + (grouped * doubled).reshape(x.shape).to(grad_x.dtype)
            else:
                grad_x.unflatten(1, (g.groups, -1)).addcmul_(grouped, doubled)
        return grad_x, grad_unit, None, None, None, None


# safe because `dispatch.eager` sends function transforms elsewhere
_unit_kernel, _dot_and_squares = unprepared_apply(_UnitKernel), unprepared_apply(_DotAndSquares)
