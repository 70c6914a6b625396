"""Evaluate a network on every test image once, over all ranks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.data import ImageFolder, Resident
from dcnet.training.ranks import Ranks


@dataclass(frozen=True)
class Evaluation:
    """An evaluation on the test images.

    Attributes:
        loss: the mean cross-entropy.
        counts: the number of images of each class.
        correct: how many of these were classified right.
        correct5: how many labels were among the five largest logits.
    """

    loss: float
    counts: Tensor
    correct: Tensor
    correct5: int

    @property
    def accuracy(self) -> float:
        """In percent."""
        return 100.0 * int(self.correct.sum()) / max(1, int(self.counts.sum()))

    @property
    def top5_accuracy(self) -> float:
        """In percent; a label among the five largest logits counts as right."""
        return 100.0 * self.correct5 / max(1, int(self.counts.sum()))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: "Resident | ImageFolder",
    ranks: Ranks,
    autocast: Any,
    order: torch.memory_format = torch.contiguous_format,
) -> Evaluation:
    """Evaluate the model on the test images, in evaluation mode; its mode is restored afterward."""
    batch = 1000 if ranks.device.type == "cuda" else 200  # a CPU's cache is small
    modes = {module: module.training for module in model.modules()}
    model.eval()
    classes = len(data.classes)
    counts = torch.zeros(2, classes, dtype=torch.float64, device=ranks.device)
    loss, five = (torch.zeros(1, dtype=torch.float64, device=ranks.device) for _ in range(2))
    for images, labels in data.test_batches(batch, ranks.rank, ranks.world):
        with autocast():
            logits = model(images.contiguous(memory_format=order)).float()
        loss += F.cross_entropy(logits, labels, reduction="sum").double()
        right = (logits.argmax(1) == labels).double()
        five += (logits.topk(min(5, classes)).indices == labels[:, None]).sum()
        counts[0] += torch.bincount(labels, minlength=classes)
        counts[1].index_add_(0, labels, right)
    ranks.sum(loss)
    ranks.sum(five)
    ranks.sum(counts)
    for module, mode in modes.items():
        module.training = mode
    total, right = counts.long().cpu()
    return Evaluation(float(loss) / max(1, int(total.sum())), total, right, int(five))
