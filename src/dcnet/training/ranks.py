"""The processes that train together: one, or those that torchrun has started."""

import atexit
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor, replaced by its sum over all ranks."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, value: float) -> float:
        """Return the largest of the ranks' values."""
        if self.world == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor)

    def from_first(self, decide: Callable[[], T]) -> T:
        """Call the function on the first rank; return its result, or raise its error, on all ranks."""
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = decide()
            except Exception as error:
                outcome[1] = error
        if self.world > 1:
            dist.broadcast_object_list(outcome, device=self.device)
        if outcome[1] is not None:
            raise outcome[1]
        decided: T = outcome[0]
        return decided

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.world > 1:
            dist.barrier()


_met: list[tuple[Any, int, int]] = []  # set once: the store where the processes met, this one's rank, their number
_joined = itertools.count()


def _join(backend: str) -> None:
    """Join the processes that torchrun has started.

    Each group gets a new name: under the same name, a new group may find entries of the last one, and wait forever.
    """
    from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]  # not in every build of PyTorch

    if not _met:
        _met.append(next(rendezvous("env://")))
        # DistributedDataParallel is in a reference cycle, and keeps the group's threads alive after the group is left.
        # A thread that frees a tensor while the interpreter ends would abort the process.
        atexit.register(gc.collect)
    store, rank, world = _met[0]
    dist.init_process_group(backend, store=PrefixStore(f"dcnet {next(_joined)}", store), rank=rank, world_size=world)


@contextmanager
def joined(device: str | None = None) -> Iterator[Ranks]:
    """Yield this process among those that train together.

    Under torchrun it joins the group and leaves it at the end, unless the caller has joined it before.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {kind!r}; possible: cpu, cuda")
    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but PyTorch sees no GPU here; possible: 'cpu'")
    if kind == "cuda" and local >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local} has no GPU of its own: there are {torch.cuda.device_count()}; start at most "
            "that many processes a node"
        )
    where = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(where)
    joins = world > 1 and not dist.is_initialized()
    if joins:
        _join("nccl" if kind == "cuda" else "gloo")
    try:
        if dist.is_available() and dist.is_initialized():
            yield Ranks(dist.get_rank(), dist.get_world_size(), where)
        else:
            yield Ranks(0, 1, where)
    finally:
        if joins:
            dist.destroy_process_group()
