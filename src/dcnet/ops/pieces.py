"""Work on a CPU in pieces that fit its cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

# So many elements a thread: few enough for intermediate results to stay in the cache and for a low peak memory, many enough that Python's
# share of the time is small. Measured on two cores (benchmarks/NOTES.md).
PIECE = 262144


def pieces(x: Tensor) -> Iterator[slice]:
    """Slices of the first dimension; all of it at once where there is no CPU cache to fit."""
    per_piece = PIECE * torch.get_num_threads() if x.device.type == "cpu" else x.numel()
    rows = max(1, per_piece * x.shape[0] // max(1, x.numel()))
    for start in range(0, x.shape[0] if x.numel() else 0, rows):
        yield slice(start, start + rows)
