"""Records of conversions."""

from typing import Any

from torch import nn

from dcnet.layers.decoupled import decoupled_layers

_OPTIONS = ("magnitude", "angular", "weighting", "radius", "eps", "momentum", "sync", "impl")


def conversion_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the options of every decoupled layer of a model by its name, in a form that JSON can store.

    Keep it beside the weights; with it, `restore_conversion_` converts the plain model.

    Args:
        model: any model with decoupled layers.

    Examples:
        >>> import dcnet
        >>> from torch import nn
        >>> record = dcnet.conversion_of(nn.Sequential(dcnet.DecoupledConv2d(3, 8, 3, magnitude="ball")))
        >>> record["0"]["magnitude"]
        'ball'
    """
    return {
        name: {option: getattr(layer, option) for option in _OPTIONS} for name, layer in decoupled_layers(model).items()
    }


def record_(model: nn.Module) -> None:
    """Write the conversion into the configuration of a transformers model, which is saved with its weights.

    Other models stay unchanged.
    """
    config = getattr(model, "config", None)
    if config is not None and all(callable(getattr(config, method, None)) for method in ("to_dict", "save_pretrained")):
        config.dcnet = conversion_of(model)
