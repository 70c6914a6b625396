"""Fills tables: trains the cells that are missing, several at once, for as long as there is time, and goes on the next time."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcnet.tables.ledger import Entry, Ledger, keep_record
from dcnet.tables.table import Cell, Table
from dcnet.training import NonFiniteLoss, Recipe, Run, joined, open_run, save_weights, train

_STOPPING = 5.0  # seconds before the end in which running cells write their checkpoints
_WORTH_STARTING = 20.0  # seconds below which a cell would do nothing but start


@dataclass(frozen=True)
class Task:
    """A cell to train: its recipe, and the run folder it goes into."""

    title: str
    recipe: Recipe
    folder: Path
    paper: Any = None

    @property
    def ended(self) -> Run | None:
        """The run, if it is finished or has diverged."""
        ends = [name for name in ("result.json", "diverged.json") if (self.folder / name).is_file()]
        return Run(self.folder) if ends else None


@dataclass
class Plan:
    """What there is of a table under one schedule: entries of the cells that are done, and tasks for the others."""

    table: Table
    done: list[tuple[Cell, Entry]] = field(default_factory=list)
    missing: list[Task] = field(default_factory=list)


def plan(table: Table, ledger: Ledger, runs: Path, schedule: str, seeds: list[int], matches: list[str] | None = None, **settings: Any) -> Plan:
    """Return which cells are done and which are to be trained, seed by seed.

    matches: only cells with one of these in their name, in the order of the matches. settings: recipe fields of all cells.
    """
    found = Plan(table)
    cells: dict[str, Cell] = {}
    for match in matches or [""]:
        matching = {cell.title: cell for cell in table.cells if match.lower() in cell.title.lower()}
        if not matching:
            there = "; ".join(cell.title for cell in table.cells)
            raise ValueError(f"no cell of the table {table.name} has {match!r} in its name; there are {there}")
        cells = cells | matching
    for seed in seeds:
        for cell in cells.values():
            recipe = table.recipe(cell, schedule, seed, **settings)
            if entry := ledger.find(recipe):
                found.done.append((cell, entry))
            else:
                title = f"{table.name}: {cell.title}, {recipe.data}, {schedule} schedule, {recipe.precision}, seed {seed}"
                paper = cell.paper if (schedule, recipe.data) == ("paper", table.recipe(cell).data) else None
                found.missing.append(Task(title, recipe, runs / _slug(title), paper))
    return found


def _slug(title: str) -> str:
    """Return a folder name."""
    plain = title.lower().replace("ℓ2", "l2").replace("sq. cosine", "square cosine").replace(" schedule", "")
    return "-".join("".join(letter if letter.isascii() and letter.isalnum() else " " for letter in plain).split())


class Runner:
    """Trains tasks. say: prints a line. options: `data_root`, `download`, `device` of `train`.

    weights, records: folders for what is kept of finished cells besides their run folders.
    """

    def __init__(
        self, ledger: Ledger, say: Callable[[str], None], options: dict[str, Any], weights: Path | None = None, records: Path | None = None
    ) -> None:
        self.ledger, self.say, self.options, self.weights, self.records = ledger, say, options, weights, records
        self.seconds: list[float] = []  # of the cells that were trained here

    def _expected(self, jobs: int, running: int) -> float:
        """Return what one more cell beside those that run would take, at most; cells alone on a device are quicker than among others."""
        if not self.seconds:
            return 0.0
        alone = 1.5 * sum(self.seconds) / len(self.seconds) / jobs
        return min(1.1 * max(self.seconds), alone * (running + 1))

    def run(self, tasks: list[Task], jobs: int, seconds: float, only_whole: bool = False) -> list[str]:
        """Train the tasks, so many at once, within the seconds; return the titles of those that failed."""
        until = time.monotonic() + seconds
        waiting, failed = list(tasks), []
        running: dict[Task, tuple[subprocess.Popen[bytes], float]] = {}
        try:
            while waiting or running:
                for task in list(waiting):  # ended earlier: by a runner that was killed, or by hand
                    if task.ended is not None:
                        waiting.remove(task)
                        self._enter(task, jobs)
                left = until - time.monotonic()
                needed = max(_WORTH_STARTING, self._expected(jobs, len(running)) if only_whole else 0.0)
                while waiting and len(running) < jobs and left > needed:
                    task = waiting.pop(0)
                    running[task] = (self._start(task, jobs), time.monotonic())
                for task, (process, began) in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[task]
                    if task.ended is not None:
                        self.seconds.append(time.monotonic() - began)
                        self._enter(task, jobs)
                    else:
                        failed.append(task.title)
                        self.say(f"{task.title}: failed with exit status {process.returncode}: {_last_line(_log(task))}")
                if left < _STOPPING or (waiting and not running and left <= needed):
                    self.say(f"time is up; {len(running)} cells stop and go on the next time, {len(waiting)} were not begun")
                    break
                time.sleep(0.1)
        finally:
            _stop([process for process, _ in running.values()])
        return failed

    def run_together(self, tasks: list[Task], seconds: float) -> None:
        """Train the tasks one after the other, each on all of torchrun's processes."""
        until = time.monotonic() + seconds
        with joined(self.options.get("device")) as ranks:
            for task in tasks:
                if ranks.agree(time.monotonic() - until) > -_WORTH_STARTING:
                    self.say("time is up")
                    break
                ended = task.ended is not None
                ranks.wait()  # all have looked
                with contextlib.suppress(NonFiniteLoss):  # which the run has recorded
                    if not ended:
                        train(task.recipe, task.folder, quiet=True, **self.options)
                if ranks.first:
                    self._enter(task, 1)
                ranks.wait()

    def _start(self, task: Task, jobs: int) -> subprocess.Popen[bytes]:
        """Start a process that trains the task; what it prints goes to a file in the run folder."""
        open_run(task.folder, task.recipe)
        threads = max(1, (os.cpu_count() or 1) // jobs)
        with _log(task).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dcnet.tables.worker", str(task.folder), json.dumps(self.options, default=str)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": str(threads)} | os.environ,  # a user's own number stands
            )

    def _enter(self, task: Task, jobs: int) -> None:
        """Write the cell into the ledger, and its weights to where they are kept."""
        run = task.ended
        assert run is not None
        entry = self.ledger.add(task.title, run, jobs)
        if self.weights is not None and not entry.diverged:
            save_weights(run, self.weights / f"{run.folder.name}.safetensors")
        if self.records is not None:
            keep_record(run, self.records)
        error = f"{entry.record['error']:.2f}%" if entry.record["error"] is not None else f"not finite at epoch {entry.record['epoch']:.1f}"
        error += ", which counts as N/C" if entry.diverged else ""
        paper = "" if task.paper is None else f" (paper: {task.paper})"
        self.say(f"{task.title}: {error}{paper}, {entry.record['seconds']:.0f} s")


def _log(task: Task) -> Path:
    return task.folder / "train.log"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ask runs to write a checkpoint and end, and wait until they have."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    for process in processes:
        process.wait()


def under_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def costs(plans: list[Plan], ledger: Ledger) -> dict[str, float | None]:
    """Return by title what each missing cell will cost in seconds of a device, judged by finished cells of the same network; None if unknown."""
    found: dict[str, float | None] = {}
    for task in (task for one in plans for task in one.missing):
        recipe = task.recipe
        alike = [
            e
            for e in ledger.entries
            if (e.recipe.model, e.recipe.data, e.recipe.batch) == (recipe.model, recipe.data, recipe.batch) and not e.diverged
        ]
        paces = sorted(entry.gpu_seconds / _length(entry.recipe) for entry in alike if (entry.recipe.steps is None) == (recipe.steps is None))
        found[task.title] = paces[len(paces) // 2] * _length(recipe) if paces else None
    return found


def _length(recipe: Recipe) -> float:
    return float(recipe.steps or recipe.epochs)
