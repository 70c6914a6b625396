"""Work on a CPU in pieces that fit its cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

# So many elements a thread: few enough for intermediate results to stay in the cache and for a low peak memory, many enough that Python's
# share of the time is small. Measured on two cores (benchmarks/NOTES.md).
PIECE = 262144


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors piece by piece along their first dimension, by the size of the first; whole where there is no CPU cache to fit."""
    x = tensors[0]
    per_piece = PIECE * torch.get_num_threads() if x.device.type == "cpu" else x.numel()
    rows = max(1, per_piece * x.shape[0] // max(1, x.numel()))
    if x.numel() == 0:
        return iter(())
    return iter([tensors]) if rows >= x.shape[0] else zip(*(tensor.split(rows) for tensor in tensors), strict=True)
