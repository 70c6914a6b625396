"""A convolution with what follows it: BatchNorm, a residual addition, an activation, fused where they can be."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from dcnet.layers.decoupled import Decoupled
from dcnet.ops import ACTIVATIONS, ONLY_RELU, Carry, Finish


def hooked(module: nn.Module) -> bool:
    """Return whether hooks may change what goes into a module or comes out of it, or the gradients there."""
    hooks = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(hooks) or nn.modules.module._has_any_global_hook()


class Carrying(nn.Module):
    """A module whose `forward` takes a `Carry`. A subclass with a `forward` of its own does not, unless it says so."""

    carries = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in cls.__dict__ and "carries" not in cls.__dict__:
            cls.carries = False


def takes_carry(module: nn.Module) -> bool:
    """Return whether a module takes a `Carry`; wrappers, which pass on what they are asked for, do not."""
    return isinstance(module, Carrying) and type(module).carries


class Block(Carrying):
    """A convolution with what follows it: act(norm(conv(x)) + residual).

    Where the convolution is decoupled and followed by a BatchNorm or a ReLU, the parts share passes over memory, which
    is faster and needs less of it. A forward hook on the convolution then sees the finished result.

    Args:
        conv: a convolution or linear layer, decoupled or plain.
        norm: what follows it, such as `nn.BatchNorm2d`; None for nothing.
        activation: None, "relu", or "prelu" (a slope for each channel, starting at 0).

    Shape:
        Input as the convolution takes it; residual and output as the convolution gives it.

    Examples:
        >>> import torch, dcnet
        >>> from torch import nn
        >>> block = dcnet.Block(dcnet.DecoupledConv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), "relu")
        >>> x = torch.randn(2, 8, 6, 6)
        >>> block(x, residual=x).shape
        torch.Size([2, 8, 6, 6])
    """

    carries = True

    def __init__(self, conv: nn.Module, norm: nn.Module | None = None, activation: str | None = "relu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; possible: None, 'relu', 'prelu'")
        self.conv = conv
        self.norm = norm
        self.activation = activation
        kernels = len(conv.weight)  # type: ignore[arg-type]
        self.slope = nn.Parameter(torch.zeros(kernels)) if activation == "prelu" else None

    def extra_repr(self) -> str:
        """Say what follows the convolution."""
        norm = "conv(x)" if self.norm is None else "norm(conv(x))"
        inner = f"{norm} [+ residual]"
        return inner if self.activation is None else f"{self.activation}({inner})"

    def forward(self, x: Tensor, residual: Tensor | None = None, carry: Carry | None = None) -> Tensor:
        """Return the finished convolution of x; `carry` is for `Chain`."""
        conv, norm = self.conv, self.norm
        if isinstance(x, Proxy):  # torch.fx records a module after the other
            return self._one_by_one(x, residual)
        # FSDP2's hook, for one, casts what it finds there: running averages would move in a copy
        if conv._forward_pre_hooks_with_kwargs:
            return self._one_by_one(x, residual)
        if carry is not None and (hooked(self) or hooked(conv)):
            carry = None
        if isinstance(conv, Decoupled) and type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            finished: Tensor = conv(x, finish=self._finish(norm, residual, carry))
            return finished
        if isinstance(conv, Decoupled) and norm is None and residual is None and self.activation == "relu":
            active: Tensor = conv(x, finish=ONLY_RELU)
            return active
        return self._one_by_one(x, residual)

    def _one_by_one(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the same with a pass for each."""
        y, norm = self.conv(x), self.norm
        if norm is not None:
            y = norm(y)
        if residual is not None:
            y = y + residual
        if self.activation == "relu":
            return torch.relu(y)
        return y if self.slope is None else nn.functional.prelu(y, self.slope)

    def _finish(self, norm: nn.Module | None, residual: Tensor | None, carry: Carry | None) -> Finish:
        assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
        training, momentum = norm.training, 0.0 if norm.momentum is None else norm.momentum
        tracks = not training or norm.track_running_stats
        running_mean, running_var = (norm.running_mean, norm.running_var) if tracks else (None, None)
        batches = norm.num_batches_tracked if training and tracks else None
        if batches is not None and norm.momentum is None:
            # a cumulative average, for which nn.BatchNorm2d too waits for the device
            momentum = 1.0 / (float(batches) + 1.0)
        return Finish(
            norm.weight,
            norm.bias,
            running_mean,
            running_var,
            training=training or running_mean is None,
            momentum=momentum,
            eps=norm.eps,
            batches=batches,
            residual=residual,
            activation=self.activation,
            slope=self.slope if self.activation == "prelu" else None,
            carry=carry,
        )


class Chain(nn.Sequential):
    """`nn.Sequential` in which blocks, and other modules that can, hand a `Carry` on to those right behind them."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last module makes of the input."""
        carry, takes = Carry(), [takes_carry(module) for module in self]
        for module, takes_it, wanted in zip(self, takes, [*takes, False][1:], strict=True):
            carry.enter(wanted)
            x = module(x, carry=carry) if takes_it else module(x)
        return x
