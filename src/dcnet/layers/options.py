"""The options of a decoupled layer, the same for every layer, conversion and network."""

from dataclasses import dataclass
from typing import TypedDict

import torch

from dcnet.formulas import Choice, Formula
from dcnet.ops import EPS, Operator, check_eps, check_impl, check_literal_radius, make_operator

Spec = str | Formula | Choice
Device = torch.device | str | int | None


class OtherOptions(TypedDict, total=False):
    """The fields of `LayerOptions` besides the operator's, for functions that take them as keywords."""

    weighting: str | None
    radius: str | float
    eps: float
    momentum: float | None
    sync: bool
    impl: str


class Options(OtherOptions, total=False):
    """All fields of `LayerOptions`, for functions that take them as keywords."""

    magnitude: Spec
    angular: Spec


@dataclass(frozen=True)
class LayerOptions:
    """The options that every decoupled layer has besides those of the plain one; `Decoupled` says what they mean."""

    magnitude: Spec = "tanh"
    angular: Spec = "cosine"
    weighting: str | None = None
    radius: str | float = "learned"
    eps: float = EPS
    momentum: float | None = 0.1
    sync: bool = False
    impl: str = "auto"

    def operator(self) -> Operator:
        """Return the operator of a layer with these options; raise if one of them is invalid."""
        operator = make_operator(self.magnitude, self.angular, self.weighting)
        if isinstance(self.radius, str):
            if self.radius != "learned":
                raise ValueError(f"unknown radius {self.radius!r}; possible: 'learned', or a number > 0")
        else:
            check_literal_radius(self.radius)
            if not operator.magnitude.formula.has_radius:
                raise ValueError(f"radius={self.radius!r}: the magnitude {operator.magnitude.name!r} has no radius")
        check_eps(self.eps)
        check_impl(self.impl)
        momentum = self.momentum
        if momentum is not None and not (isinstance(momentum, int | float) and 0.0 <= momentum <= 1.0):
            possible = "a number from 0 to 1, or None for a cumulative average"
            raise ValueError(f"momentum must be {possible}, got {momentum!r}")
        if not isinstance(self.sync, bool):
            raise ValueError(f"sync must be True or False, got {self.sync!r}")
        return operator
