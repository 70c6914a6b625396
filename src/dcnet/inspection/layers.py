"""The angles θ and norms ‖x‖ that a network's layers see, and its first kernels."""

from typing import Any

import torch
from torch import Tensor, nn

from dcnet.layers import Block, Decoupled, decoupled_layers
from dcnet.layers.own_arithmetic import prepared_input
from dcnet.ops import EPS, decoupled_conv1d, decoupled_conv2d, decoupled_conv3d, decoupled_linear, patch_norm
from dcnet.training.learned import quantiles_of

BINS = 60
FARTHEST = 3.0  # the largest ‖x‖ with a bin of its own, in units of E{‖x‖}; the last bin has all beyond
_CONVOLUTIONS = {1: decoupled_conv1d, 2: decoupled_conv2d, 3: decoupled_conv3d}


def layers_of(model: nn.Module) -> dict[str, Any]:
    """Return the decoupled layers by name; in a plain network those that its twin decouples."""
    decoupled = decoupled_layers(model)
    if decoupled:
        return dict(decoupled)
    blocks = {
        name: block for name, block in model.named_modules() if isinstance(block, Block) and "shortcut" not in name
    }
    found: dict[str, Any] = {f"{name}.conv": block.conv for name, block in blocks.items()}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has neither decoupled layers nor blocks of dcnet's networks; there is "
            "nothing to inspect"
        )
    return found


@torch.no_grad()
def layer_statistics(model: nn.Module, images: Tensor) -> list[dict[str, Any]]:
    """Return statistics of every layer, in the order they run.

    Counts of θ over [0, π] and of ‖x‖/E over [0, FARTHEST], E{‖x‖}, and radii in units of it.

    Args:
        model: a network with decoupled layers, or a plain one of `create_model`; in evaluation mode.
        images: what it is called with.

    Returns:
        A dict for each call of a layer: its name, the counts, means, and quantiles of the radii where it has some.

    Examples:
        >>> import torch, dcnet
        >>> model = dcnet.create_model("cnn9_narrow", in_channels=1, input_size=8).eval()
        >>> first, *_ = dcnet.inspection.layer_statistics(model, torch.rand(4, 1, 8, 8))
        >>> sum(first["theta"]) == 4 * 32 * 8 * 8  # an angle for each image, kernel and place
        True
    """
    found: list[dict[str, Any]] = []

    def look(name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found.append({"name": name, **_statistics(layer, inputs[0])})

        return hook

    handles = [layer.register_forward_pre_hook(look(name)) for name, layer in layers_of(model).items()]
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _statistics(layer: Any, x: Tensor) -> dict[str, Any]:
    eps = layer.eps if isinstance(layer, Decoupled) else EPS
    weight = layer.effective_weight if isinstance(layer, Decoupled) else layer.weight
    if isinstance(layer, nn.Linear):
        norms = (x.float().square().sum(-1) + eps).sqrt()
        # SphereConv with the cosine is cos θ itself
        cosines = decoupled_linear(x, weight, magnitude="sphere", angular="cosine", eps=eps)
    else:
        x = prepared_input(layer, x)
        place = {"padding_mode": layer.padding_mode, "eps": eps}
        where = (layer.stride, layer.padding, layer.dilation, layer.groups)
        norms = patch_norm(x, layer.kernel_size, *where, **place)
        cosines = _CONVOLUTIONS[x.dim() - 2](x, weight, None, *where, **place, magnitude="sphere", angular="cosine")
    mean = norms.mean()
    theta = cosines.float().clamp(-1.0, 1.0).acos()
    relative = (norms / mean).clamp(max=FARTHEST)
    statistics: dict[str, Any] = {
        "theta": _counts(theta, torch.pi),
        "norm": _counts(relative, FARTHEST),
        "mean_norm": float(f"{float(mean):.6g}"),
        "theta_mean": float(f"{float(theta.mean()):.6g}"),
        "theta_deviation": float(f"{float(theta.std()):.6g}"),
    }
    radius = layer.effective_radius if isinstance(layer, Decoupled) else None
    if radius is not None:
        unit = layer.running_norm.mean() if layer.raw_radius is not None else 1.0
        statistics["radius"] = quantiles_of(radius * unit / mean)
    return statistics


def _counts(values: Tensor, high: float) -> list[int]:
    return [int(count) for count in torch.histc(values.float().cpu(), BINS, 0.0, high).tolist()]


def filters_of(model: nn.Module) -> dict[str, Any]:
    """Return the name of the first convolution, and its kernels (kernels, channels, height, width).

    Args:
        model: a network with decoupled layers, or a plain one of `create_model`.
    """
    for name, layer in layers_of(model).items():
        if isinstance(layer, nn.Conv2d):
            return {
                "name": name,
                "values": [
                    [[[float(f"{v:.4g}") for v in row] for row in plane] for plane in k] for k in layer.weight.tolist()
                ],
            }
    raise ValueError(f"{type(model).__name__} has no two-dimensional convolution")
