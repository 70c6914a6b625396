"""The catalogues of magnitude and angular functions: what is known, look-up by name, parameters.

A formula is one short function that returns its value, its slope in ‖x‖ (or cos θ), its slope in ρ if it takes `rho`,
then one slope for each learnable parameter in signature order. It is written with its arguments, literals and `m`
alone. `registration.py` adds formulas, and `checks.py`
enforces all of this.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from dcnet.formulas.numbers import parse_number
from dcnet.util.suggest import nearest

LEARNED = "learned"


@dataclass(frozen=True)
class Range:
    """What values a parameter may take; the annotation of a formula's argument."""

    low: float = -math.inf
    open: bool = False
    start: float | None = None  # set for learnable parameters only

    @property
    def learnable(self) -> bool:
        return self.start is not None

    def admits(self, value: float) -> bool:
        return math.isfinite(value) and (value > self.low if self.open else value >= self.low)

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "any finite number"
        return f"a number {'>' if self.open else '≥'} {self.low:g}"


@dataclass(frozen=True)
class Learnable(Range):
    """A parameter that may be learned per kernel, as |raw| + floor, from `start`.

    Attributes:
        low: a fixed value must not be below it.
        open: whether it must not be equal to it either.
        start: the value it starts at.
        floor: the value it stays above.
    """

    floor: float = 0.0

    def value(self, raw: Tensor) -> Tensor:
        return raw.abs() + self.floor

    @property
    def raw_start(self) -> float:
        assert self.start is not None
        return self.start - self.floor


anything = Range()
positive = Range(low=0.0, open=True)


def at_least(low: float) -> Range:
    """Return the annotation of a parameter that must not be below `low`.

    Args:
        low: the least value.

    Examples:
        >>> import dcnet
        >>> from dcnet.formulas import at_least
        >>> @dcnet.magnitude
        ... def shifted(n, beta: at_least(0.0) = 0.5):
        ...     '‖x‖ + β'
        ...     return n + beta, 1.0
    """
    return Range(low=low)


def learnable(start: float, floor: float, least: float | None = None) -> Learnable:
    """Return the annotation of a parameter that may be learned per kernel: |raw| + floor.

    Args:
        start: the value it starts at.
        floor: the value it stays above.
        least: what a fixed value must not be below; without it, a fixed value must be positive.

    Examples:
        >>> import dcnet
        >>> @dcnet.angular
        ... def scaled(c, q: dcnet.learnable(start=1.0, floor=0.5) = 1.0):
        ...     'q·cos θ'
        ...     return q * c, q, c
        >>> dcnet.DecoupledLinear(4, 3, angular="scaled:q=learned").raw_q.shape
        torch.Size([3])
    """
    if not floor >= 0.0:
        raise ValueError(f"learnable(floor={floor}): the floor must not be negative")
    if not start > floor:
        raise ValueError(f"learnable(start={start}, floor={floor}): the start must lie above the floor")
    if least is not None and not least <= floor:
        raise ValueError(f"learnable(floor={floor}, least={least}): the floor must not lie below the least")
    return Learnable(low=0.0 if least is None else least, open=least is None, start=start, floor=floor)


@dataclass(frozen=True)
class Parameter:
    """One named parameter of a formula."""

    name: str
    default: float
    range: Range


@dataclass(frozen=True)
class Formula:
    """A magnitude or angular function: `formula(...)` returns its value and slopes.

    Attributes:
        kind: "magnitude" or "angular".
        name: what it is chosen by.
        text: the formula in words, the first line of its docstring.
        function: returns the value and the slopes.
        parameters: by name, with their defaults and ranges.
        has_radius: whether it is a magnitude that takes ρ.
        bounded: whether it stays below a limit as ‖x‖ grows.
        uses_norm: False where a magnitude is constant in ‖x‖ (SphereConv).
    """

    kind: str
    name: str
    text: str
    function: Callable[..., tuple[Any, ...]]
    parameters: dict[str, Parameter] = field(hash=False)  # a plain dict: torch.compile does not read through a proxy
    has_radius: bool
    bounded: bool
    uses_norm: bool = True

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self.function(*args, **kwargs)

    @property
    def learnable(self) -> tuple[str, ...]:
        return tuple(name for name, parameter in self.parameters.items() if parameter.range.learnable)

    def __str__(self) -> str:
        options = ", ".join(f"{p.name}={p.default:g}" for p in self.parameters.values())
        return f"{self.name}: {self.text}" + (f"   ({options})" if options else "")

    def __reduce__(self) -> tuple[Any, ...]:
        return look_up, (self.kind, self.name)  # by name, so that nothing executable is stored


CATALOGUES: dict[str, dict[str, Formula]] = {"magnitude": {}, "angular": {}}


def magnitudes() -> Mapping[str, Formula]:
    """Return the magnitude functions h that are known now, by name, registered ones included.

    Examples:
        >>> import dcnet
        >>> print(dcnet.magnitudes()["ball"])
        ball: α·min(‖x‖, ρ)/ρ   (alpha=1)
    """
    return MappingProxyType(CATALOGUES["magnitude"])


