"""Gradients computed by kernels have no derivative: asking for one raises instead of returning a wrong number."""

from collections.abc import Callable, Sequence
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


def once(backward: Callable[[], tuple[Any, ...]], read: Callable[[], Sequence[Tensor | None]]) -> tuple[Any, ...]:
    """Return the results of `backward`; differentiating them raises. read: returns the tensors that they depend on."""
    if not torch.is_grad_enabled():  # nothing is recorded
        return backward()
    with torch.no_grad():
        gradients = backward()
    depend_on = [tensor for tensor in read() if tensor is not None and tensor.requires_grad]
    present = [gradient for gradient in gradients if gradient is not None]
    tied = iter(_Once.apply(len(present), *present, *depend_on))
    return tuple([None if gradient is None else next(tied) for gradient in gradients])


def differentiable_once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Return the backward of an autograd function, wrapped so that differentiating its results raises.

    PyTorch's `once_differentiable` connects the results to the incoming gradients only, and these may not require a
    gradient. Here the results are connected to the saved tensors too.
    """

    def recorded(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        return once(lambda: backward(ctx, *incoming), lambda: (*incoming, *ctx.saved_tensors))

    return recorded
