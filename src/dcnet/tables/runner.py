"""Fill tables: train and attack what is missing, several at once, within a limited time.

The next call continues what did not end in time.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dcnet.tables.checks import check_attacks, check_folders, check_places, find_all_data
from dcnet.tables.ledger import Ledger, all_attacks, entry_of_attacks, entry_of_training, keep_record, kept_record
from dcnet.tables.plan import Task
from dcnet.tables.table import MEASURES
from dcnet.training import (
    Interrupted,
    NonFiniteLoss,
    Run,
    joined,
    open_run,
    restore_run,
    save_weights,
    train,
)
from dcnet.training.interruption import Interruption
from dcnet.training.processors import SHORT_WAITS
from dcnet.util.files import write_json
from dcnet.util.lock import InUse, locked

_STOPPING = 5.0  # seconds before the end in which running cells write their checkpoints
WORTH_STARTING = 20.0  # seconds; in less time, a cell would only start
IN_USE = 75  # exit status of a process whose run folder another process has


class Runner:
    """Does tasks. say: prints a line. options: `data_root`, `download`, `device` of `train`.

    weights, records: folders for copies of the weights and records of finished cells.
    """

    def __init__(
        self,
        ledger: Ledger,
        say: Callable[[str], None],
        options: dict[str, Any],
        weights: Path | None = None,
        records: Path | None = None,
    ) -> None:
        self.ledger, self.say, self.options, self.weights, self.records = ledger, say, options, weights, records
        self.seconds: list[float] = []  # of the networks that were trained here
        self.not_converged: set[Path] = set()  # run folders of such networks that were trained here

    def run(self, tasks: list[Task], jobs: int, seconds: float, only_whole: bool = False) -> list[str]:
        """Do the tasks, `jobs` at once, within the seconds; return the titles of those that failed."""
        until = time.monotonic() + seconds
        check_places(tasks, self.ledger, self.weights, self.records)
        check_folders(tasks, self.ledger)
        check_attacks(tasks)
        find_all_data(tasks, self.options)
        self._restore(tasks)
        waiting, failed = list(tasks), []
        running: dict[Task, tuple[subprocess.Popen[bytes], float]] = {}
        with _stopped_in_the_end(running), Interruption() as interruption:
            while waiting or running:
                if interruption.asked:
                    raise Interrupted
                for task in [
                    task for task in waiting if task.ended is not None
                ]:  # by a runner that was killed, or by hand
                    waiting.remove(task)
                    self._enter(task, jobs)
                self._drop_attacks_on_not_converged(waiting)
                left = until - time.monotonic()
                needed = max(WORTH_STARTING, self._expected(jobs, len(running)) if only_whole else 0.0)
                ready = [
                    task for task in waiting if task.ready and task.folder not in {other.folder for other in running}
                ]
                # a network whose attacks have to wait until the next time needs its weights then
                ready.sort(key=lambda task: task.setup is None)
                while ready and len(running) < jobs and left > needed:
                    task = ready.pop(0)
                    waiting.remove(task)
                    running[task] = (self._start(task, jobs), time.monotonic())
                    ready = [other for other in ready if other.folder != task.folder]  # one process a run folder
                for task, (process, began) in list(running.items()):
                    if process.poll() is not None:
                        del running[task]
                        failed += self._ended(task, process.returncode, jobs, time.monotonic() - began)
                if left < _STOPPING or (ready and not running and left <= needed):
                    stopped = f"running cells stop and go on the next time: {len(running)}"
                    self.say(f"time is up; {stopped}; not begun: {len(waiting)}")
                    break
                # check again: tasks that need a network that has just ended were not ready above
                if waiting and not running and not any(task.ready for task in waiting):
                    failed += self._left_out(waiting)
                    break
                time.sleep(0.1)
        for task in [task for task in running if task.ended is not None]:  # while it was being stopped
            self._enter(task, jobs)
        return failed

    def _drop_attacks_on_not_converged(self, waiting: list[Task]) -> None:
        """Remove attacks on a network that has not converged, or with images made on one.

        A rehearsal, on a few images, takes any network.
        """
        for task in [task for task in waiting if task.setup is not None and task.images is None]:
            if task.folder in self.not_converged:  # its own entry says so
                waiting.remove(task)
            elif task.source is not None and task.source in self.not_converged:
                waiting.remove(task)
                self.say(f"{task.title}: left out, since {task.source.name} has not converged")

    def _left_out(self, tasks: list[Task]) -> list[str]:
        """Say which attacks lack a network; return their titles. Those on a network that has diverged are done."""
        entries = {task: self.ledger.find(task.recipe) for task in tasks}
        titles = [task.title for task, entry in entries.items() if entry is None or not entry.diverged]
        if titles:
            self.say(f"not done, as a network they need failed or diverged: {'; '.join(titles)}")
        return titles

    def _restore(self, tasks: list[Task]) -> None:
        """Make run folders from kept weights, for attacks on networks trained before, and complete their records."""
        for folder, path in {folder: path for task in tasks for folder, path in task.kept.items()}.items():
            restore_run(path, folder)
            self.say(f"{folder.name}: its weights are those in {path}")
        for folder in dict.fromkeys(task.folder for task in tasks if task.setup is not None and task.ready):
            run = Run(folder)
            kept = None if self.records is None else kept_record(run, self.records)
            if kept is None:
                continue
            if (kept.folder / "metrics.jsonl").is_file() and not run.metrics:
                shutil.copy(kept.folder / "metrics.jsonl", folder / "metrics.jsonl")
            if (attacks := all_attacks(kept.attacks, run.attacks)) != run.attacks:
                run.write_attacks(attacks)

    def _expected(self, jobs: int, running: int) -> float:
        """Return an upper estimate of the seconds for one more cell besides those that are running.

        A cell that is alone on a device is faster than several at once.
        """
        if not self.seconds:
            return 0.0
        alone = 1.5 * sum(self.seconds) / len(self.seconds) / jobs
        return min(1.1 * max(self.seconds), alone * (running + 1))

    def _ended(self, task: Task, status: int, jobs: int, seconds: float) -> list[str]:
        """Record what an ended process has done; return the task's title if it failed."""
        if task.ended is None:
            # the other process may have written more since, into the same log
            words = _last_line(_log(task), " is in use by " if status == IN_USE else "")
            self.say(f"{task.title}: failed with exit status {status}: {words}")
            return [task.title]
        if task.setup is None:
            self.seconds.append(seconds)
        self._enter(task, jobs)
        return []

    def run_together(self, tasks: list[Task], seconds: float) -> None:
        """Train the tasks one after the other, each on all of torchrun's processes."""
        if any(task.setup is not None for task in tasks):
            raise ValueError("attacks are made on one device each: run this table without torchrun")
        check_places(tasks, self.ledger, self.weights, self.records)
        check_folders(tasks, self.ledger)
        until = time.monotonic() + seconds
        with joined(self.options.get("device")) as ranks:
            for task in tasks:
                if ranks.agree(time.monotonic() - until) > -WORTH_STARTING:
                    self.say("time is up")
                    break
                ended = task.ended is not None
                ranks.wait()  # until all have checked
                if ranks.first and not ended:
                    task.folder.mkdir(parents=True, exist_ok=True)
                    self.ledger.note_replaced(task.folder, task.recipe)
                with contextlib.suppress(NonFiniteLoss):  # which the run has recorded
                    if not ended:
                        train(task.recipe, task.folder, quiet=True, **self.options)
                if ranks.first:
                    self._enter(task, 1)
                ranks.wait()

    def _start(self, task: Task, jobs: int) -> subprocess.Popen[bytes]:
        """Start a process that does the task; what it prints goes to a file in the run folder."""
        if not (task.folder / "recipe.json").is_file():
            open_run(task.folder, task.recipe)
        elif task.setup is None and not (task.folder / "checkpoint.safetensors").is_file():
            # nothing has begun: the cell is computed as it is asked for now, such as without CUDA graphs
            with contextlib.suppress(InUse), locked(task.folder):
                write_json(task.folder / "recipe.json", asdict(task.recipe), indent=2)
        if task.setup is None:
            self.ledger.note_replaced(task.folder, task.recipe)
        threads = max(1, (os.cpu_count() or 1) // jobs)
        attack = {"setup": asdict(task.setup), "source": task.source, "images": task.images} if task.setup else None
        what = {"options": self.options, "attack": attack}
        with _log(task).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dcnet.tables.worker", str(task.folder), json.dumps(what, default=str)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": str(threads)} | SHORT_WAITS | os.environ,  # a user's own numbers stand
            )

    def _enter(self, task: Task, jobs: int) -> None:
        """Write copies of the cell's weights and records into their folders, and the cell into the ledger.

        The line of the ledger comes last: a cell that has one is done, and nobody would come back for the copies.
        """
        run = task.ended
        assert run is not None
        if task.setup is not None:
            assert task.found is not None
            entry = entry_of_attacks(task.title, run, task.setup.name, task.found, jobs)
            words = ", ".join(f"{attack} {accuracy:.2f}%" for attack, accuracy in entry.record["attacks"].items())
        else:
            entry = entry_of_training(task.title, run, jobs)
            finite = entry.record["error"] is not None
            words = (
                f"{MEASURES[task.measure]} {entry.number(task.measure):.2f}%"
                if finite
                else f"not finite at epoch {entry.record['epoch']:.1f}"
            )
            if entry.diverged:
                self.not_converged.add(run.folder)
                words += ", which counts as N/C"
            words += "" if task.paper is None else f" (paper: {task.paper})"
            # a folder of records alone has none
            if self.weights is not None and not entry.diverged and run.checkpoint.is_file():
                save_weights(run, self.weights / f"{run.folder.name}.safetensors")
        if self.records is not None:
            keep_record(run, self.records)
        self.ledger.add(entry)
        self.say(f"{task.title}: {words}, {entry.record['seconds']:.0f} s")


def _log(task: Task) -> Path:
    return task.folder / "train.log"


def _last_line(log: Path, words: str = "") -> str:
    """Return the last line of a log that has these words in it."""
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((line for line in reversed(lines) if line.strip() and words in line), "it said nothing")


@contextlib.contextmanager
def _stopped_in_the_end(running: dict[Task, tuple[subprocess.Popen[bytes], float]]) -> Iterator[None]:
    """At the end, ask the running processes to write a checkpoint and stop, and wait for them."""
    try:
        yield
    finally:
        for process, _ in running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process, _ in running.values():
            process.wait()


def under_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
