"""Optimization of unweighted decoupled kernels: projection to a norm, and parameters that must not decay."""

from typing import Any

import torch
from torch import Tensor, nn

from dcnet.layers.decoupled import Decoupled, decoupled_layers
from dcnet.layers.selection import Selector, selected
from dcnet.layers.sharding import check_shape, reshard_


def unweighted(model: nn.Module, where: Selector, what: str) -> dict[str, Decoupled]:
    """Return the decoupled layers; raise unless all are unweighted, since the output of others depends on ‖w‖."""
    layers = selected(model, constrained_layers(model), where)
    for name, layer in layers.items():
        if layer.weighting is not None:
            raise ValueError(
                f"{what} does not go with weighted operators: layer {name or '(the model itself)'!r} has "
                f"weighting={layer.weighting!r}" + (f". Leave it out with where={f'!{name}'!r}" if name else ""),
            )
        if layer._parameters.get("weight") is None:
            raise ValueError(
                f"{what} changes the kernels themselves, but those of layer {name or '(the model itself)'!r} are "
                f"computed from other parameters ({', '.join(_sources(layer)) or 'unknown'}). "
                "Remove the parametrization, or leave the layer out with where=",
            )
        check_shape(name, layer)
    mine = {layer.weight: name for name, layer in layers.items()}
    for name, module in model.named_modules():
        shared = [mine[p] for p in module._parameters.values() if p in mine]
        if shared and not (isinstance(module, Decoupled) and module.weighting is None):
            raise ValueError(
                f"{what} changes the kernels of layer {shared[0]!r}, which are also those of {name!r} "
                f"({type(module).__name__}), whose output depends on their norm. Leave them out with "
                f"where={f'!{shared[0]}'!r}"
            )
    return layers


def constrained_layers(model: nn.Module) -> dict[str, Decoupled]:
    """Return the decoupled layers whose kernels may be changed: all but weight-normalized classifiers."""
    return {name: layer for name, layer in decoupled_layers(model).items() if layer.constrained}


def _sources(layer: Decoupled) -> list[str]:
    """Return the parameters a parametrized kernel is computed from (weight_norm and the like, old style and new)."""
    return [name for name, _ in layer.named_parameters() if name.startswith(("parametrizations.weight.", "weight_"))]


@torch.no_grad()
def project_weights_(model: nn.Module, scale: float = 1.0, where: Selector = None) -> list[str]:
    """Project the kernels of unweighted decoupled layers to norm s: w ← s·w/‖w‖.

    The output does not depend on their norm (if that is large against √eps, 0.01), but the size of a step of the
    optimizer does. A zero kernel is left alone. Code that uses a layer's weight without calling the layer gets the
    projected kernels too.

    Args:
        model: any model with decoupled layers.
        scale: the norm s.
        where: which layers, in the words of `decouple_`: a function `where(name, layer)`, a pattern of names such as
            "layer[1-4].*" or "!stem*", a preset such as "not-first", or a list of these; without it all that are
            unweighted.

    Returns:
        The names of the layers that were projected.

    Examples:
        >>> import dcnet
        >>> layer = dcnet.DecoupledConv2d(3, 8, 3)
        >>> names = dcnet.project_weights_(layer)
        >>> bool((layer.weight.flatten(1).norm(dim=1) - 1).abs().max() < 1e-6)
        True
    """
    _check_scale(scale)
    reshard_(model)
    layers = unweighted(model, where, "weight projection")
    for layer in layers.values():
        project_kernels_(layer.weight, scale)
    return list(layers)


@torch.no_grad()
def project_kernels_(weight: Tensor, scale: float = 1.0) -> Tensor:
    """Set each kernel of a weight (out_channels, …) to s·w/sqrt(Σw²) in place; a zero kernel is left alone."""
    exact = weight.double()  # a kernel too small for its squares in float32 still has a direction
    # keepdim=True: the norms then also broadcast with sharded kernels
    norm = torch.linalg.vector_norm(exact, dim=tuple(range(1, exact.dim())), keepdim=True)
    return weight.copy_(exact * torch.where(norm > 0.0, scale / norm, 1.0))


