"""The loss that networks are trained with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.training.recipe import Recipe

FLOOR = 1e-4  # what the authors' code adds to a probability before its logarithm


def classification_loss(logits: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """Return the recipe's loss, summed over the images; labels: (N,), or shares of the classes (N, classes)."""
    smoothing = recipe.label_smoothing
    if recipe.loss == "cross-entropy":
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    with torch.autocast(logits.device.type, enabled=False):
        logarithms = torch.log(logits.float().softmax(1) + FLOOR)  # a floor under the gradient of badly wrong images
        right = (logarithms * labels).sum() if labels.dim() == 2 else logarithms.gather(1, labels[:, None]).sum()
        return -(1.0 - smoothing) * right - smoothing * logarithms.mean(1).sum()


def likeliest(labels: Tensor) -> Tensor:
    """Return the class of each image; for mixed images, the class with the largest share."""
    return labels.argmax(1) if labels.dim() == 2 else labels
