"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """Remembers that somebody asked to stop, so that a run can end between two steps.

    One asks by Ctrl-C, by SIGTERM, or by closing the terminal, unless nohup keeps that away. A second Ctrl-C stops at
    once, as it does anywhere.

    Args:
        on_asked: Called when it is first asked for, to say so.
    """

    def __init__(self, on_asked: Callable[[], None] = lambda: None) -> None:
        self.asked = False
        self._on_asked = on_asked
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        # Only the main thread may handle signals; elsewhere nobody sends any.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, *_hangup()):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked = True
            # Nobody may write to a stream in the middle of a write to it. What then is not said is done all the same.
            with suppress(RuntimeError):
                self._on_asked()


def _hangup() -> list[signal.Signals]:
    """The signal that says that the terminal is gone, where there is one, and it was not ignored before."""
    hangup = getattr(signal, "SIGHUP", None)
    return [] if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN else [hangup]
