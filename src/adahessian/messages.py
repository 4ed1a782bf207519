"""What the library tells its users besides errors: by the logger ``adahessian``.

Until an application sets up logging of its own, messages go to standard error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_STILL_AT_IT_SECONDS = 20.0


class _UntilConfigured(logging.StreamHandler):  # type: ignore[type-arg]
    """Speaks as long as nobody else does."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def _make_logger() -> logging.Logger:
    made = logging.getLogger("adahessian")
    handler = _UntilConfigured()
    handler.setFormatter(logging.Formatter("adahessian: %(message)s"))
    made.addHandler(handler)
    if made.level == logging.NOTSET:
        made.setLevel(logging.INFO)
    return made


_logger = _make_logger()


def say(message: str) -> None:
    """Tell the user something that is good to know."""
    _logger.info(message)


@cache
def say_once(message: str) -> None:
    """Tell the user something that need not be said for every object."""
    say(message)


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Tell the user what is being compiled, that it still is, and how long it took."""
    done = threading.Event()
    started = time.monotonic()

    def remind() -> None:
        while not done.wait(_STILL_AT_IT_SECONDS):
            say(f"still compiling {what}, {time.monotonic() - started:.0f} s so far")

    say(f"compiling {what}: up to two minutes the first time, seconds once torch has it in its cache")
    threading.Thread(target=remind, daemon=True).start()
    try:
        yield
    finally:
        done.set()
    say(f"compiled {what} in {time.monotonic() - started:.0f} s")
