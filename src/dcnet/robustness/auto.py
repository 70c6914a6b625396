"""AutoAttack (Croce and Hein, 2020), by the package pyautoattack."""

from typing import Any

import torch
from torch import Tensor, nn

from dcnet.robustness.checks import check, check_finite
from dcnet.robustness.gradient_attacks import EPS
from dcnet.robustness.losses import recordable, recording


def import_autoattack() -> Any:
    """Return the class that makes the attack; raise if its package is not installed."""
    try:
        from pyautoattack import AutoAttack
    except ImportError as error:
        raise ImportError("AutoAttack is not installed: pip install 'dcnet[attacks]'") from error
    return AutoAttack


def auto(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    eps: float = EPS,
    norm: str = "linf",
    batch: int = 500,
    seed: int = 0,
) -> Tensor:
    """Return adversarial images made by the standard version of AutoAttack.

    It runs APGD with two losses, FAB and Square, each on the survivors of the one before. The package pyautoattack must
    be installed.

    Args:
        model: from images in [0, 1] to logits, in evaluation mode.
        images: (N, C, H, W) in [0, 1].
        labels: their classes (N,).
        eps: the largest size of a change, in `norm`.
        norm: "linf" or "l2".
        batch: images at once.
        seed: of random starts.
    """
    check(model, images, labels, eps, norm)
    names = {"linf": "Linf", "l2": "L2"}
    if norm not in names:
        raise ValueError(f"unknown norm {norm!r}; possible: linf, l2")
    attack = import_autoattack()(model, norm=names[norm], eps=eps, version="standard", device=images.device, seed=seed)
    found: Tensor
    with recording(model):
        images, labels = recordable(images), recordable(labels)
        # A layer's first call prepares its backward pass, which AutoAttack would mistake for a defense with gradients
        model(images[:batch])
        found, _ = attack.run_standard_evaluation(images, labels, batch_size=batch)
    with torch.no_grad():
        for some in found.split(batch):
            check_finite(model, model(some), "under auto")
    return found.detach()
