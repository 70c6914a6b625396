"""Robustness: attacks on any module from images in [0, 1] to logits, and whether their result can be believed."""

from dcnet.robustness.auto import auto
from dcnet.robustness.checkup import check_up
from dcnet.robustness.deepfool import deepfool
from dcnet.robustness.evaluate import ATTACKS, Attack, evaluate, parse_attack
from dcnet.robustness.gradient_attacks import EPS, bim, fgsm, pgd
from dcnet.robustness.losses import LOSSES
from dcnet.robustness.square import square

__all__ = [
    "ATTACKS",
    "EPS",
    "LOSSES",
    "Attack",
    "auto",
    "bim",
    "check_up",
    "deepfool",
    "evaluate",
    "fgsm",
    "parse_attack",
    "pgd",
    "square",
]
