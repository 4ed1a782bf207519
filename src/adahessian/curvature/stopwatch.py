"""The time that passes cost, on the device too, without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# So many measurements are kept waiting before those that are done are added up.
_MOST_WAITING = 64


class Stopwatch:
    """Adds up the time of what runs inside :meth:`running`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._waiting: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Time what is inside: on the device where it is launched, on the host elsewhere."""
        if device.type != "cuda":
            started = time.perf_counter()
            try:
                yield
            finally:
                self._seconds += time.perf_counter() - started
            return
        with torch.cuda.device(device):
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            try:
                yield
            finally:
                events[1].record()
                self._waiting.append(events)
        if len(self._waiting) > _MOST_WAITING:
            self._add_up(only_done=True)

    @property
    def seconds(self) -> float:
        """The time so far. Reading waits for the device."""
        self._add_up(only_done=False)
        return self._seconds

    def _add_up(self, *, only_done: bool) -> None:
        waiting, self._waiting = self._waiting, []
        for start, end in waiting:
            if only_done and not end.query():
                self._waiting.append((start, end))
            else:
                end.synchronize()
                self._seconds += start.elapsed_time(end) / 1e3
