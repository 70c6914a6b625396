"""The decoupled convolution as you would write it down: PyTorch's operators one after the other, autograd for the rest.

What the other implementations are measured against. Patch norms are a convolution of x² with ones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.layers import DecoupledConv2d
from dcnet.ops import PostOps


class StraightforwardConv2d(DecoupledConv2d):
    """`DecoupledConv2d` without weighting, computed step by step."""

    def forward(self, x: Tensor, post_ops: PostOps | None = None) -> Tensor:
        """Return h(‖x‖)·g(θ) for x (N, C, H, W), after its post-ops."""
        weight = self.weight / (self.weight.square().sum((1, 2, 3), keepdim=True) + self.eps).sqrt()
        dot = F.conv2d(x, weight, None, self.stride, self.padding, self.dilation, self.groups)
        squares = x.float().square().sum(1, keepdim=True)
        ones = torch.ones(1, 1, *self.kernel_size, device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            norm = (F.conv2d(squares, ones, None, self.stride, self.padding, self.dilation) + self.eps).sqrt()
        radius = None
        if self.raw_radius is not None and self.running_norm is not None:
            if self.training:
                mean = norm.mean()
                with torch.no_grad():
                    self.running_norm.lerp_(mean.reshape(1), 0.1)
            else:
                mean = self.running_norm
            radius = ((self.raw_radius.square() + 1e-4) * mean).reshape(1, -1, 1, 1)
        cosine = (dot.float() / norm).clamp(-1.0, 1.0)
        y = (self.operator.magnitude(norm, radius)[0] * self.operator.angular(cosine)[0]).to(dot.dtype)
        return y if post_ops is None else post_ops.apply(y)


def straightforward_(model: nn.Module) -> nn.Module:
    """Return the model with its decoupled convolutions computed step by step, in place."""
    for module in model.modules():
        if type(module) is DecoupledConv2d:
            if module.weighting is not None or module.groups != 1 or module.padding_mode != "zeros":
                raise ValueError(
                    "only an unweighted convolution of one group with zero padding can be computed step by "
                    f"step, got {module}"
                )
            module.__class__ = StraightforwardConv2d
    return model
