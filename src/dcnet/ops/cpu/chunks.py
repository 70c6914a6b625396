"""Work on a CPU in chunks that fit its cache."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

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


def row_slices(x: Tensor, elements: int, least: int) -> list[slice]:
    """Return slices along the first dimension of x, of equal length, with about `elements` elements for each thread.

    There are about `least` slices at least, though never more than rows.
    """
    count = min(x.shape[0], max(least, round(x.numel() / (elements * torch.get_num_threads()))))
    rows = -(-x.shape[0] // count)
    return [slice(start, min(start + rows, x.shape[0])) for start in range(0, x.shape[0], rows)]


_MOST = 2**23  # elements of scratch memory that a thread keeps: 32 MiB


class _Kept(threading.local):
    """The scratch memory of a thread, one buffer for each dtype, and its parts by (dtype, shape, how many)."""

    def __init__(self) -> None:
        self.buffers: dict[torch.dtype, Tensor] = {}
        self.parts: dict[Any, list[Tensor]] = {}


_kept = _Kept()


def scratch(count: int, chunk: Sequence[Tensor]) -> list[Tensor]:
    """Return `count` buffers with the shape of the largest tensor of a chunk, in its widest dtype.

    The next call in the same thread overwrites them. Where possible they are the same memory each time: the C library
    returns memory of this size to the operating system, and fetching a new page takes longer than the computation that
    fills it.
    """
    if count == 0:
        return []
    largest = max(chunk, key=Tensor.numel)
    dtype = max([tensor.dtype for tensor in chunk], key=_bytes)
    shape, elements = largest.shape, largest.numel()
    if largest.device.type != "cpu" or type(largest) is not Tensor or count * elements > _MOST:
        return [torch.empty(shape, dtype=dtype, device=largest.device) for _ in range(count)]
    parts = _kept.parts.get((dtype, shape, count))
    if parts is None:
        buffer = _kept.buffers.get(dtype)
        with torch.inference_mode(False):  # memory made in inference mode can be used nowhere else
            if buffer is None or buffer.numel() < count * elements:
                buffer = _kept.buffers[dtype] = torch.empty(count * elements, dtype=dtype)
                _kept.parts.clear()
            if len(_kept.parts) > 256:
                _kept.parts.clear()
            parts = [part.view(shape) for part in buffer[: count * elements].split(elements)]
        _kept.parts[dtype, shape, count] = parts
    return parts


def _bytes(dtype: torch.dtype) -> int:
    return dtype.itemsize
