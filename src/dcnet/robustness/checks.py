"""Checks of what an attack is given."""

import math

import torch
from torch import Tensor, nn

from dcnet.util.text import count


def check_eps(eps: float, norm: str = "linf") -> float:
    """Return ε as a float; raise unless it is finite, not negative, and in ℓ∞ at most 1, the range of a pixel."""
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not math.isfinite(eps) or eps < 0.0:
        raise ValueError(
            f"eps must be a finite number ≥ 0, in units where images go from 0 to 1 (8/255 = 0.0314), got {eps!r}"
        )
    if norm == "linf" and eps > 1.0:
        meant = f"; did you mean {eps:g}/255?" if eps <= 255.0 else ""
        raise ValueError(f"eps={eps:g} is more than 1, the whole range of a pixel (images go from 0 to 1){meant}")
    return float(eps)


def check_images(images: Tensor, labels: Tensor) -> None:
    """Raise unless these are images in [0, 1] with a label each."""
    if images.dim() < 2 or not images.is_floating_point():
        raise ValueError(
            f"images must be floating-point (N, …), got {tuple(images.shape)} of {images.dtype}; divide bytes by 255"
        )
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise ValueError(
            f"labels must be whole numbers, one for each of the {len(images)} images, got {tuple(labels.shape)} "
            f"of {labels.dtype}"
        )
    if len(images) == 0:
        raise ValueError("no images")
    low, high = float(images.min()), float(images.max())
    if not (low >= 0.0 and high <= 1.0):  # also false for NaN
        raise ValueError(
            f"images must lie in [0, 1], got values from {low:.4g} to {high:.4g}; normalization belongs into the model"
        )


def check_evaluating(model: nn.Module) -> None:
    """Raise if a part of the model is in training mode: statistics would mix the images, and change."""
    training = [name or type(model).__name__ for name, module in model.named_modules() if module.training]
    if training:
        more = f" and {count(len(training) - 1, 'more part')}" if len(training) > 1 else ""
        raise ValueError(f"the model is in training mode ({training[0]!r}{more}); call model.eval() first")


def check_finite(model: nn.Module, values: Tensor, where: str, what: str = "logits") -> Tensor:
    """Return the values (N, …) of a model; raise if one is NaN or infinite, which argmax would accept silently.

    where: the images they belong to, in words. what: what the values are.
    """
    finite = values.flatten(1).isfinite().all(1)
    if not bool(finite.all()):
        first = int((~finite).nonzero()[0])
        odd = values[first].detach().flatten()
        odd = odd[~odd.isfinite()][0]
        raise ValueError(
            f"the model ({type(model).__name__}) gives {what} that are not finite for {int((~finite).sum())} of "
            f"{len(finite)} images, "
            f"{where}: {float(odd)} for the one at {first} of these. Such a model cannot be judged",
        )
    return values


@torch.no_grad()
def check_logits(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Return the number of classes; raise unless the model gives logits of as many classes as the labels need."""
    logits = model(images[: min(16, len(images))])
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"the model must give logits (N, classes), got {got}")
    classes = logits.shape[1]
    check_finite(model, logits, "on clean images")
    if classes < 2:
        raise ValueError(
            f"the model ({type(model).__name__}) knows {classes} class; nothing can be mistaken for another, and "
            "attacks need two"
        )
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(
            f"labels go from {int(labels.min())} to {int(labels.max())}, but the model knows the classes 0 to "
            f"{classes - 1}"
        )
    sums = logits.float().sum(1)
    if bool((logits >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
        raise ValueError(
            "the model gives probabilities (rows that add up to 1); attacks need the logits before the softmax"
        )
    return classes


def check(model: nn.Module, images: Tensor, labels: Tensor, eps: float = 0.0, norm: str = "linf") -> int:
    """Check everything that an attack needs; return the number of classes."""
    check_eps(eps, norm)
    check_images(images, labels)
    check_evaluating(model)
    return check_logits(model, images, labels)
