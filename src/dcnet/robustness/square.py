"""The Square attack (Andriushchenko et al., 2020), for ℓ∞: random squares, kept if they raise the margin.

It only uses logits.
"""

import math

import torch
from torch import Tensor, nn

from dcnet.robustness.checks import check, check_finite
from dcnet.robustness.gradient_attacks import EPS, within
from dcnet.robustness.losses import margin

# the share of changed pixels is halved after each of these queries, of 10,000
_HALVED = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)


@torch.no_grad()
def square(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    eps: float = EPS,
    queries: int = 1000,
    share: float = 0.8,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return adversarial images within ε in ℓ∞ and within [0, 1].

    Args:
        model: from images in [0, 1] to logits, in evaluation mode.
        images: (N, C, H, W) in [0, 1].
        labels: their classes (N,).
        eps: the largest change of a pixel.
        queries: at most this many for an image.
        share: of pixels changed at first.
        generator: of the random squares.
    """
    check(model, images, labels, eps)
    if images.dim() != 4:
        raise ValueError(f"the Square attack needs images (N, C, H, W), got {tuple(images.shape)}")
    if not isinstance(queries, int) or queries < 1:
        raise ValueError(f"queries must be a whole number ≥ 1, got {queries!r}")
    _, channels, height, width = images.shape
    device = images.device

    def signs(*shape: int) -> Tensor:
        return torch.randint(0, 2, shape, generator=generator, device=device).to(images.dtype) * 2.0 - 1.0

    def margins(tried: Tensor, their: Tensor) -> Tensor:
        return margin(check_finite(model, model(tried), "under square"), their)

    best = within(images + eps * signs(len(images), channels, 1, width), images, eps, "linf")  # vertical stripes
    highest = margins(best, labels)
    already = margins(images, labels)
    better = already > highest  # the image itself, if it is further on the wrong side than with stripes
    best[better], highest[better] = images[better], already[better]
    for query in range(1, queries):
        active = (highest <= 0.0).nonzero().squeeze(1)
        if len(active) == 0:
            break
        changed = share / 2 ** sum(query * 10_000 / queries > after for after in _HALVED)
        side = max(1, min(min(height, width), round(math.sqrt(changed * height * width))))
        count = len(active)
        top = torch.randint(0, height - side + 1, (count, 1), generator=generator, device=device)
        left = torch.randint(0, width - side + 1, (count, 1), generator=generator, device=device)
        rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
        inside = ((rows >= top) & (rows < top + side))[:, None, :, None] & (
            (columns >= left) & (columns < left + side)
        )[:, None, None, :]
        base = images[active]
        tried = torch.where(inside, base + eps * signs(count, channels, 1, 1), best[active])
        tried = within(tried, base, eps, "linf")
        height_now = margins(tried, labels[active])
        improved = height_now > highest[active]
        best[active[improved]] = tried[improved]
        highest[active[improved]] = height_now[improved]
    return best
