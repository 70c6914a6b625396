"""Images before and after an attack, with the network's predictions."""

import base64
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.robustness import pgd

STEPS = 5


def adversarial_examples(
    model: nn.Module, images: Tensor, labels: Tensor, eps: float, count: int = 6
) -> list[dict[str, Any]]:
    """Return some of the images that the network gets right, starting with those that PGD makes it get wrong.

    Args:
        model: from images in [0, 1] to logits, in evaluation mode.
        images: (N, C, H, W) in [0, 1].
        labels: their classes (N,).
        eps: the largest change of a pixel.
        count: how many examples to return at most.

    Returns:
        For each example the image before and after as text, ε, its label, and what the network predicts for both.
    """
    with torch.no_grad():
        before = model(images).softmax(1)
    right = (
        (before.argmax(1) == labels).nonzero().squeeze(1)[: count + 2]
    )  # a few more than are shown, as not all are fooled
    images, labels, before = images[right], labels[right], before[right]
    if not len(labels):
        return []
    changed = pgd(model, images, labels, eps, eps / 2.0, STEPS, generator=torch.Generator(images.device).manual_seed(0))
    with torch.no_grad():
        after = model(changed).softmax(1)
    fooled = after.argmax(1) != labels
    chosen = torch.cat([fooled.nonzero().squeeze(1), (~fooled).nonzero().squeeze(1)])[:count].tolist()
    return [
        {
            "image": encoded(images[i]),
            "adversarial": encoded(changed[i]),
            "channels": images.shape[1],
            "size": images.shape[2],
            "eps": eps,
            "label": int(labels[i]),
            "before": {"class": int(before[i].argmax()), "confidence": round(float(before[i].max()), 4)},
            "after": {"class": int(after[i].argmax()), "confidence": round(float(after[i].max()), 4)},
        }
        for i in chosen
    ]


def encoded(image: Tensor) -> str:
    """Return an image in [0, 1] as base64 of float16, in which 1/255 is not lost: (C, H, W), row by row."""
    return base64.b64encode(image.detach().cpu().half().contiguous().numpy().tobytes()).decode()


def decoded(text: str, channels: int, size: int) -> Tensor:
    """Return the image again (C, H, W)."""
    return (
        torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float16).reshape(channels, size, size).float()
    )
