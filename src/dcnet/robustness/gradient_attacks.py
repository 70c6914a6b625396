"""Attacks along the gradient: FGSM, BIM, PGD.

They return adversarial images, within ε of the given ones and within [0, 1].
"""

import torch
from torch import Tensor, nn

from dcnet.robustness.checks import check
from dcnet.robustness.losses import aims, cross_entropy, finite_slope, fooled, loss_named

EPS = 8 / 255


def fgsm(model: nn.Module, images: Tensor, labels: Tensor, eps: float = EPS, target: Tensor | None = None) -> Tensor:
    """Take one step of size ε along the sign of the gradient (Goodfellow et al., 2015).

    Args:
        model: from images in [0, 1] to logits, in evaluation mode.
        images: (N, C, H, W), in [0, 1].
        labels: the true classes (N,).
        eps: the largest change of a pixel.
        target: classes to reach instead of leaving the labels' (N,).
    """
    check(model, images, labels, eps)
    aimed, sign = aims(labels, target)
    gradient, _ = finite_slope(model, images, aimed, cross_entropy)
    return within(images + sign * eps * gradient.sign(), images, eps, "linf")


def bim(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    eps: float = EPS,
    step: float = 2 / 255,
    iterations: int = 20,
    target: Tensor | None = None,
) -> Tensor:
    """Take small FGSM steps, starting from the image itself (Kurakin et al., 2017).

    Args:
        model: from images in [0, 1] to logits, in evaluation mode.
        images: (N, C, H, W), in [0, 1].
        labels: the true classes (N,).
        eps: the largest change of a pixel.
        step: size of a step.
        iterations: number of steps; the paper takes 20 of 2/255.
        target: classes to reach instead of leaving the labels' (N,).
    """
    check(model, images, labels, eps)
    _check_steps(step, iterations, 1)
    aimed, sign = aims(labels, target)
    found = images
    for _ in range(iterations):
        gradient, _ = finite_slope(model, found, aimed, cross_entropy)
        found = within(found + sign * step * gradient.sign(), images, eps, "linf")
    return found


def pgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    eps: float = EPS,
    step: float | None = None,
    iterations: int = 20,
    norm: str = "linf",
    restarts: int = 1,
    random_start: bool = True,
    loss: str = "ce",
    target: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Ascend the loss by projected gradient steps from random starts (Madry et al., 2018).

    An image that is fooled is not changed any more. Of images that resist every restart, the one with the highest loss
    is returned.

    Args:
        model: from images in [0, 1] to logits, in evaluation mode.
        images: (N, C, H, W), in [0, 1].
        labels: the true classes (N,).
        eps: the largest change of a pixel.
        step: size of a step; by default 2.5·ε/iterations.
        iterations: number of steps.
        norm: of ε, "linf" or "l2".
        restarts: how often to start.
        random_start: start at a random place within ε; otherwise at the image.
        loss: "ce" (cross-entropy) or "margin".
        target: classes to reach instead of leaving the labels' (N,).
        generator: of the random starts.
    """
    check(model, images, labels, eps, norm)
    if norm not in ("linf", "l2"):
        raise ValueError(f"unknown norm {norm!r}; possible: linf, l2")
    step = 2.5 * eps / max(1, iterations) if step is None else step
    _check_steps(step, iterations, restarts)
    measure = loss_named(loss)
    aimed, sign = aims(labels, target)
    best, highest = images.clone(), torch.full(labels.shape, float("-inf"), device=images.device)
    active = torch.arange(len(images), device=images.device)  # not fooled yet
    for _ in range(restarts):
        base, own = images[active], aimed[active]
        found = _random_start(base, eps, norm, generator) if random_start else base
        for number in range(iterations + 1):
            gradient, logits = finite_slope(model, found, own, measure)
            height = sign * measure(logits, own)
            done = fooled(logits, labels[active], None if target is None else target[active])
            height = torch.where(done, float("inf"), height)
            better = height > highest[active]
            best[active[better]] = found[better]
            highest[active[better]] = height[better]
            left = ~done
            active, base, own, found, gradient = active[left], base[left], own[left], found[left], gradient[left]
            if number == iterations or len(active) == 0:
                break
            found = within(found + sign * step * _direction(gradient, norm), base, eps, norm)
        if len(active) == 0:
            break
    return best


def _check_steps(step: float, iterations: int, restarts: int) -> None:
    if not step >= 0.0:
        raise ValueError(f"step must be a number ≥ 0, got {step!r}")
    for name, value in (("iterations", iterations), ("restarts", restarts)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a whole number ≥ 1, got {value!r}")


def lengths(x: Tensor) -> Tensor:
    """Return the ℓ2 norm of every image, shaped to multiply images."""
    norms: Tensor = x.flatten(1).norm(dim=1)
    return norms.reshape(-1, *[1] * (x.dim() - 1))


def _direction(gradient: Tensor, norm: str) -> Tensor:
    """Return the steepest direction of size 1; none where the gradient is zero."""
    if norm == "linf":
        return gradient.sign()
    length = lengths(gradient)
    return torch.where(length > 0.0, gradient / length.clamp_min(1e-30), 0.0)


def within(found: Tensor, images: Tensor, eps: float, norm: str) -> Tensor:
    """Return the point, projected into the ball around the image and into [0, 1]."""
    if norm == "linf":
        found = torch.maximum(torch.minimum(found, images + eps), images - eps)
    else:
        change = found - images
        length = lengths(change)
        # slightly inside, so that rounding does not lead outside again
        found = images + change * torch.where(length > eps, eps * (1.0 - 1e-6) / length.clamp_min(1e-30), 1.0)
    return found.clamp(0.0, 1.0).detach()


def _random_start(images: Tensor, eps: float, norm: str, generator: torch.Generator | None) -> Tensor:
    """Return a point drawn from the ball: uniformly, for ℓ2 too."""
    if norm == "linf":
        noise = torch.rand(images.shape, generator=generator, device=images.device, dtype=images.dtype)
        return within(images + eps * (2.0 * noise - 1.0), images, eps, norm)
    noise = torch.randn(images.shape, generator=generator, device=images.device, dtype=images.dtype)
    radius = torch.rand(len(images), generator=generator, device=images.device, dtype=images.dtype) ** (
        1.0 / images[0].numel()
    )
    return within(
        images + eps * radius.reshape(-1, *[1] * (images.dim() - 1)) * noise / lengths(noise), images, eps, norm
    )
