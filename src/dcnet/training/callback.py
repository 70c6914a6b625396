"""Callbacks: the interface of progress bars, TensorBoard, and your own loggers."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from dcnet.training.run import Run

Numbers = Callable[[], tuple[float, float]]  # loss and accuracy in percent of the epoch so far; asking makes a GPU wait


class Callback:
    """The interface to follow a run while it trains; override the methods you need.

    `docs/callbacks.md` has examples.

    If several processes train together, only the first one calls the methods. If a method raises, training ends.

    Examples:
        >>> import dcnet
        >>> class Lines(dcnet.Callback):
        ...     def epoch(self, entry):
        ...         print(f"epoch {entry['epoch']:g}: {entry['test_accuracy']:.1f}%")
        >>> lines = Lines()  # for dcnet.train(recipe, callbacks=[lines])
    """

    def begin(self, run: Run, steps: int, done: int, per_epoch: int) -> None:
        """Run once before the first step.

        steps: of the whole run. done: how many of them were done before, if the run is continued.
        """

    def step(self, step: int, seconds: float, numbers: Numbers) -> None:
        """Run after every step, counted from 1.

        numbers(): loss and accuracy of the epoch so far; asking makes a GPU wait.
        """

    def epoch(self, entry: dict[str, Any]) -> None:
        """Run after every epoch with the new entry of `metrics.jsonl`.

        It has epoch, step, lr, train_loss, train_accuracy, test_loss, test_accuracy, …
        """

    def note(self, text: str) -> None:
        """Run with a line for the user, about how the run is computed."""

    def end(self, run: Run) -> None:
        """Run once the run is finished and has its result."""

    def close(self) -> None:
        """Run last, also after an interruption or an error, if `begin` was called."""


class Callbacks(Callback):
    """Several callbacks, called one after the other."""

    def __init__(self, parts: Sequence[Callback]) -> None:
        for part in parts:
            if not isinstance(part, Callback):
                hint = (
                    f"; make one of it: {part.__name__}(…)"
                    if isinstance(part, type) and issubclass(part, Callback)
                    else ""
                )
                raise TypeError(f"callbacks must be instances of dcnet.Callback, got {part!r}{hint}")
        self.parts = list(parts)
        self.begun: list[Callback] = []

    def begin(self, run: Run, steps: int, done: int, per_epoch: int) -> None:
        for part in self.parts:
            self.begun.append(part)
            part.begin(run, steps, done, per_epoch)

    def step(self, step: int, seconds: float, numbers: Numbers) -> None:
        for part in self.parts:
            part.step(step, seconds, numbers)

    def epoch(self, entry: dict[str, Any]) -> None:
        for part in self.parts:
            part.epoch(entry)

    def note(self, text: str) -> None:
        for part in self.parts:
            part.note(text)

    def end(self, run: Run) -> None:
        for part in self.parts:
            part.end(run)

    def close(self) -> None:
        with ExitStack() as stack:  # each is closed, whatever the others raise
            for part in self.begun:
                stack.callback(part.close)
            self.begun = []
