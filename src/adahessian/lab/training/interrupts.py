"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Interrupts:
    """Context in which Ctrl-C, SIGTERM and SIGHUP only set :attr:`requested`, so that a run can stop between two steps.

    The first signal calls ``on_request``. A second Ctrl-C raises KeyboardInterrupt at once.
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None) -> None:
        self.requested = False
        self._on_request = on_request
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        numbers = [signal.SIGINT, signal.SIGTERM]
        hangup = getattr(signal, "SIGHUP", None)  # not on Windows
        if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:  # ignored under nohup
            numbers.append(hangup)
        if threading.current_thread() is threading.main_thread():  # the only thread that may handle signals
            self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested = True
            with suppress(RuntimeError):  # raised if the signal arrived in the middle of a write to the same stream
                self._on_request()
