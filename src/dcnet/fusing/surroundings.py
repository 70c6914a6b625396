"""The code around a fused convolution: what it was when the model was looked at, and whether it still is."""

from collections.abc import Mapping
from inspect import Parameter, signature, unwrap
from typing import Any, NamedTuple

import torch
from torch import nn

from dcnet.fusing.own_code import owner_of_forward

Settings = Mapping[nn.Module, dict[str, Any]]
_CHOICES = (bool, str)  # a number may count calls, and None may become what a call keeps


class Surroundings(NamedTuple):
    """A module whose code calls a convolution and the modules behind it, with the settings that may choose its way.

    owner: the class that defines its forward; None for a module farther around, of which only settings matter.
    forward: that function.
    """

    module: nn.Module
    settings: dict[str, Any]
    owner: Any = None
    forward: Any = None

    def hold(self) -> bool:
        """Tell whether the code is the same, and the settings are as they were."""
        attributes = vars(self.module)
        for name, value in self.settings.items():
            now = attributes.get(name)
            if now is not value and not (type(now) is type(value) and _is_choice(now) and now == value):
                return False
        return self.owner is None or self._runs_forward()

    def _runs_forward(self) -> bool:
        own = vars(self.module).get("forward")
        if torch.compiler.is_compiling():
            return own is None
        if own is None:
            return self.owner.forward is self.forward
        # one that is wrapped around it, as accelerate does for autocast, calls the same code
        inner = unwrap(getattr(own, "__func__", own))
        return getattr(inner, "__func__", inner) is unwrap(self.forward)


def settings_of(model: nn.Module) -> Settings:
    """Return the settings of all modules that may choose the way of their code."""
    return {module: _settings(module) for module in model.modules()}


def surroundings_of(
    names: list[str], modules: dict[str, nn.Module], before: Settings, after: Settings
) -> tuple[Surroundings, ...]:
    """Return what surrounds the modules of these names: those that hold all of them, the nearest one first.

    before, after: the settings before and after the model ran. What its own code changes is no setting.
    """
    found = []
    for one in (modules[name] for name in _holders(names, modules)):
        kept = {name: value for name, value in after[one].items() if before[one].get(name) == value}
        found.append(Surroundings(one, kept))
    owner: Any = owner_of_forward(found[0].module)
    nearest = found[0]._replace(owner=owner, forward=owner.forward)
    return nearest, *(one for one in found[1:] if one.settings)


def other_arguments(names: list[str], modules: dict[str, nn.Module]) -> str:
    """Return the arguments that the code around modules may also be called with; "" if there are none."""
    owner: Any = owner_of_forward(modules[_holders(names, modules)[0]])
    _, *parameters = signature(owner.forward).parameters.values()
    return ", ".join(one.name for one in parameters if one.default is not Parameter.empty)


def _holders(names: list[str], modules: dict[str, nn.Module]) -> list[str]:
    """Return the names of the modules with code that hold all of these modules, the innermost first.

    The model's own name is empty.
    """
    prefixes = [[name[:at] for at, sign in enumerate(name) if sign == "."] for name in names]
    common = [one for one in prefixes[0] if all(one in others for others in prefixes)]
    return [one for one in (*reversed(common), "") if not isinstance(modules[one], nn.ModuleList | nn.ModuleDict)] or [
        ""
    ]


def _settings(module: nn.Module) -> dict[str, Any]:
    return {
        name: [*value] if isinstance(value, list) else value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and _is_choice(value)
    }


def _is_choice(value: Any) -> bool:
    if isinstance(value, tuple | list):  # an empty one may be a record that grows
        return bool(value) and all(isinstance(one, (*_CHOICES, int)) for one in value)
    return isinstance(value, _CHOICES)
