"""What is measured: layers as they occur in our networks, and whole networks, by each provider."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from dcnet.formulas import magnitudes
from dcnet.layers import DecoupledConv2d
from dcnet.models import create_model

HOW = ("", "compiled", "reduce-overhead")  # eager, torch.compile, and torch.compile with that mode: CUDA graphs
# One layer on a CPU: the usual operator, costlier angles, and the cheapest.
_ON_A_CPU = ("tanh + cosine", "tanh + linear", "seg + square_cosine", "tanh + sigmoid:k=learned", "linear + cosine")


def operators() -> tuple[str, ...]:
    """Return every magnitude with cosine, registered ones included, and three operators with costlier angles."""
    return (
        *(f"{magnitude} + cosine" for magnitude in magnitudes()),
        *("tanh + linear", "seg + square_cosine", "tanh + sigmoid"),
    )


@dataclass(frozen=True)
class Case:
    """One measurement."""

    what: str  # "layer", "network" or "model" (of another library)
    name: str  # the shape of a layer, or the name of a network or model
    mode: str  # "forward", "forward + backward", "training step", "inference"
    batch: int
    dtype: str  # "bfloat16" (autocast) or "float32"
    layout: str  # "channels_last" or "contiguous"
    operator: str  # "magnitude + angular"
    provider: str  # "plain", "straightforward" or "ours", followed by one of HOW

    @property
    def how(self) -> str:
        """Which of HOW."""
        return self.provider.partition(" ")[2].removeprefix("unfused")

    @property
    def title(self) -> str:
        """One line that tells it from all others."""
        setting = f"{self.name}, {self.mode}, batch {self.batch}, {self.dtype}, {self.layout}"
        return f"{setting}, {self.provider}{f' {self.operator}' if self.operator else ''}"

    @property
    def plain(self) -> "Case":
        """The plain twin, compiled as this is."""
        return replace(self, operator="", provider=f"plain {self.how}".strip())


@dataclass(frozen=True)
class Shape:
    """A 3×3 convolution as it occurs in a network."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    size: int

    def __str__(self) -> str:
        return f"{self.inputs}→{self.outputs}, {self.kernel}×{self.kernel}/{self.stride}, {self.size}×{self.size}"

    @staticmethod
    def parse(text: str) -> "Shape":
        channels, window, size = text.split(", ")
        inputs, outputs = channels.split("→")
        kernel, stride = window.split("/")
        return Shape(int(inputs), int(outputs), int(kernel.split("×")[0]), int(stride), int(size.split("×")[0]))


def shapes_of(network: str, size: int = 32) -> list[Shape]:
    """Return the decoupled convolutions of a network on square images, each shape once, the commonest first."""
    seen: dict[Shape, int] = {}

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> None:
        assert isinstance(module, DecoupledConv2d)
        shape = Shape(
            module.in_channels, module.out_channels, module.kernel_size[0], module.stride[0], inputs[0].shape[-1]
        )
        seen[shape] = seen.get(shape, 0) + 1

    model = create_model(network, input_size=size).eval()
    hooks = [module.register_forward_hook(note) for module in model.modules() if isinstance(module, DecoupledConv2d)]
    with torch.no_grad():
        model(torch.zeros(1, 3, size, size))
    for hook in hooks:
        hook.remove()
    return sorted(seen, key=lambda shape: -seen[shape])


def cases(cuda: bool, what: str = "all", quick: bool = False) -> Iterator[Case]:
    """Return what `dcnet bench` measures on such a device, plain twins first."""
    if what in ("all", "networks"):
        yield from _networks(cuda, quick)
    if what in ("all", "layers"):
        yield from _layers(cuda, quick)


def _with_plain(case: Case, providers: tuple[str, ...], operators: tuple[str, ...]) -> Iterator[Case]:
    for how in HOW:
        if any(replace(case, provider=provider).how == how for provider in providers):
            yield replace(case, operator="", provider=f"plain {how}".strip())
    for provider in providers:
        for operator in operators:
            yield replace(case, operator=operator, provider=provider)