def angulars() -> Mapping[str, Formula]:
    """Return the angular functions g that are known now, by name, registered ones included.

    Examples:
        >>> import dcnet
        >>> "square_cosine" in dcnet.angulars()
        True
    """
    return MappingProxyType(CATALOGUES["angular"])


def look_up(kind: str, name: str) -> Formula:
    """Return the registered formula of that name.

    Args:
        kind: "magnitude" or "angular".
        name: of the formula.
    """
    catalogue = CATALOGUES[kind]
    if name not in catalogue:
        other = "angular" if kind == "magnitude" else "magnitude"
        guess = f" It is one of the {other} functions." if name in CATALOGUES[other] else nearest(name, catalogue)
        raise ValueError(f"unknown {kind} {name!r}.{guess} Known: {', '.join(catalogue)}")
    return catalogue[name]


@dataclass(frozen=True)
class Choice:
    """A formula with the values of its parameters; those in `learned` come as tensors at every call.

    Attributes:
        formula: what was chosen.
        values: of its parameters, those that are learned left out.
        learned: the names of those that are learned.
    """

    formula: Formula
    values: tuple[tuple[str, float], ...]
    learned: tuple[str, ...] = ()

    def __call__(
        self, first: Any, rho: Any = None, learned: Mapping[str, Any] | None = None, **overrides: float
    ) -> tuple[Any, ...]:
        """Return value and slopes at `first` (‖x‖ or cos θ); `learned` gives the learned parameters."""
        arguments = dict(self.values) | {name: (learned or {})[name] for name in self.learned} | overrides
        if self.formula.has_radius:
            return self.formula.function(first, rho, **arguments)
        return self.formula.function(first, **arguments)

    @property
    def name(self) -> str:
        return self.formula.name

    def value(self, name: str, default: float) -> float:
        """Return the chosen value of a fixed parameter, `default` where the formula has no such parameter."""
        return dict(self.values).get(name, default)

    def __str__(self) -> str:
        changed = [
            f"{k}={repr(v).removesuffix('.0')}" for k, v in self.values if v != self.formula.parameters[k].default
        ]
        changed += [f"{name}={LEARNED}" for name in self.learned]
        return self.name + (":" + ",".join(changed) if changed else "")


def choose(kind: str, spec: "str | Formula | Choice") -> Choice:
    """Return the formula that `spec` names, as in "tanh", "seg:alpha=1,beta=0.5" or "sigmoid:k=learned".

    Args:
        kind: "magnitude" or "angular".
        spec: a name with parameters, a formula, or what this function has returned.

    Examples:
        >>> from dcnet.formulas import choose
        >>> choice = choose("magnitude", "seg:beta=0.2")
        >>> choice.value("beta", 1.0)
        0.2
    """
    if isinstance(spec, Choice):
        spec = str(spec) if spec.formula.kind == kind else _wrong_kind(kind, spec.formula)
    if isinstance(spec, Formula):
        spec = spec.name if spec.kind == kind else _wrong_kind(kind, spec)
    if not isinstance(spec, str):
        raise TypeError(f"{kind} must be a name, got {spec!r}. Known: {', '.join(CATALOGUES[kind])}")
    name, _, rest = spec.partition(":")
    formula = look_up(kind, name.strip())
    values = {parameter.name: parameter.default for parameter in formula.parameters.values()}
    learned: list[str] = []
    given: set[str] = set()
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals or not text:
            raise ValueError(f"{kind} {spec!r}: expected parameter=value, got {item!r}")
        if key not in formula.parameters:
            known = ", ".join(formula.parameters) or "none"
            if key in ("radius", "rho"):
                known += ". The radius is an argument of its own, radius="
            raise ValueError(
                f"{kind} {formula.name!r} has no parameter {key!r}.{nearest(key, formula.parameters)} Its "
                f"parameters: {known}"
            )
        if key in given:
            raise ValueError(f"{kind} {spec!r} gives {key} twice")
        given.add(key)
        if text == LEARNED:
            if key not in formula.learnable:
                can = ", ".join(formula.learnable) or "none"
                raise ValueError(f"{kind} {formula.name!r}: {key} cannot be learned; learnable parameters: {can}")
            learned.append(key)
            values.pop(key, None)
            continue
        try:
            values[key] = parse_number(text)
        except ValueError:
            possible = "a number" + (f" or {LEARNED!r}" if key in formula.learnable else "")
            raise ValueError(f"{kind} {formula.name!r}: {key}={text!r} is not {possible}") from None
        if not formula.parameters[key].range.admits(values[key]):
            raise ValueError(f"{kind} {formula.name!r}: {key} must be {formula.parameters[key].range}, got {text}")
    return Choice(formula, tuple(values.items()), tuple(learned))


def _wrong_kind(kind: str, formula: Formula) -> str:
    raise ValueError(f"{formula.name!r} is one of the {formula.kind} functions, not of the {kind} functions")
