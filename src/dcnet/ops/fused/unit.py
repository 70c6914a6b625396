"""w/‖w‖ with one launch each way, for operators that need nothing else; compiled graphs do it with PyTorch's own operators."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dcnet.ops.fused.launcher import Launcher, Memory
from dcnet.ops.fused.layout import dense, kernel_launchers, like
from dcnet.ops.fused.once import differentiable_once


@lru_cache(1024)
def _launchers(kernels: int, size: int, eps: float, *_for: torch.dtype | torch.device) -> tuple[Launcher, Launcher]:
    return kernel_launchers(
        kernels, size, [(0, 0), (1, 0), (2, 0)], [(0, 0), (1, 0), (2, 0), (3, 0), (3, 0)], eps, False
    )


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        norm = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
        unit = torch.empty_like(weight, dtype=dtype)
        ctx.launchers = _launchers(
            weight.shape[0], weight.numel() // weight.shape[0], eps, weight.dtype, dtype, weight.device
        )
        ctx.launchers[0](Memory([weight, unit, norm]))
        ctx.save_for_backward(weight, norm)
        return unit

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        weight, norm = ctx.saved_tensors
        grad = torch.empty_like(weight)
        ctx.launchers[1](Memory([weight, like(e, weight), grad, norm]))
        return grad, None, None


def unit_kernel(weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """w/‖w‖ in the dtype asked for."""
    return _Unit.apply(dense(weight), eps, dtype)
