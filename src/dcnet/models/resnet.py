"""Residual networks: a root convolution, stages of two-convolution units, average pooling."""

from torch import Tensor, nn

from dcnet.models.parts import Normalize, Parts


class Unit(nn.Module):
    """conv, norm, act, conv, norm, add, act; a 1×1 convolution and norm on the shortcut where the shape changes."""

    def __init__(self, parts: Parts, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = parts.block(inputs, outputs, stride=stride)
        self.second = parts.block(outputs, outputs)
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else parts.shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x), self.shortcut(x))


class ResNet(nn.Module):
    """[root], then `depth` units for each of the `widths`, stride 2 between stages."""

    def __init__(
        self, parts: Parts, normalize: Normalize, widths: tuple[int, ...], depth: int, num_classes: int, in_channels: int, input_size: int, head: str
    ) -> None:
        super().__init__()
        if input_size < 8:
            raise ValueError(f"input_size={input_size} is too small; possible: 8 and up")
        self.normalize = normalize
        self.root = parts.block(in_channels, widths[0], activation=False)
        units: list[nn.Module] = []
        channels = widths[0]
        for stage, width in enumerate(widths):
            for i in range(depth):
                units.append(Unit(parts, channels, width, stride=2 if stage > 0 and i == 0 else 1))
                channels = width
        self.units = nn.Sequential(*units)
        self.head = parts.head(channels, num_classes, head)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes) for images (N, C, H, W) in [0, 1]."""
        return self.head(self.units(self.root(self.normalize(x))).mean((2, 3)))
