"""A convolution with what follows it: BatchNorm, a residual addition, an activation, fused where they can be."""

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from dcnet.layers.chain import HandsOn
from dcnet.layers.decoupled import Decoupled
from dcnet.layers.linear_form import is_explained
from dcnet.layers.post_ops import FUSED_NORMS, post_ops_of
from dcnet.ops import ACTIVATIONS, ONLY_RELU, activate
from dcnet.util.compat import changed_by_fsdp, hooked


class Block(HandsOn):
    """act(norm(conv(x)) + residual), with fewer passes over memory where the convolution is decoupled.

    conv: any layer with a `weight`. norm: a module or None; a BatchNorm shares passes with a decoupled convolution.
    activation: None, "relu", "prelu" (a slope for each channel, starting at 0), "relu6", "silu", "gelu", "gelu_tanh" or
    "hardswish".
    Call it with x and, optionally, the residual to add. Where passes are shared, a forward hook on the convolution sees
    the finished result.
    """

    def __init__(self, conv: nn.Module, norm: nn.Module | None = None, activation: str | None = "relu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; possible: {', '.join(map(repr, ACTIVATIONS))}")
        self.conv = conv
        self.norm = norm
        self.activation = activation
        self.slope = nn.Parameter(torch.zeros(len(conv.weight))) if activation == "prelu" else None  # type: ignore[arg-type]

    def with_energy(
        self, x: Tensor, energy: Tensor | None, leave: bool, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        conv, norm = self.conv, self.norm
        # torch.fx records one module after the other; FSDP2 casts what it finds among a layer's keyword arguments, and
        # running averages would move in a copy
        if isinstance(x, Proxy) or not isinstance(conv, Decoupled) or changed_by_fsdp(conv):
            return self._one_by_one(x, residual), None
        if conv.explained_by and is_explained(conv):  # every module shows by itself what it does
            return self._one_by_one(x, residual), None
        if type(norm) in FUSED_NORMS:
            post_ops = post_ops_of(norm, residual, self.activation, self.slope)
        elif norm is None and residual is None and self.activation == "relu":
            post_ops = ONLY_RELU
        else:
            return self._one_by_one(x, residual), None
        if type(conv).forward is Decoupled.forward and "forward" not in vars(conv) and not hooked(conv):
            return conv.decouple(x, post_ops, energy, leave)
        return conv(x, post_ops=post_ops), None

    def _one_by_one(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the same with a pass for each."""
        y, norm = self.conv(x), self.norm
        if norm is not None:
            y = norm(y)
        if residual is not None:
            y = y + residual
        return activate(y, self.activation, self.slope)