def _check_scale(scale: float) -> None:
    if not isinstance(scale, int | float) or not 0.0 < scale < float("inf"):
        raise ValueError(f"scale must be a finite number > 0, got {scale!r}")


class WeightProjection:
    """Project kernels after every `every` steps of an optimizer, from now on: see `project_weights_`.

    `state_dict()` and `load_state_dict()` carry the count of steps through a checkpoint; `remove()` ends it.

    Args:
        model: any model with decoupled layers.
        optimizer: the optimizer whose steps are counted.
        scale: the norm to project to.
        every: the number of steps between projections; the paper takes 100.
        where: which layers, in the words of `decouple_`: a function `where(name, layer)`, a pattern of names such as
            "layer[1-4].*" or "!stem*", a preset such as "not-first", or a list of these; without it all that are
            unweighted.

    Examples:
        >>> import torch, dcnet
        >>> layer = dcnet.DecoupledLinear(4, 3)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> projection = dcnet.WeightProjection(layer, optimizer, every=1)
        >>> layer(torch.randn(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> bool((layer.weight.norm(dim=1) - 1).abs().max() < 1e-6)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scale: float = 1.0,
        every: int = 100,
        where: Selector = None,
    ) -> None:
        if not hasattr(optimizer, "register_step_post_hook"):  # wrappers of other libraries have it
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number ≥ 1, got {every!r}")
        _check_scale(scale)
        unweighted(model, where, "weight projection")  # an error now, not after a hundred steps
        self.model, self.scale, self.every, self.where = model, scale, every, where
        self.steps = 0
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.count()

    def count(self) -> None:
        """Count a step, and project if it is time.

        Call it for steps that the hook does not see, such as those that a CUDA graph repeats.
        """
        self.steps += 1
        if self.steps % self.every == 0:
            self.project()

    def project(self) -> None:
        """Project now."""
        project_weights_(self.model, self.scale, self.where)

    def remove(self) -> None:
        """Stop projecting."""
        self._handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps counted so far, and the settings of the projection."""
        return {"steps": self.steps, "every": self.every, "scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from a saved state."""
        if set(state) != {"steps", "every", "scale"}:
            raise ValueError(
                f"not the state of a WeightProjection: it has {sorted(state)}, expected ['every', 'scale', 'steps']"
            )
        self.steps, self.every, self.scale = state["steps"], state["every"], state["scale"]


def parameter_groups(
    model: nn.Module, weight_decay: float = 5e-4, *, decay_unweighted: bool = False
) -> list[dict[str, Any]]:
    """Return the parameters in two groups for an optimizer: what decays, and what must not.

    Radii and learned parameters must not decay. Unweighted decoupled kernels do not decay either, as in the paper:
    the output does not depend on their norm. But the norm decides how far a step of the optimizer turns a kernel. So
    decay may help where nothing else limits the norm, as with SGD without weight projection.

    Args:
        model: any model.
        weight_decay: of the first group.
        decay_unweighted: put unweighted decoupled kernels in the first group.

    Returns:
        Two dicts, as `torch.optim` takes them.

    Examples:
        >>> import torch, dcnet
        >>> from torch import nn
        >>> model = nn.Sequential(dcnet.DecoupledConv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> optimizer = torch.optim.SGD(dcnet.parameter_groups(model, weight_decay=5e-4), lr=0.1)
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.0005, 0.0]
    """
    if not isinstance(weight_decay, int | float) or not 0.0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay must be a finite number ≥ 0, got {weight_decay!r}")
    exempt: set[nn.Parameter] = set()
    for layer in decoupled_layers(model).values():
        exempt |= {p for name, p in layer.named_parameters(recurse=False) if name.startswith("raw_")}
        if layer.weighting is None and not decay_unweighted:
            exempt |= {
                layer.get_parameter(name)
                for name in (["weight"] if layer._parameters.get("weight") is not None else _sources(layer))
            }
    groups = [
        {"params": [p for p in model.parameters() if p not in exempt], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
