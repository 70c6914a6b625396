"""Note Ctrl-C (SIGINT) and SIGTERM when they come; training acts on them between two steps.

An ignored signal stays ignored, such as SIGINT in a process that a script starts in the background; SIGTERM also stops
such a process.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after a checkpoint has been written."""


class Interruption:
    """Whether someone has asked to stop. A half-done step cannot be saved; a second Ctrl-C stops immediately."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # others get no signals
            for which in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(which) is not signal.SIG_IGN:
                    self._before[which] = signal.signal(which, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for which, handler in self._before.items():
            signal.signal(which, handler)

    def _note(self, which: int, frame: FrameType | None) -> None:
        if self.asked and which == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
