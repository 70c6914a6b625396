"""Modules that hand the energy of a map, ½·Σ x² over channels, to the module that takes the map.

This happens only between modules of this package, where nobody else sees the map. An energy has a gradient of its own,
which the map's gradient does not include. If an energy went along with a map that others see, `retain_grad`, tensor
hooks and `torch.autograd.grad` on this map would silently get only a part of its gradient.
"""

from typing import Any

from torch import Tensor, nn

from dcnet.util.compat import hooked


class HandsOn(nn.Module):
    """A module that takes the energy of its input and leaves that of its output."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """Return the module's result for x."""
        return self.with_energy(x, None, False, *rest)[0]

    def with_energy(self, x: Tensor, energy: Tensor | None, leave: bool, *rest: Any) -> tuple[Tensor, Tensor | None]:
        """Return `forward`'s result for x with this energy, and, with `leave`, the result's energy or None."""
        raise NotImplementedError


def hands_on(module: nn.Module) -> bool:
    """Tell whether a module only does `with_energy`: no forward of a subclass or an instance, no hooks."""
    own_forward = type(module).forward is not HandsOn.forward or "forward" in vars(module)
    return isinstance(module, HandsOn) and not own_forward and not hooked(module)


def hand_on(
    module: nn.Module, x: Tensor, energy: Tensor | None, leave: bool, *rest: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the module's result and its energy; None if the module does not hand energies on."""
    return module.with_energy(x, energy, leave, *rest) if hands_on(module) else (module(x, *rest), None)  # type: ignore[operator]


class Chain(nn.Sequential):
    """`nn.Sequential` in which blocks hand energies on to blocks that follow immediately."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the last module."""
        takes = [hands_on(module) for module in self]
        energy = None
        for module, takes_it, wanted in zip(self, takes, [*takes, False][1:], strict=True):
            x, energy = module.with_energy(x, energy, wanted) if takes_it else (module(x), None)  # type: ignore[operator]
        return x
