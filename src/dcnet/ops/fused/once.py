"""Gradients by kernels have no derivative: who asks for one gets an error, never a number with a part missing."""

from collections.abc import Iterable, Sequence
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


def once(gradients: Sequence[Any], depend_on: Iterable[Tensor | None]) -> tuple[Any, ...]:
    """The gradients, tied to everything they depend on by a derivative that raises; for a backward pass that is itself recorded."""
    # `once_differentiable` ties them to the incoming gradient alone, which need not require one
    present = [gradient for gradient in gradients if gradient is not None]
    tied = iter(_Once.apply(len(present), *present, *[tensor for tensor in depend_on if tensor is not None and tensor.requires_grad]))
    return tuple([None if gradient is None else next(tied) for gradient in gradients])
