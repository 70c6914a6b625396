"""Show the progress of a run: bars in a terminal, a line per epoch elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shlex import quote
from typing import Any

from dcnet.training.callback import Callback, Numbers
from dcnet.training.run import Run
from dcnet.util.text import count, printable


def describe(entry: dict[str, Any]) -> str:
    """Return an epoch in one line."""
    text = f"epoch {entry['epoch']:g}: train loss {entry['train_loss']:.4f}, accuracy {entry['train_accuracy']:.2f}%"
    if "test_loss" in entry:
        text += f"; test loss {entry['test_loss']:.4f}, accuracy {entry['test_accuracy']:.2f}%"
    return f"{text}; learning rate {entry['lr']:.3g}; {entry['seconds']:.1f} s"


class Lines(Callback):
    """One line per epoch."""

    def begin(self, run: Run, steps: int, done: int, per_epoch: int) -> None:
        from_where = f", going on from step {done}" if done else ""
        _print(f"{count(steps, 'step')}, {per_epoch} an epoch{from_where}")

    def epoch(self, entry: dict[str, Any]) -> None:
        _print(describe(entry))

    def note(self, text: str) -> None:
        _print(text)


def say_finished(run: Run) -> None:
    """Say that there is nothing left to train, and how to train longer."""
    result, folder = run.result or {}, printable(quote(str(run.folder)))
    recipe = printable(quote(str(run.folder / "recipe.json")))
    longer = f"to train longer: dcnet train --resume {folder} --epochs N, " if run.checkpoint.is_file() else ""
    epochs = count(result.get("epochs", 0.0), "epoch")
    _print(
        f"{printable(run.folder)} is finished: {epochs}, accuracy {run.accuracy:.2f}%. "
        f"Nothing is left to do; {longer}to start again: dcnet train --recipe {recipe} --run {folder} --overwrite"
    )


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Bars(Callback):
    """A bar for the run, with epoch, images per second, loss, accuracy and the time left."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Rich

        fields = ("epoch {epoch}", "{rate} images/s", "loss {loss}", "accuracy {accuracy}")
        text = " · ".join(fields).replace("{", "{task.fields[").replace("}", "]}")
        name = TextColumn("{task.description}", markup=False)
        self.rich = Rich(
            name, BarColumn(), TextColumn(text), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        )
        self.shown = 0.0

    def begin(self, run: Run, steps: int, done: int, per_epoch: int) -> None:
        epochs = steps / per_epoch
        self.per_epoch, self.of = per_epoch, f"{epochs:g}" if epochs < 1000 else f"{epochs:.0f}"
        self.start, self.began, self.batch = done, time.perf_counter(), run.recipe.batch
        self.rich.start()
        self.task = self.rich.add_task(
            printable(run.folder.name), total=steps, completed=done, epoch="-", rate="-", loss="-", accuracy="-"
        )

    def step(self, step: int, seconds: float, numbers: Numbers) -> None:
        now = time.perf_counter()
        if now - self.shown < 0.3:
            return
        self.shown = now
        loss, accuracy = numbers()
        self.rich.update(
            self.task,
            completed=step,
            epoch=f"{(step - 1) // self.per_epoch + 1}/{self.of}",
            rate=f"{(step - self.start) * self.batch / max(1e-9, now - self.began):,.0f}",
            loss=f"{loss:.3f}",
            accuracy=f"{accuracy:.1f}%",
        )

    def epoch(self, entry: dict[str, Any]) -> None:
        self.rich.update(self.task, completed=entry["step"])
        self.note(describe(entry))

    def note(self, text: str) -> None:
        self.rich.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self.rich.stop()


@contextmanager
def showing(shown: bool, *columns: Any) -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield a function that shows the progress of several things in a terminal: (name, done, total).

    Yield None if there is no terminal.
    """
    if not shown or not sys.stdout.isatty():
        yield None
        return
    from rich.progress import Progress as Rich

    with Rich(*columns) as bars:
        tasks: dict[str, Any] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total or None)
            bars.update(tasks[name], completed=done)

        yield show


def showing_downloads(shown: bool) -> Any:
    """Return `showing` for bytes."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    return showing(shown, TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())


def progress_for() -> Callback:
    """Return bars in a terminal, lines elsewhere."""
    return Bars() if sys.stdout.isatty() else Lines()
