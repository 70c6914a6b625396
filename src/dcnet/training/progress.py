"""What one sees of a run: bars in a terminal, a line an epoch elsewhere, TensorBoard if asked for."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shlex import quote
from types import TracebackType
from typing import Any

from dcnet.training.run import Run
from dcnet.util.text import printable

Numbers = Callable[[], tuple[float, float]]  # loss and accuracy of the epoch so far; asking makes a GPU wait


class Progress:
    """Shows nothing; what shows something overrides these."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def begin(self, steps: int, done: int, per_epoch: int) -> None:
        """A run of so many steps, of which some may have been done before."""

    def step(self, step: int, seconds: float, numbers: Numbers) -> None:
        """After every step."""

    def epoch(self, entry: dict[str, Any]) -> None:
        """After every epoch, with what `metrics.jsonl` gets."""

    def end(self, run: Run) -> None:
        """After the result has been written."""


class Quiet(Progress):
    """Shows nothing."""


def describe(entry: dict[str, Any]) -> str:
    """An epoch in one line."""
    text = f"epoch {entry['epoch']:g}: train loss {entry['train_loss']:.4f}, accuracy {entry['train_accuracy']:.2f}%"
    if "test_loss" in entry:
        text += f"; test loss {entry['test_loss']:.4f}, accuracy {entry['test_accuracy']:.2f}%"
    return f"{text}; learning rate {entry['lr']:.3g}; {entry['seconds']:.1f} s"


class Lines(Progress):
    """One line an epoch."""

    def begin(self, steps: int, done: int, per_epoch: int) -> None:
        from_where = f", going on from step {done}" if done else ""
        _print(f"{steps} steps, {per_epoch} an epoch{from_where}")

    def epoch(self, entry: dict[str, Any]) -> None:
        _print(describe(entry))


def say_finished(run: Run) -> None:
    """Say that there is nothing left to train, and how to train longer."""
    result, folder = run.result or {}, printable(quote(str(run.folder)))
    _print(
        f"{printable(run.folder)} is finished: {result.get('epochs', 0.0):.4g} epochs, accuracy {run.accuracy:.2f}%. "
        f"Nothing is left to do; to train longer: dcnet train --resume {folder} --epochs N, to start again: --overwrite"
    )


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Bars(Progress):
    """A bar for the run, with epoch, images per second, loss, accuracy and the time left."""

    def __init__(self, run: Run) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Rich

        text = "epoch {task.fields[epoch]} · {task.fields[rate]} images/s · loss {task.fields[loss]} · accuracy {task.fields[accuracy]}"
        name = TextColumn("{task.description}", markup=False)
        self.rich = Rich(name, BarColumn(), TextColumn(text), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self.run = run
        self.batch = run.recipe.batch
        self.shown = 0.0

    def __enter__(self) -> "Progress":
        self.rich.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.rich.stop()

    def begin(self, steps: int, done: int, per_epoch: int) -> None:
        epochs = steps / per_epoch
        self.per_epoch, self.of = per_epoch, f"{epochs:g}" if epochs < 1000 else f"{epochs:.0f}"
        self.start, self.began = done, time.perf_counter()
        self.task = self.rich.add_task(printable(self.run.folder.name), total=steps, completed=done, epoch="-", rate="-", loss="-", accuracy="-")

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
        self.rich.console.print(describe(entry), highlight=False)


def summary_writer() -> Any:
    """TensorBoard's writer; raises where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("TensorBoard is not installed: pip install 'dcnet[tensorboard]'") from error
    return SummaryWriter


class Board(Progress):
    """Another progress, and TensorBoard's files in the run folder."""

    def __init__(self, inner: Progress, run: Run) -> None:
        writer = summary_writer()
        self.inner, self.writer = inner, writer(str(run.folder / "tensorboard"))
        self.step, self.begin, self.end = inner.step, inner.begin, inner.end  # type: ignore[method-assign]

    def __enter__(self) -> "Progress":
        self.inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.inner.__exit__(kind, error, trace)
        self.writer.close()

    def epoch(self, entry: dict[str, Any]) -> None:
        self.inner.epoch(entry)
        for name, value in entry.items():
            if name == "learned":  # parameter, layer, five quantiles: the median is shown
                for parameter, layers in value.items():
                    for layer, quantiles in layers.items():
                        self.writer.add_scalar(f"{parameter}/{layer}", quantiles[2], entry["step"])
            elif name != "step":
                self.writer.add_scalar(name, value, entry["step"])


@contextmanager
def showing(shown: bool, *columns: Any) -> Iterator[Callable[[str, int, int], None] | None]:
    """What tells a terminal how far each of several things is: (name, done, in all); None where there is no terminal."""
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
    """The same in bytes."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    return showing(shown, TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())


def progress_for(run: Run, tensorboard: bool) -> Progress:
    """Bars in a terminal, lines elsewhere."""
    shown: Progress = Bars(run) if sys.stdout.isatty() else Lines()
    return Board(shown, run) if tensorboard else shown
