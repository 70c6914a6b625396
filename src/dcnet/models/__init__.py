"""Models: the paper's networks by name, each with its plain twin."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from dcnet.formulas import nearest
from dcnet.models.cnn import CNN
from dcnet.models.parts import LAYER_OPTIONS, Normalize, Parts
from dcnet.models.resnet import ResNet, Root, Stage, gaussian_in_units_

DEFAULT = "default"


def _cnn(widths: tuple[int, ...], depth: int, *features: int) -> Callable[..., nn.Module]:
    def build(parts: Parts, normalize: Normalize, penultimate_activation: bool = False, **arguments: Any) -> nn.Module:
        return CNN(parts, normalize, widths, depth, features, penultimate_activation=penultimate_activation, **arguments)

    return build


def _resnet(root: Root, *stages: Stage) -> Callable[..., nn.Module]:
    def build(parts: Parts, normalize: Normalize, **arguments: Any) -> nn.Module:
        return ResNet(parts, normalize, root, stages, **arguments)

    return build


def _modified_resnet(parts: Parts, normalize: Normalize, **arguments: Any) -> nn.Module:
    stages = (Stage(128, 1, entry=True), Stage(256, 2, entry=True), Stage(512, 3, entry=True), Stage(1024, 0, entry=True))
    return gaussian_in_units_(ResNet(parts, normalize, Root(128, 7, 2, pool=True), stages, **arguments, last=False))


_NETWORKS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {  # with the norm and activation they have by default
    "cnn9": (_cnn((64, 128, 256), 3, 512), {"norm": "batch", "activation": "relu"}),
    "cnn9_narrow": (_cnn((32, 64, 128), 3, 256), {"norm": None, "activation": "relu"}),
    "resnet32": (_resnet(Root(96), Stage(96, 5, 1), Stage(192, 5), Stage(384, 5)), {"norm": "batch", "activation": "relu"}),
    "resnet18": (
        _resnet(Root(64, 7, 2, pool=True), Stage(64, 2, 1), Stage(128, 2), Stage(256, 2), Stage(512, 2)),
        {"norm": "batch", "activation": "relu"},
    ),
    "resnet18_modified": (_modified_resnet, {"norm": "batch", "activation": "prelu"}),
    "cnn6_2d": (_cnn((32, 64, 128), 2, 256, 2), {"norm": "batch", "activation": "relu"}),
}


def list_models() -> list[str]:
    """The names `create_model` knows."""
    return list(_NETWORKS)


def create_model(
    name: str,
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: int = 32,
    magnitude: str | None = "tanh",
    angular: str = "cosine",
    norm: str | None = DEFAULT,
    activation: str | None = DEFAULT,
    head: str = "linear",
    mean: Any = None,
    std: Any = None,
    penultimate_activation: bool | None = None,
    **layer_options: Any,
) -> nn.Module:
    """The network of that name, from images in [0, 1] to logits; `magnitude=None` builds the plain twin of the same structure.

    norm: "batch" or None. activation: "relu", "prelu" or None. head: "linear" or "normalized". mean, std: of the input, instead of
    (255·x − 127.5)/128. layer_options: `weighting`, `radius`, `eps`, … of the decoupled layers.
    """
    if name not in _NETWORKS:
        raise ValueError(f"unknown model {name!r}.{nearest(name, _NETWORKS)} Known: {', '.join(_NETWORKS)}")
    if unknown := [option for option in layer_options if option not in LAYER_OPTIONS]:
        known = [*list(inspect.signature(create_model).parameters)[:-1], *LAYER_OPTIONS]
        raise TypeError(f"create_model() has no argument {unknown[0]!r}.{nearest(unknown[0], known)} Possible: {', '.join(known)}")
    if penultimate_activation is not None and not name.startswith("cnn"):
        raise ValueError(f"penultimate_activation={penultimate_activation!r}: {name} has no penultimate layer; possible for the CNNs")
    build, defaults = _NETWORKS[name]
    parts = Parts(
        magnitude,
        angular,
        defaults["norm"] if norm == DEFAULT else norm,
        defaults["activation"] if activation == DEFAULT else activation,
        layer_options,
    )
    given = {key: value for key, value in (("mean", mean), ("std", std)) if value is not None}
    own = {} if penultimate_activation is None else {"penultimate_activation": penultimate_activation}
    arguments = {"num_classes": num_classes, "in_channels": in_channels, "input_size": input_size, "head": head}
    return build(parts, Normalize(**given), **own, **arguments)


__all__ = ["Normalize", "create_model", "list_models"]
