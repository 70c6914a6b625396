"""Treat kernels of ordinary layers like those of decoupled ones.

This separates the effect of the operator from that of normalized kernels.
"""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from dcnet.layers import Block, Decoupled, WeightProjection, project_kernels_
from dcnet.models.resnet import Unit


def ordinary_layers(model: nn.Module) -> list[nn.Module]:
    """Return the ordinary convolutions and fully connected layers before the classifier, without shortcuts."""
    shortcuts = {module for unit in model.modules() if isinstance(unit, Unit) for module in unit.shortcut.modules()}
    blocks = [module for module in model.modules() if isinstance(module, Block) and module not in shortcuts]
    return [block.conv for block in blocks if not isinstance(block.conv, Decoupled)]


def normalize_ordinary_(model: nn.Module) -> nn.Module:
    """Give ordinary layers weight normalization, w = g·v/‖v‖ (Salimans and Kingma, 2016)."""
    for layer in ordinary_layers(model):
        weight_norm(layer)
    return model


class OrdinaryProjection(WeightProjection):
    """Project the kernels of ordinary layers as well."""

    @torch.no_grad()
    def project(self) -> None:
        super().project()
        for layer in ordinary_layers(self.model):
            project_kernels_(layer.weight, self.scale)  # type: ignore[arg-type]
