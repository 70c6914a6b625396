"""The explorer as one file: the catalogue, its formulas in JavaScript, and the page around them."""

import json
import unicodedata
from dataclasses import replace
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any

from dcnet.explorer.javascript import to_javascript
from dcnet.formulas import LEARNED, Formula, angulars, m, magnitudes, positive
from dcnet.formulas.catalogue import Parameter
from dcnet.layers.options import LayerOptions
from dcnet.ops.operator import WEIGHTINGS

HERE = Path(__file__).parent
ARITHMETIC = ("m.js", "operator.js")
PAGE = ("setting.js", "drawing.js", "plots.js", "controls.js", "plane.js", "main.js")
# What has a slider without being a formula's own. The radius can be learned, from 1; `reach` is where the axes end.
OTHERS = {
    "radius": Parameter("rho", 1.0, replace(positive, start=1.0)),
    "wNorm": Parameter("‖w‖", 1.0, positive),
    "reach": Parameter("‖x‖ up to", 3.0, positive),
}


def render() -> str:
    """Return the page as HTML that needs nothing else, with every formula registered now."""
    script = "\n".join([arithmetic(), *(_read(name) for name in PAGE)])
    return _read("page.html").replace("/* style */", _read("page.css")).replace("/* script */", script)


def arithmetic() -> str:
    """Return the JavaScript without the page: `m`, FORMULAS, the refused combinations, and `makeOperator`."""
    constants = {
        "ASIN_SLOPE_FLOOR": m.ASIN_SLOPE_FLOOR,
        "LEARNED": LEARNED,
        "WEIGHTINGS": WEIGHTINGS,
        "DEFAULTS": {name: argument.default for name, argument in signature(LayerOptions).parameters.items()},
        "OTHERS": {key: _describe_parameter(parameter) for key, parameter in OTHERS.items()},
        "REFUSALS": refusals(),
    }
    lines = [f"const {name} = {_json(value)};" for name, value in constants.items()]
    catalogues = {"magnitude": magnitudes(), "angular": angulars()}
    kinds = [f"{_json(kind)}: {{\n{''.join(map(_describe, known.values()))}}}" for kind, known in catalogues.items()]
    return "\n".join([*lines, f"const FORMULAS = {{{', '.join(kinds)}}};", *(_read(name) for name in ARITHMETIC)])


def refusals() -> dict[str, str]:
    """Return why the package refuses a combination, in its own words, by a key such as "sphere joint"."""
    found: dict[str, str] = {}
    some = next(iter(angulars()))
    null = json.dumps(None)  # as JavaScript spells it in a key

    def attempt(key: str, *options: Any, **more: Any) -> None:
        try:
            LayerOptions(*options, **more).operator()
        except ValueError as error:
            found[key] = str(error)

    for name, formula in magnitudes().items():
        attempt(f"{name} radius", name, some, radius=1.0)
        for weighting in WEIGHTINGS:
            attempt(f"{name} {weighting or null}", name, some, weighting)
            for learned in formula.learnable:
                attempt(f"{name}:{learned} {weighting or null}", f"{name}:{learned}={LEARNED}", some, weighting)
    for one, other in product(magnitudes().values(), angulars().values()):
        for learned in set(one.learnable) & set(other.learnable):
            attempt(
                f"{one.name} {other.name}:{learned}",
                f"{one.name}:{learned}={LEARNED}",
                f"{other.name}:{learned}={LEARNED}",
            )
    return found


def _describe(formula: Formula) -> str:
    facts = {
        "text": formula.text,
        "bounded": formula.bounded,
        "has_radius": formula.has_radius,
        "parameters": [_describe_parameter(parameter) for parameter in formula.parameters.values()],
    }
    return f"{_json(formula.name)}: {{\n...{_json(facts)},\nresults: {to_javascript(formula)},\n}},\n"


def _describe_parameter(parameter: Parameter) -> dict[str, Any]:
    bounds = parameter.range
    bounded = bounds.low > -float("inf")
    span = max(3.0, 4.0 * (parameter.default - bounds.low)) if bounded else 3.0
    slider = (
        [bounds.low + 0.01 * bounds.open, bounds.low + span]
        if bounded
        else [parameter.default - span, parameter.default + span]
    )
    return {
        "name": parameter.name,
        "symbol": _symbol(parameter.name),
        "default": parameter.default,
        "low": bounds.low if bounded else None,
        "open": bounds.open,
        "words": str(bounds),
        "start": bounds.start,
        "slider": slider,
    }


def _symbol(name: str) -> str:
    """Return the paper's letter for a name such as alpha; other names as they are."""
    try:
        return unicodedata.lookup(f"GREEK SMALL LETTER {name}")
    except KeyError:
        return name


def _json(value: Any) -> str:
    # inside <script>, "</" and "<!--" would end or change it, whatever string they stand in
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
