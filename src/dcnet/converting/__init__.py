"""Conversion of models between plain and decoupled layers, in both directions, and what a saved model says of it."""

from dcnet.converting.convert import DecoupleReport, decouple_
from dcnet.converting.couple import CoupleReport, couple_
from dcnet.converting.plain_state import plain_state_dict
from dcnet.converting.record import conversion_of
from dcnet.converting.restore import from_pretrained, restore_conversion_

__all__ = [
    "CoupleReport",
    "DecoupleReport",
    "conversion_of",
    "couple_",
    "decouple_",
    "from_pretrained",
    "plain_state_dict",
    "restore_conversion_",
]
