"""A convolution with what follows it: BatchNorm, a residual addition, an activation, fused where they can be."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from dcnet.layers.decoupled import Decoupled
from dcnet.layers.linear_form import is_explained
from dcnet.ops import ACTIVATIONS, ONLY_RELU, Carry, Finish


def hooked(module: nn.Module) -> bool:
    """Whether hooks may change what goes into a module or comes out of it, or the gradients there."""
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
    """Whether a module takes a `Carry`; wrappers, which pass on what they are asked for, do not."""
    return isinstance(module, Carrying) and type(module).carries


class Block(Carrying):
    """act(norm(conv(x)) + residual); fewer passes over memory where the convolution is decoupled, before a BatchNorm or a ReLU.

    activation: None, "relu", or "prelu" (a slope for each channel, starting at 0).
    Where passes are shared, a forward hook on the convolution sees the finished result.
    """

    carries = True

    def __init__(self, conv: nn.Module, norm: nn.Module | None = None, activation: str | None = "relu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; possible: None, 'relu', 'prelu'")
        self.conv = conv
        self.norm = norm
        self.activation = activation
        self.slope = nn.Parameter(torch.zeros(len(conv.weight))) if activation == "prelu" else None  # type: ignore[arg-type]

    def forward(self, x: Tensor, residual: Tensor | None = None, carry: Carry | None = None) -> Tensor:
        """The finished convolution of x; `carry` is for `Chain`."""
        conv, norm = self.conv, self.norm
        if isinstance(x, Proxy):  # torch.fx records a module after the other
            return self._one_by_one(x, residual)
        if isinstance(conv, Decoupled) and is_explained(conv):  # there is nothing to share passes with
            return self._one_by_one(x, residual)
        if (
            conv._forward_pre_hooks_with_kwargs
        ):  # FSDP2's, for one, casts what it finds there: running averages would move in a copy
            return self._one_by_one(x, residual)
        if carry is not None and (hooked(self) or hooked(conv)):
            carry = None
        if isinstance(conv, Decoupled) and type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            return conv(x, finish=self._finish(norm, residual, carry))
        if isinstance(conv, Decoupled) and norm is None and residual is None and self.activation == "relu":
            return conv(x, finish=ONLY_RELU)
        return self._one_by_one(x, residual)

    def _one_by_one(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The same with a pass for each."""
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
        if (
            batches is not None and norm.momentum is None
        ):  # a cumulative average, for which nn.BatchNorm2d too waits for the device
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
    """`nn.Sequential` in which blocks, and other modules that do, hand a `Carry` on to those that follow immediately."""

    def forward(self, x: Tensor) -> Tensor:
        """What the last module makes of it."""
        carry, takes = Carry(), [takes_carry(module) for module in self]
        for module, takes_it, wanted in zip(self, takes, [*takes, False][1:], strict=True):
            carry.enter(wanted)
            x = module(x, carry=carry) if takes_it else module(x)
        return x