# The models of the table in benchmarks/NOTES.md, with the batches people train them with
MODELS = {
    "timm:resnet50@224": 128,
    "timm:resnet18@224": 128,
    "timm:convnext_tiny@224": 64,
    "timm:mobilenetv3_large_100@224": 128,
    "timm:efficientnet_b0@224": 64,
}


def model_cases(names: Sequence[str], batch: int | None, operator: str, cuda: bool) -> Iterator[Case]:
    """Return cases for models of other libraries: NAME@SIZE, where the size of images is 224 without it.

    Converted as `decouple_` does it, with BatchNorm and activation fused, and without; eager, and compiled on a GPU.
    """
    if operator.count(" + ") != 1:
        raise ValueError(f"operator {operator!r} must be MAGNITUDE + ANGULAR, as in tanh + cosine")
    dtype, layout = ("bfloat16", "channels_last") if cuda else ("float32", "contiguous")
    providers = ("ours", "ours unfused", "ours compiled") if cuda else ("ours", "ours unfused")
    for name in names or list(MODELS):
        full = name if "@" in name else f"{name}@224"
        if not full.partition("@")[2].isdecimal():
            raise ValueError(f"model {name!r}: the size after @ must be a whole number, as in timm:resnet50@224")
        step = Case("model", full, "training step", batch or MODELS.get(full, 64 if cuda else 4), dtype, layout, "", "")
        yield from _with_plain(step, providers, (operator,))


EVERY = ("ours", "ours compiled", "straightforward", "straightforward compiled")


def _networks(cuda: bool, quick: bool) -> Iterator[Case]:
    if not cuda:
        step = Case("network", "cnn9_narrow", "training step", 64, "float32", "contiguous", "", "")
        yield from _with_plain(step, ("ours",), ("tanh + cosine", "tanh + linear"))
        if not quick:
            yield from _with_plain(step, ("ours compiled",), ("tanh + cosine",))
        return
    step = Case("network", "resnet32", "training step", 512, "bfloat16", "channels_last", "", "")
    yield from _with_plain(step, ("ours",), operators())
    yield from _with_plain(replace(step, mode="inference"), ("ours",), ("tanh + cosine",))
    yield from _with_plain(step, ("ours compiled", "ours reduce-overhead"), ("tanh + cosine",))
    yield from _with_plain(replace(step, mode="inference"), ("ours compiled",), ("tanh + cosine",))
    if quick:
        return
    yield from _with_plain(step, ("straightforward", "straightforward compiled"), ("tanh + cosine",))
    for network in ("resnet32", "cnn9"):
        for batch in (128, 512):
            for dtype in ("bfloat16", "float32"):
                yield from _with_plain(replace(step, name=network, batch=batch, dtype=dtype), EVERY, ("tanh + cosine",))


def _layers(cuda: bool, quick: bool) -> Iterator[Case]:
    two = ("tanh + cosine", "tanh + linear")
    if cuda:
        for case in _both_ways(shapes_of("resnet32")[: 3 if quick else None], 512, "bfloat16", "channels_last"):
            yield from _with_plain(case, ("ours", "straightforward"), two)
        return
    for layout in ("contiguous", "channels_last"):
        wide = Case("layer", str(Shape(64, 64, 3, 1, 32)), "forward + backward", 32, "float32", layout, "", "")
        yield from _with_plain(wide, ("ours",), _ON_A_CPU)
    for case in _both_ways(shapes_of("cnn9_narrow")[:3], 16, "float32", "contiguous"):
        yield from _with_plain(case, ("ours",), two)


def _both_ways(shapes: list[Shape], batch: int, dtype: str, layout: str) -> Iterator[Case]:
    for shape in shapes:
        for mode in ("forward", "forward + backward"):
            yield Case("layer", str(shape), mode, batch, dtype, layout, "", "")
