"""Call compiled functions with tensors."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dcnet.ops.cpu.native.compiler import parallel

# Numbers to compute, below which one thread is used. A second thread takes some 10 µs to start, and would hardly help.
# On a busy machine it has to wait for a core, and one thread is done much earlier.
ENOUGH_FOR_THREADS = 65536


def addresses(tensors: Sequence[Tensor | None]) -> Any:
    """Return the addresses of the tensors as a C array; NULL for None."""
    return pointers([None if t is None else t.data_ptr() for t in tensors])


def pointers(places: Sequence[int | None]) -> Any:
    """Return addresses as a C array; NULL for None."""
    return (ctypes.c_void_p * max(1, len(places)))(*places)


def longs(numbers: Sequence[int]) -> Any:
    """Return whole numbers as a C array."""
    return (ctypes.c_long * max(1, len(numbers)))(*numbers)


def call(function: Any, *arguments: Any, numbers: int = ENOUGH_FOR_THREADS) -> None:
    """Call a function on as many threads as PyTorch uses. Its last two parameters say how it starts them.

    numbers: how many numbers it computes; few of them are left to one thread.
    """
    threads = torch.get_num_threads() if numbers >= ENOUGH_FOR_THREADS else 1
    if function(*arguments, ctypes.c_void_p(parallel() if threads > 1 else None), ctypes.c_long(threads)):
        raise MemoryError("no memory is left for the buffers of a decoupled layer")
