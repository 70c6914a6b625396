"""What the scripts here share: time of cases that take turns, peak memory of one, and records as CSV."""

import csv
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dcnet
from dcnet.util.provenance import provenance

MEMORY = (
    "bytes of PyTorch's CPU allocator (torch.profiler's memory events), "
    "held after forward and peak of forward + backward"
)


def steps_of(layers: Mapping[str, nn.Module], shape: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    """Forward and backward of each layer, on the same input and with the same incoming gradient."""
    x = torch.randn(shape, requires_grad=True)
    with torch.no_grad():
        grad = torch.randn_like(next(iter(layers.values()))(x))

    def step(layer: nn.Module) -> list[Tensor]:
        return list(torch.autograd.grad(layer(x), [x, *layer.parameters()], grad))

    return {name: (lambda layer=layer: step(layer)) for name, layer in layers.items()}


def seconds_in_turns(
    steps: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every call; the steps take turns, so that a slow moment of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            start = clock()
            step()
            times[name].append(clock() - start)
    return times


def chosen_clock(cpu_time: bool) -> tuple[Callable[[], float], str]:
    """Return the clock, and its name for the record.

    It is the wall clock, or, on a machine that others use too, the time that this process has had on one core.
    """
    if not cpu_time:
        return time.perf_counter, "wall clock"
    torch.set_num_threads(1)
    return time.process_time, "CPU time of one thread, on a machine in use"


def ratios(times: Mapping[str, list[float]], yardstick: str) -> dict[str, float]:
    """The median over all turns of a step's time, as a ratio to the yardstick's in the same turn."""
    return {
        name: statistics.median(a / b for a, b in zip(seconds, times[yardstick], strict=True))
        for name, seconds in times.items()
    }


def held_and_peak(layer: nn.Module, shape: tuple[int, ...]) -> tuple[float, float]:
    """MiB that a forward pass leaves behind for the backward pass, its output included; and the most at once in both.

    Beyond what was there before. The scratch memory inside oneDNN's kernels is not seen.
    """
    x = torch.randn(shape, requires_grad=True)
    with torch.no_grad():
        grad = torch.randn_like(layer(x))
    torch.autograd.grad(layer(x), [x, *layer.parameters()], grad)  # what is made once is there now
    changes = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        y = layer(x)
    changes += _changes(profile)
    held = sum(changes)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        gradients = torch.autograd.grad(y, [x, *layer.parameters()], grad)
    changes += _changes(profile)
    del y, gradients
    total = peak = 0
    for size in changes:
        total += size
        peak = max(peak, total)
    return held / 2**20, peak / 2**20


def _changes(profile: Any) -> list[int]:
    """Bytes that were given out, or taken back, in order."""
    recorded = profile.profiler.kineto_results.events()
    return [size for _, size in sorted((e.start_ns(), e.nbytes()) for e in recorded if e.name() == "[memory]")]


def write(path: Path, rows: list[dict[str, Any]], note: str) -> None:
    """Write the records, each with where and how it was measured."""
    here = provenance(torch.device("cpu")) | {"machine": platform.machine(), "dcnet": dcnet.__version__, "how": note}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *here], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | here for row in rows)
