"""Checks of arguments that functions and layers share: errors name the argument, its value and what was possible."""

from numbers import Real

from torch import Tensor

from dcnet.util.suggest import nearest

IMPLEMENTATIONS = ("reference", "eager", "fused")


def check_input(x: Tensor, name: str) -> None:
    """Raise unless x is a tensor of real floating-point numbers."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} has dtype {x.dtype}; decoupled operators take float64, float32, bfloat16 and float16")


def check_eps(eps: float) -> None:
    """Raise unless eps can be added inside a norm."""
    if not isinstance(eps, int | float) or not 0.0 <= eps < float("inf"):
        raise ValueError(f"eps must be a finite number ≥ 0, got {eps!r}")


def check_literal_radius(radius: object) -> None:
    """Raise unless the number may be an operator radius."""
    if not isinstance(radius, Real) or isinstance(radius, bool) or not 0.0 < float(radius) < float("inf"):
        raise ValueError(f"radius must be a finite number > 0, or 'learned' in a layer, got {radius!r}")


def check_impl(impl: object) -> None:
    """Raise unless this names an implementation."""
    if impl not in IMPLEMENTATIONS and impl != "auto":
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"unknown impl {impl!r}.{nearest(str(impl), IMPLEMENTATIONS)} Possible: 'auto', {known}")
