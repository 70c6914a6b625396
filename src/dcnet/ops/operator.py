"""The choice of a decoupled operator: a magnitude, an angular function, and how ‖w‖ enters."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dcnet.formulas import Choice, Formula, choose
from dcnet.formulas.angulars import cosine
from dcnet.formulas.magnitudes import linear
from dcnet.util.suggest import nearest

WEIGHTINGS = (None, "linear", "joint", "separate")
# torch.compile of PyTorch 2.11 cannot trace a call of an object that was made while it traces, but a function it can
_at = Choice.__call__


@dataclass(frozen=True)
class Operator:
    """h(‖w‖, ‖x‖)·g(θ) with its formulas and parameters chosen."""

    magnitude: Choice
    angular: Choice
    weighting: str | None = None
    spelling: tuple[str, str, str] | None = field(default=None, compare=False)  # `names`, precomputed

    # Every call looks up a plan by its operator. So equal operators share one object, which computes its hash once.

    @cached_property
    def _hash(self) -> int:
        return hash((self.magnitude, self.angular, self.weighting))

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo: Any) -> "Operator":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return shared_operator, (self.magnitude, self.angular, self.weighting)

    @property
    def names(self) -> tuple[str, str, str]:
        """Magnitude, angular function and weighting ("" for None) as `make_operator` takes them."""
        return self.spelling or (str(self.magnitude), str(self.angular), self.weighting or "")

    @property
    def is_inner_product(self) -> bool:
        """Whether h·g is α·⟨w, x⟩ (or α·⟨w, x⟩/‖w‖ unweighted): then no patch norm is needed."""
        return self.magnitude.formula.function is linear and self.is_cosine

    @property
    def is_cosine(self) -> bool:
        """Whether g is cos θ itself, so that cos θ follows from h·g and h."""
        return self.angular.formula.function is cosine

    @property
    def learned(self) -> tuple[str, ...]:
        """The names of the learned parameters."""
        return self.magnitude.learned + self.angular.learned

    def kernel_factor(self, norm: Tensor, rho: Tensor | None, learned: Mapping[str, Tensor]) -> Tensor | None:
        """Return the factor of h(‖x‖)·g for each kernel of norm ‖w‖; None stands for 1."""
        if self.weighting == "linear":
            return norm
        if self.weighting == "separate":
            return self.magnitude.value("alpha", 1.0) * self.magnitude_one(norm, rho, learned)[0]
        return None

    def magnitude_one(self, norm: Any, rho: Any, learned: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return h₁, the magnitude with α = 1 (if it has an α), and its slopes."""
        return _at(self.magnitude, norm, rho, learned, **dict(self.alpha_one))

    @property
    def alpha_one(self) -> tuple[tuple[str, float], ...]:
        """The parameters that set α to 1; none for a magnitude without an α."""
        return (("alpha", 1.0),) if "alpha" in dict(self.magnitude.values) else ()

    def patch_magnitude(self, norm: Any, rho: Any, learned: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the part of h that depends on ‖x‖, and its slopes."""
        return (
            self.magnitude_one(norm, rho, learned)
            if self.weighting == "separate"
            else _at(self.magnitude, norm, rho, learned)
        )

    def angle(self, c: Any, learned: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return g(cos θ), and its slopes."""
        return _at(self.angular, c, None, learned)

    def parts(self, c: Any, n: Any, gain: Any, radius: Any, *learned: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return h(t·‖x‖) and g(cos θ), each with its slopes; gain is t, None for 1; learned as in `self.learned`."""
        values = dict(zip(self.learned, learned, strict=True))
        of_h = {name: values[name] for name in self.magnitude.learned}
        of_g = {name: values[name] for name in self.angular.learned}
        return self.patch_magnitude(n if gain is None else n * gain, radius, of_h), self.angle(c, of_g)

    def value(self, c: Any, n: Any, factor: Any, gain: Any, radius: Any, bias: Any, *learned: Any) -> Any:
        """Return s·h(t·‖x‖)·g(cos θ) + b in the compute dtype; s is the factor, t the gain, None for 1."""
        (h, *_), (g, *_) = self.parts(c, n, gain, radius, *learned)
        y = g * h
        if factor is not None:
            y = y * factor
        return y if bias is None else y + bias


def make_operator(
    magnitude: "str | Formula | Choice", angular: "str | Formula | Choice", weighting: str | None
) -> Operator:
    """Return the operator with these functions and this weighting; raise where they do not go together."""
    operator = Operator(choose("magnitude", magnitude), choose("angular", angular), weighting)
    if weighting not in WEIGHTINGS:
        guess = nearest(weighting, ("linear", "joint", "separate")) if isinstance(weighting, str) else ""
        raise ValueError(
            f"unknown weighting {weighting!r}.{guess} Possible: None, 'linear', 'joint', 'separate' (on the command "
            "line: none, linear, joint, separate)"
        )
    if weighting in ("joint", "separate") and not operator.magnitude.formula.uses_norm:
        raise ValueError(
            f"weighting={weighting!r} bends a norm, but the magnitude {operator.magnitude.name!r} has none to bend; "
            "possible here: None, 'linear'",
        )
    if weighting == "separate" and "alpha" in operator.magnitude.learned:
        raise ValueError(
            f"weighting='separate' takes α out of both magnitudes, so {operator.magnitude.name!r} cannot learn alpha "
            "with it"
        )
    both = set(operator.magnitude.learned) & set(operator.angular.learned)
    if both:
        raise ValueError(f"magnitude and angular function both learn a parameter {both.pop()!r}; rename one of them")
    # torch.compile does not need a shared operator, and may fail to trace how its names are made
    return (
        operator if torch.compiler.is_compiling() else shared_operator(operator.magnitude, operator.angular, weighting)
    )


_SHARED: dict[Operator, Operator] = {}


def shared_operator(magnitude: Choice, angular: Choice, weighting: str | None) -> Operator:
    """Return the shared operator with these choices; its names are precomputed."""
    operator = Operator(magnitude, angular, weighting)
    known = _SHARED.get(operator)
    if known is None:
        known = _SHARED[operator] = replace(operator, spelling=operator.names)
    return known
