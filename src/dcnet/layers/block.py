"""A convolution with its BatchNorm, residual addition and activation, fused where possible."""

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from dcnet.layers.chain import HandsOn
from dcnet.layers.decoupled import Decoupled, own_forward
from dcnet.layers.linear_form import is_explained
from dcnet.layers.post_ops import is_norm_of, post_ops_of
from dcnet.ops import ACTIVATIONS, ONLY, activate
from dcnet.util.compat import changed_by_fsdp, hooked


class Block(HandsOn):
    """A convolution with a norm, a residual addition and an activation: act(norm(conv(x)) + residual).

    Where the convolution is decoupled and followed by a BatchNorm or a ReLU, the parts share passes over memory, which
    is faster and needs less of it. A forward hook on the convolution then sees the fused result. Where the norm has
    hooks, each part is computed by itself.

    Args:
        conv: a convolution or linear layer, decoupled or plain.
        norm: a module such as `nn.BatchNorm2d`, or None.
        activation: None, "relu", "prelu" (a slope for each channel, starting at 0), "relu6", "silu", "gelu",
            "gelu_tanh" or "hardswish".

    Shape:
        Input as the convolution takes it; residual and output as the convolution gives it.

    Examples:
        >>> import torch, dcnet
        >>> from torch import nn
        >>> block = dcnet.Block(dcnet.DecoupledConv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), "relu")
        >>> x = torch.randn(2, 8, 6, 6)
        >>> block(x, x).shape
        torch.Size([2, 8, 6, 6])
    """

    def __init__(self, conv: nn.Module, norm: nn.Module | None = None, activation: str | None = "relu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; possible: {', '.join(map(repr, ACTIVATIONS))}")
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

    def with_energy(
        self, x: Tensor, energy: Tensor | None, leave: bool, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        conv, norm = self.conv, self.norm
        # torch.fx records one module after the other. FSDP2 casts the keyword arguments of a layer, so that only a copy
        # of running averages would be updated
        if isinstance(x, Proxy) or not isinstance(conv, Decoupled) or changed_by_fsdp(conv):
            return self._one_by_one(x, residual), None
        # explanations need the result of every module
        if own_forward(conv) or (conv.explained_by and is_explained(conv)):
            return self._one_by_one(x, residual), None
        if norm is not None and is_norm_of(norm, conv, x) and not hooked(norm):
            post_ops = post_ops_of(norm, residual, self.activation, self.slope)
        elif norm is None and residual is None and self.activation in ONLY:
            post_ops = ONLY[self.activation]
        else:
            return self._one_by_one(x, residual), None
        if not hooked(conv):
            return conv.decouple(x, post_ops, energy, leave)
        return conv(x, post_ops=post_ops), None

    def _one_by_one(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Compute the same, with one pass for each part."""
        y, norm = self.conv(x), self.norm
        if norm is not None:
            y = norm(y)
        if residual is not None:
            y = y + residual
        return activate(y, self.activation, self.slope)
