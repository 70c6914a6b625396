"""The plain CNNs: stages of 3×3 convolutions, each followed by 2×2 max pooling, then fully connected layers."""

from itertools import pairwise

from torch import Tensor, nn

from dcnet.layers import Chain
from dcnet.models.parts import Normalize, Parts


class CNN(nn.Module):
    """`depth` convolutions for each of the `widths`, each stage pooled, linear layers of `features`, a classifier.

    The last fully connected layer, whose output the classifier sees, has an activation only with
    `penultimate_activation`, and the networks' norm only with `penultimate_norm`.
    """

    def __init__(
        self,
        parts: Parts,
        normalize: Normalize,
        widths: tuple[int, ...],
        depth: int,
        features: tuple[int, ...],
        num_classes: int,
        in_channels: int,
        input_size: int,
        head: str,
        penultimate_activation: bool,
        penultimate_norm: bool,
    ) -> None:
        super().__init__()
        smallest = 2 ** len(widths)
        if input_size < smallest:
            raise ValueError(
                f"input_size={input_size} is too small for {len(widths)} poolings; possible: {smallest} and up"
            )
        self.normalize = normalize
        stages: list[nn.Module] = []
        channels = in_channels
        for width in widths:
            for _ in range(depth):
                stages.append(parts.block(channels, width))
                channels = width
            stages.append(nn.MaxPool2d(2))
            input_size //= 2
        self.stages = Chain(*stages)
        layers = list(pairwise((channels * input_size**2, *features)))
        self.connected = nn.Sequential(*[parts.connected(*sizes) for sizes in layers[:-1]])
        self.penultimate = parts.connected(*layers[-1], activation=penultimate_activation, norm=penultimate_norm)
        self.head = parts.head(features[-1], num_classes, head)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, classes) for images (N, C, H, W) in [0, 1]."""
        logits: Tensor = self.head(self.features(x))
        return logits

    def features(self, x: Tensor) -> Tensor:
        """Return what the classifier sees (N, features[-1])."""
        found: Tensor = self.penultimate(self.connected(self.stages(self.normalize(x)).flatten(1)))
        return found
