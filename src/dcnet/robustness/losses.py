"""The losses that attacks increase, and their gradients in the images."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.robustness.checks import check_finite
from dcnet.util.suggest import nearest

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each image, which training minimizes: (N,)."""
    return F.cross_entropy(logits.float(), labels, reduction="none")


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the largest other logit minus the label's (N,); above 0 the image is misclassified.

    It has a gradient even where the softmax is saturated.
    """
    logits = logits.float()
    own = logits.gather(1, labels[:, None])
    others = logits.masked_fill(F.one_hot(labels, logits.shape[1]).bool(), float("-inf"))
    return others.max(1).values - own.squeeze(1)


LOSSES: dict[str, Loss] = {"ce": cross_entropy, "margin": margin}


def loss_named(name: str) -> Loss:
    """Return the loss of that name."""
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}.{nearest(name, LOSSES)} Possible: {', '.join(LOSSES)}")
    return LOSSES[name]


@contextmanager
def recording(model: nn.Module) -> Iterator[None]:
    """Record for gradients, also where the caller is in `torch.no_grad` or `torch.inference_mode`."""
    left = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    try:
        with left, torch.enable_grad():
            yield
    except RuntimeError as error:
        if any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())):
            raise ValueError(
                f"the model ({type(model).__name__}) was made inside torch.inference_mode, so that no gradient passes "
                "it; make it outside, or attack copy.deepcopy(model), copied outside"
            ) from error
        raise


def recordable(tensor: Tensor) -> Tensor:
    """Return the tensor; a copy of one that was made in `torch.inference_mode`, as autograd keeps none of these."""
    return tensor.clone() if tensor.is_inference() else tensor


def slope(model: nn.Module, images: Tensor, labels: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Return the gradient of the loss in the images, and the logits (detached).

    A model that blocks gradients gives zeros.
    """
    with recording(model):
        images, labels = recordable(images).detach().requires_grad_(), recordable(labels)
        logits = model(images)
        total = loss(logits, labels).sum()
        if not total.requires_grad:
            return torch.zeros_like(images), logits.detach()
        (gradient,) = torch.autograd.grad(total, images, allow_unused=True)
    return torch.zeros_like(images) if gradient is None else gradient.detach(), logits.detach()


def finite_slope(model: nn.Module, images: Tensor, labels: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Return what `slope` does; raise if either is not finite. Unlike `slope`, it waits for the device."""
    gradient, logits = slope(model, images, labels, loss)
    check_finite(model, logits, "under attack")
    check_finite(model, gradient, "under attack", "gradients in the images")
    return gradient, logits


def aims(labels: Tensor, target: Tensor | None) -> tuple[Tensor, float]:
    """Return the labels for the loss, and 1 to increase it (away from them) or −1 to decrease it (toward a target)."""
    if target is None:
        return labels, 1.0
    if target.shape != labels.shape or target.is_floating_point():
        raise ValueError(f"target must be whole numbers like the labels, got {tuple(target.shape)} of {target.dtype}")
    if bool((target == labels).any()):
        raise ValueError("target must differ from the label of every image")
    return target, -1.0


def fooled(logits: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
    """Return whether an attack has reached its goal for each image: (N,)."""
    predicted = logits.argmax(1)
    return predicted != labels if target is None else predicted == target
