"""Residual networks: a root convolution, stages of two-convolution units, average pooling."""

from typing import NamedTuple

from torch import Tensor, nn

from dcnet.layers import Chain, HandsOn, hand_on
from dcnet.models.parts import Normalize, Parts


class Root(NamedTuple):
    """The first convolution, and whether an activation and 3×3 max pooling of stride 2 follow."""

    width: int
    kernel: int = 3
    stride: int = 1
    pool: bool = False
    activation: bool = False


class Stage(NamedTuple):
    """Units of one width. The stride is the first unit's, or that of an `entry` convolution before the units."""

    width: int
    units: int
    stride: int = 2
    entry: bool = False


class Unit(HandsOn):
    """conv, norm, act, conv, norm, add, and act if `last`.

    A 1×1 convolution and norm are on the shortcut where the shape changes.
    """

    def __init__(self, parts: Parts, inputs: int, outputs: int, stride: int, last: bool = True) -> None:
        super().__init__()
        self.first = parts.block(inputs, outputs, stride=stride)
        self.second = parts.block(outputs, outputs, activation=last)
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else parts.shortcut(inputs, outputs, stride)

    def with_energy(self, x: Tensor, energy: Tensor | None, leave: bool) -> tuple[Tensor, Tensor | None]:
        y, of_y = hand_on(self.first, x, energy, True)
        return hand_on(self.second, y, of_y, leave, self.shortcut(x))


class ResNet(nn.Module):
    """[root], then the stages; `last`: whether an activation follows the additions."""

    def __init__(
        self,
        parts: Parts,
        normalize: Normalize,
        root: Root,
        stages: tuple[Stage, ...],
        num_classes: int,
        in_channels: int,
        input_size: int,
        head: str,
        last: bool = True,
    ) -> None:
        super().__init__()
        if input_size < 8:
            raise ValueError(f"input_size={input_size} is too small; possible: 8 and up")
        self.normalize = normalize
        self.root = parts.block(in_channels, root.width, root.kernel, root.stride, activation=root.activation)
        self.pool = nn.MaxPool2d(3, 2, 1) if root.pool else nn.Identity()
        units: list[nn.Module] = []
        channels = root.width
        for stage in stages:
            stride = stage.stride
            if stage.entry:
                units.append(parts.block(channels, stage.width, stride=stride))
                channels, stride = stage.width, 1
            for _ in range(stage.units):
                units.append(Unit(parts, channels, stage.width, stride, last))
                channels, stride = stage.width, 1
        self.units = Chain(*units)
        self.head = parts.head(channels, num_classes, head)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, classes) for images (N, C, H, W) in [0, 1]."""
        logits: Tensor = self.head(self.units(self.pool(self.root(self.normalize(x)))).mean((2, 3)))
        return logits


def gaussian_in_units_(model: ResNet) -> ResNet:
    """Draw new weights for the model's convolutions and classifier, and return it.

    Gaussian with deviation 0.01 inside units, Xavier's elsewhere.
    """
    inside = {module for unit in model.modules() if isinstance(unit, Unit) for module in unit.modules()}
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            if module in inside:
                nn.init.normal_(module.weight, std=0.01)
            else:
                nn.init.xavier_uniform_(module.weight)
    return model
