"""Randomness of the data, as a function of the seed and of where a run is.

There is nothing to save, and it is the same for any number of ranks.
"""

import numpy as np
from numpy.random import Generator

_ORDER, _BATCH, _IMAGE = range(3)


def epoch_order(length: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the examples in that epoch: a permutation int64 (length,)."""
    return np.random.default_rng((seed, _ORDER, epoch)).permutation(length)


def of_batch(seed: int, epoch: int, batch: int) -> Generator:
    """Return random numbers for the batch of that number."""
    return np.random.default_rng((seed, _BATCH, epoch, batch))


def of_image(seed: int, epoch: int, image: int) -> Generator:
    """Return random numbers for the image of that index."""
    return np.random.default_rng((seed, _IMAGE, epoch, image))


def share(count: int, rank: int, world: int) -> slice:
    """Return this rank's part of that many examples."""
    return slice(count * rank // world, count * (rank + 1) // world)
