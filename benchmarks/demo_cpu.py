"""Train the demo's networks in turn, and compare the seconds that they record: demo_cpu.py [--turns 5] [--csv FILE].

With --busy 4 they train beside four processes that do nothing but count, each in a program of its own.

PyTorch's threads wait for each other in every operation, so one busy process beside them makes these short trainings
several times slower, plain ones too. A training during which others had more than a twentieth of a core is repeated.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from in_turns import ratios, write

import dcnet

NETWORKS = {
    "plain": (None, "cosine"),
    "sphere + cosine": ("sphere", "cosine"),
    "tanh + cosine": ("tanh", "cosine"),
    "tanh + linear": ("tanh", "linear"),
    "seg + square_cosine": ("seg", "square_cosine"),
}
BUSY, TRIES = 0.05, 8  # of a core; trainings of which one has to be undisturbed


def seconds_of_others() -> float:
    """The CPU time that everything but this process has had; 0 where nobody counts it."""
    try:
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:])
    except (OSError, ValueError):
        return 0.0
    own = os.times()
    busy = user + nice + system + irq + softirq + steal
    return busy / os.sysconf("SC_CLK_TCK") - own.user - own.system


def train(name: str, steps: int | None) -> tuple[float, float]:
    """Return the seconds that a training records, and how much of a core others had meanwhile."""
    magnitude, angular = NETWORKS[name]
    length = {} if steps is None else {"steps": steps}
    recipe = dcnet.make_recipe("demo", magnitude=magnitude, angular=angular, **length)
    with tempfile.TemporaryDirectory() as folder:
        before, start = seconds_of_others(), time.perf_counter()
        run = dcnet.train(recipe, Path(folder) / "run", quiet=True, device="cpu")
        others = (seconds_of_others() - before) / (time.perf_counter() - start)
        assert run.result is not None
        return run.result["seconds"], others


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep processes busy for a while."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def undisturbed(name: str, steps: int | None) -> float:
    """Return the seconds of the first training that nobody disturbed."""
    for _ in range(TRIES):
        seconds, others = train(name, steps)
        if others <= BUSY:
            return seconds
        time.sleep(min(10.0, seconds))
    raise SystemExit(f"{name}: {TRIES} trainings in turn were disturbed by other processes; try on a quiet machine")


def main() -> None:
    arguments = argparse.ArgumentParser(description="The demo's networks on a CPU: seconds of training, in turn.")
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument("--steps", type=int, help="of each training, instead of the demo's epochs")
    arguments.add_argument("--busy", type=int, default=0, help="processes that count beside the trainings")
    arguments.add_argument("--csv", type=Path, help="where to write the records")
    options = arguments.parse_args()
    for name in NETWORKS:
        train(name, 2)  # what is compiled once
    times: dict[str, list[float]] = {name: [] for name in NETWORKS}
    with busy(options.busy):
        for _ in range(options.turns):
            for name in NETWORKS:
                one = train(name, options.steps)[0] if options.busy else undisturbed(name, options.steps)
                times[name].append(one)
    rows = []
    total = {name: sum(seconds) for name, seconds in times.items()}
    for name, ratio in ratios(times, "plain").items():
        seconds = statistics.median(times[name])
        print(f"{name:20} {seconds:6.2f} s  {ratio:.2f}  ({total[name] / total['plain']:.2f} of all turns together)")
        rows.append(
            {"network": name, "seconds": round(seconds, 3), "least": min(times[name]), "most": max(times[name])}
            | {"ratio": round(ratio, 3), "ratio of sums": round(total[name] / total["plain"], 3)}
            | {"turns": options.turns, "threads": torch.get_num_threads(), "steps": options.steps, "busy": options.busy}
            | {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT")}
        )
    if options.csv is not None:
        write(options.csv, rows, "seconds as the runs record them, networks in turn, wall clock")


if __name__ == "__main__":
    main()
