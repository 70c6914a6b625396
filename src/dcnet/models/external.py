"""Networks of other libraries and of your own, by name.

Names are such as timm:resnet50, torchvision:resnet18 and my_package.my_module:my_network.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from dcnet.models.parts import Normalize
from dcnet.models.trusted import call, described, place_of
from dcnet.util.suggest import nearest

HUB = "hub:"  # the prefix of trained networks, which `dcnet.load` knows
TRUSTED = "DCNET_TRUST_MODELS"  # an environment variable: names of networks of one's own, with commas between them
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_trusted: set[str] = set()


class External(nn.Module):
    """A network of another library that maps images in [0, 1] to logits.

    Images are normalized as those it was trained on; gray images are repeated in its three channels.
    """

    def __init__(self, net: nn.Module, channels: int, normalize: Normalize) -> None:
        super().__init__()
        self.normalize, self.net, self.channels = normalize, net, channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, classes) of images (N, C, H, W) in [0, 1]."""
        return self.net(self.normalize(_with_channels(x, self.channels)))  # type: ignore[no-any-return]


@fx.wrap  # torch.fx cannot follow a question about a shape, and `fuse_` would find nothing in such a network
def _with_channels(x: Tensor, channels: int) -> Tensor:
    return x.expand(-1, channels, -1, -1) if x.shape[1] == 1 else x


def is_external(name: str) -> bool:
    """Tell whether a model's name is that of another library's network, or of your own."""
    return ":" in name


def is_own(name: str) -> bool:
    """Tell whether a model's name is that of your own code, MODULE:CALLABLE, which may load weights itself."""
    return is_external(name) and not name.startswith(("timm:", "torchvision:", HUB))


def trust_model(name: str) -> None:
    """Allow a network of your own, module:callable, to be imported and called when a run folder or a file names it.

    Without this, nothing that a run folder names is executed. The environment variable DCNET_TRUST_MODELS does the same
    for commands.

    Args:
        name: as recipes have it, such as "my_package.my_module:my_network".

    Examples:
        >>> import dcnet
        >>> dcnet.trust_model("my_package.my_module:my_network")
    """
    library, separator, made_by = name.partition(":")
    if not separator or not library or not made_by:
        raise ValueError(
            f"{name!r} is not the name of a network of one's own; possible: my_package.my_module:my_network"
        )
    _trusted.add(name)


def create_external(
    name: str, num_classes: int, in_channels: int, input_size: int, pretrained: bool = False
) -> nn.Module:
    """Return the plain network of that name, for images in [0, 1].

    pretrained: download the weights that its library has for it. A network of your own is called with those of
    num_classes, in_channels and input_size that it takes.
    """
    library, _, own = name.partition(":")
    if library == "timm":
        return _of_timm(own, num_classes, in_channels, pretrained)
    if library == "torchvision":
        return _of_torchvision(own, num_classes, in_channels, pretrained)
    if name.startswith(HUB):
        raise ValueError(
            f"{name} is a trained network, not one to build; possible: dcnet finetune {name}, dcnet.load({name!r})"
        )
    if pretrained:
        raise ValueError(
            f"{name}: there is no library to ask for weights; possible: a file, or weights that {own} itself loads"
        )
    return _of_ones_own(name, {"num_classes": num_classes, "in_channels": in_channels, "input_size": input_size})


def _of_timm(name: str, classes: int, channels: int, pretrained: bool) -> nn.Module:
    timm: Any = _library("timm")
    base = name.partition(".")[0]
    if not timm.is_model(base):
        raise ValueError(
            f"timm has no network {name!r}.{nearest(base, timm.list_models())} timm.list_models() has their names"
        )
    channels = 3 if channels == 1 else channels  # gray images get three channels, so that its trained weights fit
    with _named(f"timm:{name}", pretrained):
        net = timm.create_model(name, pretrained=pretrained, num_classes=classes, in_chans=channels)
    trained = getattr(net, "pretrained_cfg", None) or {}
    known = {key: trained[key] for key in ("mean", "std") if trained.get(key) and len(trained[key]) == channels}
    return External(net, channels, Normalize(**known) if len(known) == 2 else Normalize())


