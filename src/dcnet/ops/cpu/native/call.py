"""Call compiled functions with tensors."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dcnet.ops.cpu.native.compiler import parallel

# Numbers to compute with: for fewer, a second thread, which takes some 10 µs to begin, hardly helps, and on a machine
# in use, where it waits for a core, one is done much earlier.
ENOUGH_FOR_THREADS = 65536


def addresses(tensors: Sequence[Tensor | None]) -> Any:
    """Return where the tensors lie, as C takes it; NULL for None."""
    return pointers([None if t is None else t.data_ptr() for t in tensors])


def pointers(places: Sequence[int | None]) -> Any:
    """Return addresses as C takes them; NULL for None."""
    return (ctypes.c_void_p * max(1, len(places)))(*places)


def longs(numbers: Sequence[int]) -> Any:
    """Return whole numbers as C takes them."""
    return (ctypes.c_long * max(1, len(numbers)))(*numbers)


def call(function: Any, *arguments: Any, numbers: int = ENOUGH_FOR_THREADS) -> None:
    """Call a function on as many threads as PyTorch uses. Its last two parameters say how it starts them.

    numbers: how many it computes with, which may be too few for more than one thread.
    """
    threads = torch.get_num_threads() if numbers >= ENOUGH_FOR_THREADS else 1
    if function(*arguments, ctypes.c_void_p(parallel() if threads > 1 else None), ctypes.c_long(threads)):
        raise MemoryError("no memory is left for the buffers of a decoupled layer")
