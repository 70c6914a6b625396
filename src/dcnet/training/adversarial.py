"""Adversarial training: FGSM (the paper's), PGD (Madry et al., 2018), TRADES (Zhang et al., 2019)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.robustness.gradient_attacks import within
from dcnet.robustness.losses import Loss, cross_entropy, slope
from dcnet.training.loss import classification_loss
from dcnet.training.recipe import Recipe

_NEAR = 1e-3  # deviation of the noise that TRADES starts with: at the image itself its loss has no gradient


def adversarial_images(model: nn.Module, images: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """Return adversarial images within the recipe's ε, made on the model in evaluation mode.

    So its statistics do not change, and do not mix the images of a batch.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        eps = recipe.adversarial_eps
        loss: Loss = cross_entropy
        if recipe.adversarial_labels == "predicted":  # the true ones leak into images that are made in one step
            with torch.no_grad():
                labels = model(images).argmax(1)
        if recipe.adversarial == "fgsm":
            return _climb(model, images, images, labels, loss, eps, eps, 1)
        if recipe.adversarial == "trades":
            with torch.no_grad():
                loss = _divergence_from(model(images))
            start = within(images + _NEAR * torch.randn_like(images), images, eps, "linf")
        else:
            start = within(images + eps * (2.0 * torch.rand_like(images) - 1.0), images, eps, "linf")
        return _climb(model, start, images, labels, loss, eps, recipe.adversarial_step, recipe.adversarial_steps)
    finally:
        for module, mode in modes:
            module.training = mode


def seen_in_training(model: nn.Module, images: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """Return what the network sees in a training step: the images, adversarial ones instead, or both."""
    if recipe.adversarial == "none":
        return images
    changed = adversarial_images(model, images, labels, recipe)
    return torch.cat([images, changed]) if _sees_both(recipe) else changed


def _sees_both(recipe: Recipe) -> bool:
    return recipe.adversarial == "trades" or recipe.adversarial_share < 1.0


def _climb(
    model: nn.Module, start: Tensor, images: Tensor, labels: Tensor, loss: Loss, eps: float, step: float, steps: int
) -> Tensor:
    """Take steps along the sign of the gradient.

    They do not check their success, so that nothing waits for a GPU.
    """
    found = start
    for _ in range(steps):
        gradient, _ = slope(model, found, labels, loss)
        found = within(found + step * gradient.sign(), images, eps, "linf")
    return found


def _divergence_from(clean: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return KL(clean‖·) of the predicted distributions, for each image (N,)."""
    expected = clean.detach().float().log_softmax(1)
    return lambda logits, labels: F.kl_div(
        logits.float().log_softmax(1), expected, reduction="none", log_target=True
    ).sum(1)


def adversarial_loss(
    net: Callable[[Tensor], Tensor], images: Tensor, changed: Tensor, labels: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Return the loss, summed over the images, and the logits for the training accuracy.

    These are of the clean images, if the network sees them.
    """

    share = recipe.adversarial_share
    if not _sees_both(recipe):
        logits = net(changed)
        return classification_loss(logits, labels, recipe), logits
    clean, attacked = net(torch.cat([images, changed])).chunk(2)  # together, as DistributedDataParallel wants it
    if recipe.adversarial == "trades":
        divergence = F.kl_div(
            attacked.float().log_softmax(1), clean.float().log_softmax(1), reduction="sum", log_target=True
        )
        return classification_loss(clean, labels, recipe) + recipe.trades_beta * divergence, clean
    of_both = [classification_loss(logits, labels, recipe) for logits in (clean, attacked)]
    return (1.0 - share) * of_both[0] + share * of_both[1], clean
