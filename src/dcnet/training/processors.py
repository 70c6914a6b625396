"""Say what helps where other programs use the processors too."""

import os
import sys
import time
from collections.abc import Callable

import torch

from dcnet.training.callback import Callback, Numbers
from dcnet.training.run import Run

# How often GNU's OpenMP, which PyTorch has on Linux, looks whether the other threads are done before it sleeps. By
# default 300,000 times: milliseconds, in which the thread that it waits for may need the processor. With 2,000, steps
# take a fraction of the time beside other programs, and no longer without them (benchmarks/NOTES.md).
SHORT_WAITS = {"GOMP_SPINCOUNT": "2000"}
_SET_BY_USERS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_SECONDS = 3.0
_ALONE = 0.8  # of the processors' time; threads that wait take it too, so it is nearly all of it where no others run


class SharedProcessors(Callback):
    """Tell the user once if PyTorch's threads do not get the time of their processors, and what helps."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def begin(self, run: Run, steps: int, done: int, per_epoch: int) -> None:
        self.threads = torch.get_num_threads()
        chosen = any(name in os.environ for name in _SET_BY_USERS)
        self.done = sys.platform != "linux" or self.threads == 1 or chosen
        self.start: tuple[float, float] | None = None

    def step(self, step: int, seconds: float, numbers: Numbers) -> None:
        if self.done:
            return
        now = time.perf_counter(), time.process_time()
        if self.start is None:  # after the first step, which compiles
            self.start = now
            return
        wall, used = now[0] - self.start[0], now[1] - self.start[1]
        if wall < _SECONDS:
            return
        self.done = True
        if used < _ALONE * self.threads * wall:
            name, value = next(iter(SHORT_WAITS.items()))
            self.say(
                f"other programs seem to use the processors too: PyTorch's {self.threads} threads get the time of "
                f"{used / wall:.1f} processors. They wait for each other in every operation; with {name}={value} in "
                "the environment this takes a fraction of the time"
            )
