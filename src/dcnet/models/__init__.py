"""Models: the paper's networks by name, each with its plain twin."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from torch import nn

from dcnet.layers.options import OtherOptions
from dcnet.models.cnn import CNN
from dcnet.models.external import (
    check_logits,
    create_external,
    error_of_own_code,
    is_external,
    is_own,
    trust_model,
)
from dcnet.models.parts import LAYER_OPTIONS, Normalize, Parts
from dcnet.models.resnet import ResNet, Root, Stage, gaussian_in_units_
from dcnet.util.suggest import nearest

DEFAULT = "default"


def _cnn(widths: tuple[int, ...], depth: int, *features: int) -> Callable[..., nn.Module]:
    def build(
        parts: Parts,
        normalize: Normalize,
        penultimate_activation: bool = False,
        penultimate_norm: bool = True,
        **arguments: Any,
    ) -> nn.Module:
        arguments |= {"penultimate_activation": penultimate_activation, "penultimate_norm": penultimate_norm}
        return CNN(parts, normalize, widths, depth, features, **arguments)

    return build


def _cnn6_2d(parts: Parts, normalize: Normalize, **arguments: Any) -> nn.Module:
    """Build the CNN with two features, which are the operator's own output.

    A norm or an activation behind it would hide what it does.
    """
    return CNN(
        parts, normalize, (32, 64, 128), 2, (256, 2), penultimate_activation=False, penultimate_norm=False, **arguments
    )


def _resnet(root: Root, *stages: Stage) -> Callable[..., nn.Module]:
    def build(
        parts: Parts, normalize: Normalize, root_activation: bool = root.activation, **arguments: Any
    ) -> nn.Module:
        return ResNet(parts, normalize, root._replace(activation=root_activation), stages, **arguments)

    return build


def _modified_resnet(parts: Parts, normalize: Normalize, root_activation: bool = True, **arguments: Any) -> nn.Module:
    stages = (
        Stage(128, 1, entry=True),
        Stage(256, 2, entry=True),
        Stage(512, 3, entry=True),
        Stage(1024, 0, entry=True),
    )
    return gaussian_in_units_(
        ResNet(
            parts, normalize, Root(128, 7, 2, pool=True, activation=root_activation), stages, **arguments, last=False
        )
    )


# What only some networks have, and whether a network of that name has it.
_OWN_OPTIONS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "penultimate_activation": ("penultimate layer of which that could be chosen", lambda name: name.startswith("cnn9")),
    "penultimate_norm": ("penultimate layer of which that could be chosen", lambda name: name.startswith("cnn9")),
    "root_activation": ("root convolution", lambda name: name.startswith("resnet")),
}


# with the norm and activation they have by default
_NETWORKS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "cnn9": (_cnn((64, 128, 256), 3, 512), {"norm": "batch", "activation": "relu"}),
    "cnn9_narrow": (_cnn((32, 64, 128), 3, 256), {"norm": None, "activation": "relu"}),
    "resnet32": (
        _resnet(Root(96), Stage(96, 5, 1), Stage(192, 5), Stage(384, 5)),
        {"norm": "batch", "activation": "relu"},
    ),
    "resnet18": (
        _resnet(
            Root(64, 7, 2, pool=True, activation=True), Stage(64, 2, 1), Stage(128, 2), Stage(256, 2), Stage(512, 2)
        ),
        {"norm": "batch", "activation": "relu"},
    ),
    "resnet18_modified": (_modified_resnet, {"norm": "batch", "activation": "prelu"}),
    "cnn6_2d": (_cnn6_2d, {"norm": "batch", "activation": "relu"}),
}


def list_models() -> list[str]:
    """Return the names that `create_model` knows.

    Examples:
        >>> import dcnet
        >>> "resnet32" in dcnet.list_models()
        True
    """
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
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    penultimate_activation: bool | None = None,
    penultimate_norm: bool | None = None,
    root_activation: bool | None = None,
    **layer_options: Unpack[OtherOptions],
) -> nn.Module:
    """Create one of the paper's networks by name; it maps images in [0, 1] to logits.

    Args:
        name: one of `list_models()`.
        num_classes: number of logits.
        in_channels: channels of the images.
        input_size: height and width of the images.
        magnitude: the function h of all decoupled layers, as in `DecoupledConv2d`; None builds the plain twin of the
            same structure.
        angular: the function g of all decoupled layers.
        norm: "batch" or None; by default what the network has in the paper.
        activation: "relu", "prelu" or None; by default what the network has in the paper.
        head: the classifier: "linear", or "normalized" for ⟨w, x⟩/‖w‖.
        mean: of the input, a number or one for each channel; by default 127.5/255.
        std: of the input, a number or one for each channel; by default 128/255.
        penultimate_activation: for the CNN-9s, whether the layer before the classifier has an activation; by default
            it has none.
        penultimate_norm: for the CNN-9s, whether that layer has the network's norm; by default it has.
        root_activation: for the residual networks, whether the first convolution has an activation; by default not in
            resnet32, but in the ImageNet networks.
        **layer_options: `weighting`, `radius`, `eps`, `momentum`, `sync`, `impl` of the decoupled layers.

    Returns:
        The network, in training mode, with fresh weights.

    Examples:
        >>> import torch, dcnet
        >>> model = dcnet.create_model("cnn9_narrow", magnitude="tanh", angular="cosine")
        >>> model(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    if name not in _NETWORKS:
        raise ValueError(f"unknown model {name!r}.{nearest(name, _NETWORKS)} Known: {', '.join(_NETWORKS)}")
    if unknown := [option for option in layer_options if option not in LAYER_OPTIONS]:
        known = [*list(inspect.signature(create_model).parameters)[:-1], *LAYER_OPTIONS]
        raise TypeError(
            f"create_model() has no argument {unknown[0]!r}.{nearest(unknown[0], known)} Possible: {', '.join(known)}"
        )
    own = {
        "penultimate_activation": penultimate_activation,
        "penultimate_norm": penultimate_norm,
        "root_activation": root_activation,
    }
    own = {option: value for option, value in own.items() if value is not None}
    for option, value in own.items():
        lacks, applies = _OWN_OPTIONS[option]
        if not applies(name):
            possible = ", ".join(filter(applies, _NETWORKS))
            raise ValueError(f"{option}={value!r}: {name} has no {lacks}; possible for {possible}")
    build, defaults = _NETWORKS[name]
    parts = Parts(
        magnitude,
        angular,
        defaults["norm"] if norm == DEFAULT else norm,
        defaults["activation"] if activation == DEFAULT else activation,
        layer_options,
    )
    given = {key: value for key, value in (("mean", mean), ("std", std)) if value is not None}
    arguments = {"num_classes": num_classes, "in_channels": in_channels, "input_size": input_size, "head": head}
    return build(parts, Normalize(**given), **own, **arguments)


__all__ = [
    "Normalize",
    "check_logits",
    "create_external",
    "create_model",
    "error_of_own_code",
    "is_external",
    "is_own",
    "list_models",
    "trust_model",
]
