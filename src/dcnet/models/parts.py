"""What the networks are made of: one place that decides between decoupled and plain layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.layers import Block, DecoupledConv2d, DecoupledLinear, LayerOptions
from dcnet.layers.options import OtherOptions

# of decoupled layers, which a network has alike in all of them
LAYER_OPTIONS = [field.name for field in fields(LayerOptions) if field.name not in ("magnitude", "angular")]
BATCH_NORM_EPS = 1e-3  # as in the authors' code


class Normalize(nn.Module):
    """Normalize images: (x − mean)/std.

    It is part of the network, so that attacks and their ε are in units of pixels, which go from 0 to 1.

    Args:
        mean: a number, or one for each channel.
        std: a number > 0, or one for each channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, mean: float | Sequence[float] | Tensor = 127.5 / 255, std: float | Sequence[float] | Tensor = 128 / 255
    ) -> None:
        super().__init__()
        for name, value in (("mean", mean), ("std", std)):
            tensor = torch.as_tensor(value, dtype=torch.float32).reshape(-1, 1, 1)
            if name == "std" and not bool((tensor > 0).all()):
                raise ValueError(f"std must be positive, got {value!r}")
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (x − mean)/std."""
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """Show mean and std."""
        mean, std = (", ".join(f"{value:.4g}" for value in t.flatten().tolist()) for t in (self.mean, self.std))
        return f"(x - mean) / std, mean=({mean}), std=({std})"


@dataclass(frozen=True)
class Parts:
    """Makes the layers of one network; `magnitude=None` makes the plain twin of the same structure."""

    magnitude: str | None = "tanh"
    angular: str = "cosine"
    norm: str | None = "batch"
    activation: str | None = "relu"
    options: OtherOptions = field(default_factory=OtherOptions)  # of the decoupled layers: weighting, radius, …

    def __post_init__(self) -> None:
        if self.norm not in ("batch", None):
            raise ValueError(f"unknown norm {self.norm!r}; possible: 'batch', None")
        if self.magnitude is None and self.options:
            raise ValueError(
                f"{', '.join(self.options)}: options of decoupled layers, but magnitude=None builds a plain network"
            )

    def conv(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
        geometry: dict[str, Any] = {"stride": stride, "padding": kernel // 2, "bias": False}
        if self.magnitude is None:
            layer = nn.Conv2d(inputs, outputs, kernel, **geometry)
        else:
            layer = DecoupledConv2d(
                inputs, outputs, kernel, **geometry, magnitude=self.magnitude, angular=self.angular, **self.options
            )
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        return layer

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        """Return a fully connected layer before the classifier, decoupled like the convolutions."""
        if self.magnitude is None:
            layer = nn.Linear(inputs, outputs, bias=False)
        else:
            layer = DecoupledLinear(inputs, outputs, magnitude=self.magnitude, angular=self.angular, **self.options)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        return layer

    def batch_norm(self, channels: int, dims: int = 2) -> nn.Module | None:
        if self.norm is None:
            return None
        return (nn.BatchNorm2d if dims == 2 else nn.BatchNorm1d)(channels, eps=BATCH_NORM_EPS)

    def block(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, activation: bool = True) -> Block:
        """Return a convolution with its norm and activation."""
        return Block(
            self.conv(inputs, outputs, kernel, stride),
            self.batch_norm(outputs),
            self.activation if activation else None,
        )

    def connected(self, inputs: int, outputs: int, activation: bool = True, norm: bool = True) -> Block:
        """Return a fully connected layer with its norm and activation."""
        return Block(
            self.linear(inputs, outputs),
            self.batch_norm(outputs, 1) if norm else None,
            self.activation if activation else None,
        )

    def shortcut(self, inputs: int, outputs: int, stride: int) -> nn.Module:
        """Return an ordinary 1×1 convolution and norm where the shape changes."""
        conv = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        return Block(conv, self.batch_norm(outputs), None)

    def head(self, features: int, classes: int, kind: str = "linear") -> nn.Linear:
        """Return the classifier: ordinary, or weight-normalized (`"normalized"`)."""
        if kind not in ("linear", "normalized"):
            raise ValueError(f"unknown head {kind!r}; possible: 'linear', 'normalized'")
        if kind == "normalized":
            normalized = DecoupledLinear(features, classes, magnitude="linear", angular="cosine")
            normalized.constrained = False  # a classifier is neither projected nor made orthogonal
            layer: nn.Linear = normalized
        else:
            layer = nn.Linear(features, classes)
            nn.init.zeros_(layer.bias)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        return layer
