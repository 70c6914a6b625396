"""Formulas: every magnitude h and angular function g, written once with value and slopes."""

import dcnet.formulas.angulars
import dcnet.formulas.magnitudes  # noqa: F401  importing registers what the paper has
from dcnet.formulas import m
from dcnet.formulas.catalogue import (
    LEARNED,
    Choice,
    Formula,
    Learnable,
    angulars,
    at_least,
    choose,
    learnable,
    look_up,
    magnitudes,
    positive,
)
from dcnet.formulas.numbers import parse_number
from dcnet.formulas.registration import angular, magnitude, on_replacement

__all__ = [
    "LEARNED",
    "Choice",
    "Formula",
    "Learnable",
    "angular",
    "angulars",
    "at_least",
    "choose",
    "learnable",
    "look_up",
    "m",
    "magnitude",
    "magnitudes",
    "on_replacement",
    "parse_number",
    "positive",
]
