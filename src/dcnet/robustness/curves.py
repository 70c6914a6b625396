"""Accuracy as an attack grows: against ε, and against its steps."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dcnet.robustness.evaluate import Attack, evaluate, parse_attack
from dcnet.robustness.gradient_attacks import EPS


def accuracy_by_eps(
    model: nn.Module, images: Tensor, labels: Tensor, eps: Sequence[float], attack: str | Attack = "pgd", **options: Any
) -> list[dict[str, float]]:
    """The accuracy, in percent, under the attack at each ε; options as `evaluate` takes them."""
    chosen = parse_attack(attack) if isinstance(attack, str) else attack
    if chosen.name == "deepfool":
        raise ValueError("deepfool looks for the smallest change itself, and has no ε; its sizes are the curve")
    found = []
    for size in eps:
        result = evaluate(model, images, labels, [chosen], size, **options)
        found.append({"eps": float(size), "accuracy": result["attacks"][0]["accuracy"]})
    return found


def accuracy_by_steps(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    steps: Sequence[int],
    attack: str | Attack = "pgd",
    eps: float = EPS,
    **options: Any,
) -> list[dict[str, float]]:
    """The accuracy, in percent, after so many steps of the attack; its step size is the attack's own, or follows from ε and the steps."""
    chosen = parse_attack(attack) if isinstance(attack, str) else attack
    if chosen.name not in ("bim", "pgd"):
        raise ValueError(f"{chosen.name} has no steps; possible: bim, pgd")
    found = []
    for count in steps:
        timed = Attack(chosen.name, {**chosen.parameters, "iterations": count})
        result = evaluate(model, images, labels, [timed], eps, **options)
        found.append({"steps": count, "accuracy": result["attacks"][0]["accuracy"]})
    return found
