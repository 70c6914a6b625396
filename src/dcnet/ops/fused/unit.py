"""w/‖w‖ with one launch each way, for operators that need nothing else; compiled graphs do it with PyTorch's own operators."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dcnet.ops.fused import launch


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        norm = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
        ctx.save_for_backward(weight, norm)
        return launch.unit_kernel(weight, (norm, 0), eps, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor, None, None]:
        weight, norm = ctx.saved_tensors
        return launch.unit_kernel_backward(weight, (norm, 0), e, None), None, None


def unit_kernel(weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """w/‖w‖ in the dtype asked for."""
    return _Unit.apply(launch.dense(weight), eps, dtype)
