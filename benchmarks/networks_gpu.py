"""Measure whole steps of networks on a GPU, plain and decoupled in turn: networks_gpu.py --out RECORDS.

Each network has a process of its own. They compile side by side, which takes most of the time, and then measure one by
one, while the others wait. tanh + cosine, bf16 autocast, channels_last; training steps are forward, backward and a
fused SGD step, on the wall clock, calls following one another without waiting. networks.py makes the table.
"""

import argparse
import gc
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from networks import FIRST_STEPS, KINDS, NETWORKS, Network
from torch import nn

from dcnet.bench.measure import network_run
from dcnet.ops.fused import host
from dcnet.util.provenance import provenance

# -- one network, in a process of its own ------------------------------------------------------------------------------


def measure(network: Network, rounds: int, steps: int, write: Callable[[str], Any]) -> None:
    """Prepare both twins, say so, wait for a line on the standard input, and write the records, one a line."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cudnn = torch.backends.cudnn
    # Others use the device now, so what cuDNN tried would tell little. Whether TF32 is allowed makes no difference to
    # bf16, but is part of what cuDNN's choices are kept by: with it on, all are made once more, below.
    cudnn.benchmark, cudnn.allow_tf32 = False, False
    _use_cublas(device)
    runs, first, held = {}, {}, {}
    for kind in KINDS:
        before = _allocated(device)
        run = runs[kind] = network_run(network.case(kind), device)
        first[kind] = _seconds(run, device)
        for _ in range(2):
            run()
        held[kind] = _allocated(device) - before
    write("ready")
    sys.stdin.readline()
    cudnn.benchmark, cudnn.allow_tf32 = True, True
    peaks = {}
    for kind, run in runs.items():
        for _ in range(5):
            run()
        others = sum(bytes for other, bytes in held.items() if other != kind)
        peaks[kind] = _peak(run, device) - others
    made = provenance(device)
    for number in range(rounds):
        for kind, run in runs.items():
            for _ in range(2):
                run()
            record = {
                **network._asdict(),
                "kind": kind,
                "ms": round(1e3 * _seconds(lambda run=run: [run() for _ in range(steps)], device) / steps, 3),
                "host": round(1e3 * min(_launching(run, device) for _ in range(5)), 3),
                "MB": round(peaks[kind] / 2**20),
                "first_s": round(first[kind], 1),
                "round": number,
                "host_code": "C++" if host.counts() else "Python",
                **_machine(),
            }
            write(json.dumps(record | made))


def measure_first_step(network: Network, kind: str, write: Callable[[str], Any]) -> None:
    """Write how long a first step takes with no kernel compiled before."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _use_cublas(device)
    run = network_run(network.case(kind), device)
    started = time.process_time()
    seconds = _seconds(run, device)
    record = {
        **network._asdict(),
        "kind": kind,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(time.process_time() - started, 2),  # of the host, all threads
        **_machine(),
    }
    write(json.dumps(record | provenance(device)))


