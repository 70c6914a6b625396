"""Work on a CPU in chunks that fit its cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

# Elements of a chunk for each thread: few enough that intermediate results stay in the cache and peak memory stays low,
# and enough that Python's share of the time is small. Measured on two cores (benchmarks/NOTES.md).
CHUNK = 262144


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors in chunks along their first dimension; on other devices than a CPU, yield them whole.

    The size of the first tensor decides how many rows a chunk has.
    """
    x = tensors[0]
    per_chunk = CHUNK * torch.get_num_threads() if x.device.type == "cpu" else x.numel()
    rows = max(1, per_chunk * x.shape[0] // max(1, x.numel()))
    if x.numel() == 0:
        return iter(())
    return iter([tensors]) if rows >= x.shape[0] else zip(*(tensor.split(rows) for tensor in tensors), strict=True)
