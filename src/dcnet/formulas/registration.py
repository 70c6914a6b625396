"""Registration of magnitude and angular functions, the paper's and a user's."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

from dcnet.formulas import checks
from dcnet.formulas.catalogue import CATALOGUES, Formula, Parameter, Range, anything

F = TypeVar("F", bound=Callable[..., Any])


@overload
def magnitude(function: F, *, bounded: bool = False, replace: bool = False) -> F: ...
@overload
def magnitude(function: None = None, *, bounded: bool = False, replace: bool = False) -> Callable[[F], F]: ...
def magnitude(function: Callable[..., Any] | None = None, *, bounded: bool = False, replace: bool = False) -> Any:
    """Register a magnitude function h; use it as a decorator, `@magnitude` or `@magnitude(bounded=True)`.

    The function takes n = ‖x‖, then `rho` if it has a radius, then parameters with numbers as defaults, annotated
    `positive`, `at_least(low)` or `learnable(start, floor)` of `dcnet.formulas` where values are limited. It returns
    its value, its slope in n, its slope in rho if it takes `rho`, and a slope for each learnable parameter. It is
    written with its arguments, numbers and `dcnet.formulas.m` alone; then it runs on every device. The slopes are
    checked at registration. The first line of its docstring is the formula in words.

    Args:
        function: the formula.
        bounded: whether it stays below a limit as ‖x‖ grows; checked too.
        replace: take the place of a formula of the same name.

    Examples:
        >>> import dcnet
        >>> @dcnet.magnitude
        ... def half(n):
        ...     '‖x‖/2'
        ...     return 0.5 * n, 0.5
        >>> dcnet.DecoupledLinear(4, 3, magnitude="half").magnitude
        'half'
    """
    if function is None:
        return lambda f: _register("magnitude", f, bounded, replace)
    return _register("magnitude", function, bounded, replace)


@overload
def angular(function: F, *, replace: bool = False) -> F: ...
@overload
def angular(function: None = None, *, replace: bool = False) -> Callable[[F], F]: ...
def angular(function: Callable[..., Any] | None = None, *, replace: bool = False) -> Any:
    """Register an angular function g; use it as a decorator, `@angular`.

    The function takes c = cos θ, then parameters as in `magnitude`. It returns its value, its slope in c, and a slope
    for each learnable parameter. It is written with its arguments, numbers and `dcnet.formulas.m` alone.

    Args:
        function: the formula.
        replace: take the place of a formula of the same name.

    Examples:
        >>> import dcnet
        >>> @dcnet.angular
        ... def cube(c):
        ...     'cos³θ'
        ...     return c * c * c, 3.0 * c * c
        >>> dcnet.DecoupledLinear(4, 3, angular="cube").angular
        'cube'
    """
    if function is None:
        return lambda f: _register("angular", f, True, replace)
    return _register("angular", function, True, replace)


def _register(kind: str, function: Any, bounded: bool, replace: bool) -> Any:
    checks.check_code(kind, function)
    formula = Formula(
        kind=kind,
        name=function.__name__,
        text=(inspect.getdoc(function) or "").partition("\n")[0],
        function=function,
        parameters=_parameters(kind, function),
        has_radius=kind == "magnitude" and "rho" in inspect.signature(function).parameters,
        bounded=bounded,
    )
    formula = checks.check_slopes(formula)
    known = CATALOGUES[kind].get(formula.name)
    if known is not None and not replace and known.function.__code__ != function.__code__:
        raise ValueError(
            f"{kind} {formula.name!r} is registered already, as {known.text!r}: choose another name, or say "
            "replace=True"
        )
    CATALOGUES[kind][formula.name] = formula
    if known is not None:
        for listener in _LISTENERS:
            listener()
    return function


_LISTENERS: list[Callable[[], None]] = []


def on_replacement(listener: Callable[[], None]) -> None:
    """Call a function whenever a formula takes the place of another: for those who know formulas by name.

    Args:
        listener: the function, which takes nothing.
    """
    _LISTENERS.append(listener)


def _parameters(kind: str, function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters after ‖x‖ (or cos θ) and ρ, each with a default and a range."""
    names = list(inspect.signature(function, eval_str=True).parameters.values())
    where = f"{kind} {function.__name__!r}"
    if not names:
        raise ValueError(f"{where}: its first argument must be {'n = ‖x‖' if kind == 'magnitude' else 'c = cos θ'}")
    rest = names[1:]
    if kind == "magnitude" and rest and rest[0].name == "rho":
        rest = rest[1:]
    parameters = {}
    for argument in rest:
        if argument.name == "rho":
            raise ValueError(f"{where}: rho must be the second argument of a magnitude")
        if argument.name == "radius":
            raise ValueError(
                f"{where}: a parameter cannot be called radius, which is the layer's own; the operator radius is rho"
            )
        if argument.kind is not argument.POSITIONAL_OR_KEYWORD or not isinstance(argument.default, int | float):
            raise ValueError(f"{where}: parameter {argument} needs a plain name and a number as its default")
        bounds = (
            anything if argument.annotation is argument.empty or argument.annotation is float else argument.annotation
        )
        if not isinstance(bounds, Range):
            raise ValueError(
                f"{where}: {argument.name} is annotated {bounds!r}; use positive, at_least(low) or "
                "learnable(start, floor)"
            )
        if not bounds.admits(argument.default):
            raise ValueError(f"{where}: the default {argument.name}={argument.default:g} is not {bounds}")
        parameters[argument.name] = Parameter(argument.name, float(argument.default), bounds)
    return parameters
