"""Decoupled twins of convolutions that first prepare their input or kernels.

These are timm's SAME padding and weight standardization.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.layers.conv import DecoupledConv2d
from dcnet.layers.decoupled import Decoupled
from dcnet.ops import PostOps


class DecoupledConv2dSame(DecoupledConv2d):
    """A decoupled convolution that pads its input as TensorFlow's SAME does, depending on the size of the input.

    It is the twin of timm's `Conv2dSame`.
    """

    same_pad = True

    def prepare_input(self, x: Tensor) -> Tensor:
        """Return the input with zeros around it, so that windows begin at every multiple of the stride.

        If the number of zeros is odd, there is one more at the end.
        """
        return _pad_same(self, x) if self.same_pad else x

    def decouple(
        self, x: Tensor, post_ops: PostOps | None, energy: Tensor | None = None, leave_energy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        padded = self.prepare_input(x) if isinstance(x, Tensor) else x
        return super().decouple(padded, post_ops, energy if padded is x else None, leave_energy)


class DecoupledStdConv2d(DecoupledConv2dSame):
    """A decoupled convolution with standardized kernels.

    It is the twin of timm's `StdConv2d`, `ScaledStdConv2d` and their SAME-padded forms. Each kernel is brought to mean
    0 and variance 1 (times `gain`·`scale`, if there is a gain), then decoupled. Projection and orthogonality skip this
    layer: they would change the weight, but the kernels in use are computed from it.
    """

    same_pad = False
    constrained = False
    gain_init = 1.0
    scale = 1.0
    standardization_eps = 1e-6

    def _init_decoupling(self, *arguments: Any, **options: Any) -> None:
        self.standardization_eps = self.__dict__.get("eps", DecoupledStdConv2d.standardization_eps)
        super()._init_decoupling(*arguments, **options)

    @property
    def effective_weight(self) -> Tensor:
        """The standardized kernels."""
        weight = self.weight
        gain = self._parameters.get("gain")  # the scaled forms have one
        scaled = None if gain is None else (gain * self.scale).view(-1)
        rows = weight.reshape(1, self.out_channels, -1)
        return F.batch_norm(
            rows, None, None, weight=scaled, training=True, momentum=0.0, eps=self.standardization_eps
        ).reshape_as(weight)

    def reset_parameters(self) -> None:
        """Draw new kernels, and reset the gain."""
        super().reset_parameters()
        if (gain := self._parameters.get("gain")) is not None:
            nn.init.constant_(gain, self.gain_init)


# by class name, so that timm does not have to be imported
_TIMM: dict[str, type[Decoupled]] = {
    "Conv2dSame": DecoupledConv2dSame,
    "StdConv2d": DecoupledStdConv2d,
    "StdConv2dSame": DecoupledStdConv2d,
    "ScaledStdConv2d": DecoupledStdConv2d,
    "ScaledStdConv2dSame": DecoupledStdConv2d,
}


def prepared_input(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the input that a layer's kernels slide over, without the padding of `layer.padding`.

    This is x itself, except in layers with SAME padding, plain or decoupled.
    """
    twin = type(layer) if isinstance(layer, Decoupled) else own_twin(type(layer))
    if twin is None or not issubclass(twin, DecoupledConv2dSame):
        return x
    return _pad_same(layer, x) if getattr(layer, "same_pad", twin.same_pad) else x


def _pad_same(layer: Any, x: Tensor) -> Tensor:
    pads: list[int] = []
    for i in (1, 0):  # F.pad takes the last dimension first
        size, step = x.shape[i - 2], layer.stride[i]
        span = (-(-size // step) - 1) * step + (layer.kernel_size[i] - 1) * layer.dilation[i] + 1
        missing = max(span - size, 0)
        pads += [missing // 2, missing - missing // 2]
    return F.pad(x, pads)


def own_twin(kind: type[nn.Module]) -> type[Decoupled] | None:
    """Return the decoupled twin of a timm class with its own, known arithmetic; None for other classes."""
    return _TIMM.get(kind.__name__) if kind.__module__.partition(".")[0] == "timm" else None
