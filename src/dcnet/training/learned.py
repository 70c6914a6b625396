"""What a decoupled network has learned besides its kernels, in a few numbers per layer: radii, and k."""

import torch
from torch import Tensor, nn

from dcnet.layers import decoupled_layers

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def quantiles_of(values: Tensor) -> list[float]:
    """Return the QUANTILES of the values, with as many digits as a figure needs."""
    found = values.detach().float().flatten().quantile(torch.tensor(QUANTILES, device=values.device))
    return [float(f"{value:.5g}") for value in found.tolist()]


@torch.no_grad()
def learned_quantiles(model: nn.Module) -> dict[str, dict[str, list[float]]]:
    """Return, by parameter ("radius" without E, "k") and then by layer, the QUANTILES over its kernels.

    The result is empty if no such parameter is learned.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for name, layer in decoupled_layers(model).items():
        learned = dict(layer.learned_parameters)
        if layer.raw_radius is not None and layer.effective_radius is not None:
            learned["radius"] = layer.effective_radius
        for parameter, values in learned.items():
            found.setdefault(parameter, {})[name] = quantiles_of(values)
    return found
