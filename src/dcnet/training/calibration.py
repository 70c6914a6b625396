"""The running averages of an evaluation: estimated again, since those of training lag behind the weights.

In the first epochs the lag is large, and it grows from layer to layer. Because of it alone, a network that is right on
83 % of the training images can be at chance on the test images.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dcnet.data import ImageFolder, Resident
from dcnet.layers import average_statistics_, recalibrate_
from dcnet.layers.statistics import restore_statistics_, statistics_of
from dcnet.training.adversarial import seen_in_training
from dcnet.training.state import TrainingState


@contextmanager
def calibrated(state: TrainingState, data: "Resident | ImageFolder", per_epoch: int) -> Iterator[None]:
    """Give the evaluated network averages that fit its weights; restore those of training at the end.

    Call it on all ranks.

    The next checkpoint gets the new averages beside the old ones, for use when the network is loaded. Weights,
    optimizer and random states do not change.
    """
    model = state.evaluated
    before = statistics_of(model)
    if not state.recipe.recalibrate or not before:
        yield
        return
    with torch.random.fork_rng([state.ranks.device] if state.ranks.device.type == "cuda" else []), state.autocast():
        batches = _batches(state, data, per_epoch)
        # adversarial images are made first, while the model still has its averages
        recalibrate_(model, batches if state.recipe.adversarial == "none" else list(batches))
    try:
        average_statistics_(model)
        state.calibrated = statistics_of(model)
        yield
    finally:
        restore_statistics_(model, before)


def _batches(state: TrainingState, data: "Resident | ImageFolder", per_epoch: int) -> Iterator[Tensor]:
    """Yield the inputs of this rank's network in the last training steps of the epoch.

    These are parts of batches, adversarial if the recipe says so.
    """
    recipe, ranks = state.recipe, state.ranks
    first = max(0, per_epoch - recipe.recalibrate)
    for images, labels in data.train_batches(
        (state.step - 1) // per_epoch, first, recipe.batch, ranks.rank, ranks.world
    ):
        ordered = images.contiguous(memory_format=state.order)
        for some, their in zip(ordered.chunk(recipe.accumulate), labels.chunk(recipe.accumulate), strict=True):
            yield seen_in_training(state.model, some, their, recipe)