def _machine() -> dict[str, str]:
    """Return which call of this script a record is from, and on what host: the same rounds on two are not mixed."""
    names = {line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")}
    return {"run": os.environ.get("DCNET_BENCH_RUN", ""), "cpu": ", ".join(sorted(names))}


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _use_cublas(device: torch.device) -> None:
    """Let cuBLAS take the memory that it keeps, so that no network is charged for it."""
    layer = nn.Linear(64, 64).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        layer(torch.zeros(64, 64, device=device)).sum().backward()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _launching(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that the host takes to launch a call when nothing waits."""
    _wait(device)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _allocated(device: torch.device) -> int:
    gc.collect()
    _wait(device)
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def _peak(run: Callable[[], Any], device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    run()
    _wait(device)
    return torch.cuda.max_memory_allocated()


# -- all of them -------------------------------------------------------------------------------------------------------


def measure_together(networks: Sequence[Network], out: Path, options: list[str], minutes: float) -> bool:
    """Prepare networks side by side, append the records of each to the file; return whether all were measured."""
    until = time.monotonic() + 60 * minutes
    processes = {network: _start("--network", network.title, *options, DCNET_NATIVE="wait") for network in networks}
    whole = True
    try:
        for network, process in processes.items():
            if not _is_ready(process, until):
                print(f"{network.title}: failed, or not ready in {minutes:g} minutes", file=sys.stderr)
                process.kill()
                whole = False
        for network, process in processes.items():
            if process.poll() is None:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
                whole &= _keep(process, network, out)
    finally:
        for process in processes.values():
            process.kill()
            with process:  # closes its pipes
                pass
    return whole


def measure_first_steps(network: Network, out: Path) -> bool:
    """Append the seconds of first steps to the file, each with an empty cache; return whether all were measured."""
    whole = True
    for kind in ("decoupled", "plain", "decoupled"):
        with tempfile.TemporaryDirectory() as empty:
            started = _start("--network", network.title, "--first-step", kind, TRITON_CACHE_DIR=empty)
            whole &= _keep(started, network, out)
    return whole


def _start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def _is_ready(process: subprocess.Popen[str], until: float) -> bool:
    """Wait for the line that says so, but not forever."""
    assert process.stdout is not None
    left = max(0.0, until - time.monotonic())
    there, _, _ = select.select([process.stdout], [], [], left)
    return bool(there) and process.stdout.readline().strip() == "ready"


def _keep(process: subprocess.Popen[str], network: Network, out: Path) -> bool:
    """Append what a process writes to the file as it comes; return whether it ended well."""
    assert process.stdout is not None
    with out.open("a", encoding="utf-8") as file:
        for line in process.stdout:
            file.write(line)
            file.flush()
            record = json.loads(line)
            print(
                network.title, *(record.get(name, "") for name in ("kind", "ms", "host", "MB", "seconds")), flush=True
            )
    with process:
        return process.wait() == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON lines; records are added")
    parser.add_argument("--match", action="append", help="only rows with this in their title; may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="that are timed together")
    parser.add_argument(
        "--together", type=int, default=4, help="networks that are prepared side by side; memory limits it"
    )
    parser.add_argument("--minutes", type=float, default=10, help="for that; what is not ready then is left out")
    parser.add_argument("--cpu", action="store_true", help="try it without a GPU")
    parser.add_argument("--network", help=argparse.SUPPRESS)
    parser.add_argument("--first-step", help=argparse.SUPPRESS)
    given = parser.parse_args()
    titles = {network.title: network for network in (*NETWORKS, *FIRST_STEPS)}
    if given.network:
        network, write = titles[given.network], _only_records()
        if given.first_step:
            measure_first_step(network, given.first_step, write)
        else:
            measure(network, given.rounds, given.steps, write)
        return
    if given.out is None:
        parser.error("--out: the file of the records is needed")
    if not torch.cuda.is_available() and not given.cpu:
        parser.error("there is no GPU here; --cpu tries the script without one")
    os.environ["DCNET_BENCH_RUN"] = uuid.uuid4().hex[:8]
    chosen = [network for title, network in titles.items() if any(text in title for text in given.match or [""])]
    if not chosen:
        parser.error(f"--match: nothing has {given.match} in its title; there are {'; '.join(titles)}")
    options = ["--rounds", str(given.rounds), "--steps", str(given.steps)]
    networks = [network for network in chosen if network not in FIRST_STEPS]
    groups = [networks[i : i + given.together] for i in range(0, len(networks), given.together)]
    done = [measure_together(group, given.out, options, given.minutes) for group in groups]
    done += [measure_first_steps(network, given.out) for network in chosen if network in FIRST_STEPS]
    sys.exit(0 if all(done) else 1)


def _only_records() -> Callable[[str], Any]:
    """Return a function that writes a line to the standard output, to which nobody else writes from now on."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return lambda line: print(line, file=out, flush=True)


if __name__ == "__main__":
    main()
