"""The plain CNNs: stages of 3×3 convolutions, each followed by 2×2 max pooling, then fully connected layers."""

from torch import Tensor, nn

from dcnet.layers import Block
from dcnet.models.parts import Normalize, Parts


class CNN(nn.Module):
    """`depth` convolutions for each of the `widths`, pooling after each stage, a penultimate layer, a classifier."""

    def __init__(
        self,
        parts: Parts,
        normalize: Normalize,
        widths: tuple[int, ...],
        depth: int,
        features: int,
        num_classes: int,
        in_channels: int,
        input_size: int,
        head: str,
        penultimate_activation: bool,
    ) -> None:
        super().__init__()
        smallest = 2 ** len(widths)
        if input_size < smallest:
            raise ValueError(f"input_size={input_size} is too small for {len(widths)} poolings; possible: {smallest} and up")
        self.normalize = normalize
        stages: list[nn.Module] = []
        channels = in_channels
        for width in widths:
            for _ in range(depth):
                stages.append(parts.block(channels, width))
                channels = width
            stages.append(nn.MaxPool2d(2))
            input_size //= 2
        self.stages = nn.Sequential(*stages)
        flat = channels * input_size**2
        self.penultimate = Block(parts.linear(flat, features), parts.batch_norm(features, 1), parts.activation if penultimate_activation else None)
        self.head = parts.head(features, num_classes, head)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes) for images (N, C, H, W) in [0, 1]."""
        return self.head(self.penultimate(self.stages(self.normalize(x)).flatten(1)))
