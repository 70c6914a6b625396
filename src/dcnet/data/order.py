"""Randomness of the data, as a function of the seed and of where a run is: nothing to save, and the same for any number of ranks."""

import numpy as np
from numpy.random import Generator

_ORDER, _BATCH, _IMAGE = range(3)


def epoch_order(length: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the examples in that epoch: a permutation int64 (length,)."""
    return np.random.default_rng((seed, _ORDER, epoch)).permutation(length)


def of_batch(seed: int, epoch: int, batch: int) -> Generator:
    """Random numbers for the batch of that number."""
    return np.random.default_rng((seed, _BATCH, epoch, batch))


def of_image(seed: int, epoch: int, image: int) -> Generator:
    """Random numbers for the image of that index."""
    return np.random.default_rng((seed, _IMAGE, epoch, image))


def share(count: int, rank: int, world: int) -> slice:
    """The part of so many examples that is this rank's."""
    return slice(count * rank // world, count * (rank + 1) // world)
