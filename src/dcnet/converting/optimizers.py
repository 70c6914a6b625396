"""Add the new parameters of converted layers to an existing optimizer."""

from typing import Any

import torch
from torch import nn

from dcnet.layers.decoupled import Decoupled


def check_optimizer(optimizer: object) -> None:
    """Raise unless parameters can be added to this optimizer, or it is None."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("optimizer is LBFGS, which takes one group of parameters; convert first, then make it")


def groups_for(optimizer: torch.optim.Optimizer | None, layers: dict[str, nn.Module]) -> "Groups | None":
    """Return the groups of the optimizer that hold the parameters of these layers.

    Raise if there are none, or if the optimizer has a schedule already.
    """
    if optimizer is None:
        return None
    owner = {p: group for group in optimizer.param_groups for p in group["params"]}
    found = {
        layer: owner[own[0]] for layer in layers.values() if (own := [p for p in layer.parameters() if p in owner])
    }
    if layers and not found:
        raise ValueError(
            f"optimizer has no parameter of any of the {len(layers)} layers to convert: was it made for this model?"
        )
    if any("initial_lr" in group for group in found.values()):
        raise ValueError(
            "optimizer has a learning-rate schedule already, which knows the number of its groups; convert "
            "first, then make the schedule",
        )
    return Groups(optimizer, found)


class Groups:
    """The group of every layer in an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, of: dict[nn.Module, dict[str, Any]]) -> None:
        self._optimizer, self._of = optimizer, of

    def __contains__(self, layer: nn.Module) -> bool:
        return layer in self._of

    def add(self, new: dict[nn.Module, dict[str, nn.Parameter]]) -> None:
        """Add the new parameters in groups without weight decay, otherwise like the groups of their layers.

        new: the new parameters of each layer, by their names in the model, which some optimizers store.
        """
        for group in list(self._optimizer.param_groups):
            added = [pair for layer, named in new.items() if self._of.get(layer) is group for pair in named.items()]
            if added:
                like = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                decay = {"weight_decay": 0.0} if "weight_decay" in like else {}
                params = added if "param_names" in group else [parameter for _, parameter in added]
                self._optimizer.add_param_group(like | decay | {"params": params})

    def decays(self, layer: nn.Module) -> bool:
        """Tell whether the kernels of a layer are subject to weight decay although their length means nothing."""
        return (
            isinstance(layer, Decoupled)
            and layer.weighting is None
            and bool(self._of.get(layer, {}).get("weight_decay"))
        )