def _of_torchvision(name: str, classes: int, channels: int, pretrained: bool) -> nn.Module:
    models: Any = _library("torchvision.models")
    if name not in models.list_models():
        raise ValueError(
            f"torchvision has no network {name!r}.{nearest(name, models.list_models())} "
            "torchvision.models.list_models() has their names"
        )
    if channels not in (1, 3):
        raise ValueError(f"torchvision:{name} takes images in gray or in color; these have {channels} channels")
    with _named(f"torchvision:{name}", pretrained):
        net = models.get_model(name, num_classes=classes)
        if pretrained:
            # all but the classifier, which has as many classes as ImageNet
            known = models.get_model_weights(name).DEFAULT.get_state_dict(
                progress=False, check_hash=True, weights_only=True
            )
            here = net.state_dict()
            net.load_state_dict({k: v if v.shape == here[k].shape else here[k] for k, v in known.items() if k in here})
    return External(net, 3, Normalize(**_IMAGENET))


def _own_names() -> set[str]:
    """Return the names of networks of one's own that may be imported and called."""
    return _trusted | {entry.strip() for entry in os.environ.get(TRUSTED, "").split(",") if entry.strip()}


def error_of_own_code(error: BaseException) -> str | None:
    """Return an error in one line, with file and line, where it comes out of the code of a network of one's own."""
    names = _own_names()
    return described(error, *names) if place_of(error, names) else None


def _of_ones_own(name: str, shape: dict[str, int]) -> nn.Module:
    if name not in _own_names():
        raise ValueError(
            f"the network {name} is code of your own, which is imported and called only when you say so: "
            f"dcnet.trust_model({name!r}) in Python, {TRUSTED}={name} in the environment of a command"
        )
    where, _, made_by = name.partition(":")
    try:
        make: Any = importlib.import_module(where)
        for part in made_by.split("."):
            make = getattr(make, part)
    except Exception as error:  # whatever a user's file may raise
        known = isinstance(error, ImportError | AttributeError)
        words = f"{error}{place_of(error, [name])}" if known else described(error, name)
        hint = "; PYTHONPATH=. finds modules of the current folder" if isinstance(error, ModuleNotFoundError) else ""
        raise ValueError(f"the network {name} cannot be imported: {words}{hint}") from error
    if not isinstance(make, Callable):  # type: ignore[arg-type]
        raise ValueError(f"{name} is a {type(make).__name__}; a function or class that makes the network is needed")
    model = call(name, make, shape)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} makes a {type(model).__name__}; an nn.Module is needed")
    return model


def _library(name: str) -> Any:
    top = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{top}'s networks need {top}: pip install {top} ({error})") from error


class _named:
    """An error of a library, whatever its kind, with the name of the network and what else is possible."""

    def __init__(self, name: str, pretrained: bool) -> None:
        self.name, self.pretrained = name, pretrained

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            hint = "; give its weights as a file: --weights model.safetensors" if self.pretrained else ""
            raise ValueError(f"{self.name} cannot be made: {type(error).__name__}: {error}{hint}") from error


@torch.no_grad()
def check_logits(model: nn.Module, name: str, images: Tensor, classes: int) -> None:
    """Raise unless the network gives a number for each class; in evaluation mode, its mode is restored."""
    modes = {module: module.training for module in model.modules()}
    try:
        logits = model.eval()(images)
    except Exception as error:  # whatever a user's code may raise
        shape, own = tuple(images.shape[1:]), [name] if is_own(name) else []
        if isinstance(error, RuntimeError | ValueError | TypeError | AssertionError):
            words = f"{error}{place_of(error, own)}"
            raise ValueError(f"{name} does not take images of shape {shape}: {words}") from error
        raise ValueError(f"{name} fails on images of shape {shape}: {described(error, *own)}") from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    given = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if given != (len(images), classes):
        raise ValueError(
            f"{name} gives {given} for {len(images)} images; logits of shape {(len(images), classes)} are needed"
        )
