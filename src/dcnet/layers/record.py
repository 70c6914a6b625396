"""What has been converted, written down."""

from typing import Any

from torch import nn

from dcnet.layers.decoupled import decoupled_layers

_OPTIONS = ("magnitude", "angular", "weighting", "radius", "eps", "momentum", "sync", "impl")


def conversion_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the options of every decoupled layer of a model by its name, as JSON can hold them."""
    return {
        name: {option: getattr(layer, option) for option in _OPTIONS} for name, layer in decoupled_layers(model).items()
    }


def record_(model: nn.Module) -> None:
    """Write the conversion into the configuration of a model of transformers, which is saved with its weights; other models have none."""
    config = getattr(model, "config", None)
    if config is not None and all(callable(getattr(config, method, None)) for method in ("to_dict", "save_pretrained")):
        config.dcnet = conversion_of(model)
