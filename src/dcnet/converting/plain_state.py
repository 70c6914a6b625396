"""The way back: a decoupled model's state for the plain network."""

from torch import Tensor, nn

from dcnet.layers.decoupled import decoupled_layers


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a model without what only decoupled layers have (radii, k, E{‖x‖}).

    It loads into the plain network, strictly. The kernels are not normalized, so the plain network does not compute the
    same function; it is a start for training.

    Args:
        model: any model with decoupled layers.

    Examples:
        >>> import dcnet
        >>> from torch import nn
        >>> nn.Conv2d(3, 8, 3, bias=False).load_state_dict(dcnet.plain_state_dict(dcnet.DecoupledConv2d(3, 8, 3)))
        <All keys matched successfully>
    """
    own: dict[nn.Module, list[str]] = {layer: layer._extras() for layer in decoupled_layers(model).values()}
    # the state has a layer under every name by which it is registered
    named = model.named_modules(remove_duplicate=False)
    extras = {f"{name}." * bool(name) + extra for name, module in named for extra in own.get(module, ())}
    return {key: tensor for key, tensor in model.state_dict().items() if key not in extras}
