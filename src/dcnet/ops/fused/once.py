"""Gradients by kernels have no derivative: asking for one is an error, and never a number with a part missing."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([tensor.view_as(tensor) for tensor in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError("a second derivative through the fused kernels, which have none; impl='eager' has")


def differentiable_once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Wrap the backward of an autograd function so that its results have a derivative that raises.

    PyTorch's `once_differentiable` ties them to the incoming gradients alone, which need not require one; here they are tied to what was
    saved as well.
    """

    def recorded(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():  # nothing is recorded
            return backward(ctx, *incoming)
        with torch.no_grad():
            gradients = backward(ctx, *incoming)
        depend_on = [
            tensor for tensor in (*incoming, *ctx.saved_tensors) if tensor is not None and tensor.requires_grad
        ]
        present = [gradient for gradient in gradients if gradient is not None]
        tied = iter(_Once.apply(len(present), *present, *depend_on))
        return tuple([None if gradient is None else next(tied) for gradient in gradients])

    return recorded
