"""The optimizer of a recipe: which parameters decay, and its state by name."""

from typing import Any

import torch
from torch import Tensor, nn

from dcnet.layers import Block, parameter_groups
from dcnet.models.resnet import Unit
from dcnet.training.plain_kernels import ordinary_layers
from dcnet.training.recipe import Recipe


def make_optimizer(
    model: nn.Module, recipe: Recipe, device: torch.device, graphs: bool = False
) -> torch.optim.Optimizer:
    """Make Adam or SGD; the recipe says what decays. graphs: whether its steps will be recorded in a CUDA graph."""
    shortcuts = {
        p for unit in model.modules() if isinstance(unit, Unit) for p in unit.shortcut.parameters() if p.dim() > 1
    }
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    kernels = {p for layer in ordinary_layers(model) for p in layer.parameters()}
    slopes = {block.slope for block in blocks if block.slope is not None}
    spared = slopes | (set() if recipe.decay_shortcuts else shortcuts) | (set() if recipe.decay_kernels else kernels)
    groups = []
    for group in parameter_groups(model, recipe.weight_decay, decay_unweighted=recipe.decay_unweighted):
        groups.append({**group, "params": [p for p in group["params"] if p not in spared]})
    groups.append({"params": [p for p in model.parameters() if p in spared], "weight_decay": 0.0})
    groups = [group for group in groups if group["params"]]
    rate: Any = torch.tensor(recipe.lr, device=device) if graphs else recipe.lr  # a graph reads the tensor every time
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=True)
    return torch.optim.Adam(groups, lr=rate, fused=True, capturable=graphs)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of every parameter, by the parameter's number."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}/{name}": value
        for number, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load an optimizer's tensors in the memory order of the parameters, which fused optimizers require.

    `load_state_dict` would keep the order in which they were saved.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, value in tensors.items():
        number, name = key.split("/")
        p = parameters[int(number)]
        # in the memory order of the parameter, unless the shape differs, as that of a count of steps
        optimizer.state[p][name] = (
            torch.empty_like(p, dtype=value.dtype).copy_(value) if value.shape == p.shape else value.to(p.device)
        )
