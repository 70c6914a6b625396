"""DeepFool: steps to the nearest decision boundary (Moosavi-Dezfooli et al., 2016)."""

import torch
from torch import Tensor, nn

from dcnet.robustness.checks import check, check_finite
from dcnet.robustness.losses import recordable, recording

_BEYOND = 1e-4  # of a step, in units where images go from 0 to 1: a little beyond the boundary


def deepfool(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    norm: str = "l2",
    iterations: int = 50,
    candidates: int = 10,
    overshoot: float = 0.02,
) -> tuple[Tensor, Tensor]:
    """Find the nearest decision boundary of every image, step by step.

    Args:
        model: from images in [0, 1] to logits, in evaluation mode.
        images: (N, C, H, W), in [0, 1].
        labels: the true classes (N,).
        norm: "l2" or "linf".
        iterations: steps at most.
        candidates: how many of the likeliest classes to look at.
        overshoot: how far to go beyond the boundary, as a share.

    Returns:
        Adversarial images in [0, 1], and the size of every perturbation (N,) in that norm: 0 where the image was
        misclassified before, infinite where no boundary was found.
    """
    check(model, images, labels)
    if norm not in ("l2", "linf"):
        raise ValueError(f"unknown norm {norm!r}; possible: l2, linf")
    if not isinstance(iterations, int) or iterations < 1 or not isinstance(candidates, int) or candidates < 2:
        raise ValueError(
            f"iterations must be at least 1 and candidates at least 2, got {iterations!r} and {candidates!r}"
        )
    found = images.clone()
    moved = torch.zeros_like(images)  # the perturbation so far, without overshoot
    solved = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    active = torch.arange(len(images), device=images.device)
    order = None
    for number in range(iterations + 1):
        with recording(model):
            x = recordable(found[active]).detach().requires_grad_()
            logits = check_finite(model, model(x), "under deepfool")
        done = logits.argmax(1) != labels[active]
        solved[active[done]] = True
        if number == iterations or bool(done.all()):
            break
        if order is None:  # the candidates are those of the image itself
            others = logits.detach().clone()
            others.scatter_(1, labels[:, None], float("inf"))
            order = others.argsort(1, descending=True)[:, : min(candidates, logits.shape[1])]
        classes = order[active]
        with recording(model):
            differences, slopes = _boundaries(logits, x, recordable(classes))
        check_finite(model, slopes, "under deepfool", "gradients in the images")
        if number == 0 and len(images) > 1 and not bool(slopes.any()) and bool((logits == logits[:1]).all()):
            raise ValueError(
                f"the model ({type(model).__name__}) gives the same logits for all {len(images)} images, and has "
                "no boundary DeepFool could look for",
            )
        step = _nearest(differences, slopes, norm)
        keep = ~done
        chosen = active[keep]
        moved[chosen] += step[keep]
        found[chosen] = (images[chosen] + (1.0 + overshoot) * moved[chosen]).clamp(0.0, 1.0)
        active = chosen
    change = (found - images).flatten(1)
    size = change.norm(dim=1) if norm == "l2" else change.abs().amax(1)
    return found.detach(), torch.where(solved, size, float("inf")).detach()


def _boundaries(logits: Tensor, x: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return each other candidate's logit minus the label's, (N, candidates − 1), and the slopes of these differences.

    The slopes are (N, candidates − 1, …).
    """
    chosen = logits.gather(1, classes)
    gradients = []
    for k in range(classes.shape[1]):
        (gradient,) = (
            torch.autograd.grad(chosen[:, k].sum(), x, retain_graph=True, allow_unused=True)
            if chosen.requires_grad
            else (None,)
        )
        gradients.append(torch.zeros_like(x) if gradient is None else gradient)
    every = torch.stack(gradients, 1)
    return (chosen[:, 1:] - chosen[:, :1]).detach(), every[:, 1:] - every[:, :1]


def _nearest(differences: Tensor, slopes: Tensor, norm: str) -> Tensor:
    """Return the shortest step to another class if the logits were linear: (N, …)."""
    flat = slopes.flatten(2)
    # in units of the largest slope, so that squares neither overflow nor vanish at any scale of the logits
    largest = flat.abs().amax(2)
    flat = flat / torch.where(largest > 0.0, largest, 1.0).unsqueeze(2)
    dual = flat.norm(dim=2) if norm == "l2" else flat.abs().sum(2)  # at least 1 where there is a slope
    distance = torch.where(largest > 0.0, differences.abs() / largest / dual, float("inf"))
    nearest = distance.argmin(1)
    rows = torch.arange(len(nearest), device=nearest.device)
    slope, length, reach = flat[rows, nearest], dual[rows, nearest], distance[rows, nearest]
    step = (reach + _BEYOND)[:, None] * (slope / length[:, None] if norm == "l2" else slope.sign())
    return torch.where(reach.isfinite()[:, None], step, 0.0).reshape(slopes[:, 0].shape)
