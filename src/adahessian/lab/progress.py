"""Live progress of many training runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from adahessian.lab.digits import Epoch


class RunsProgress:
    """Shows how runs are getting on: on a terminal a live line for each contender, in a log a line for each run.

    Args:
        console: Where to show it.
        names: Names of the contenders.
        seeds: Runs of each contender.
        epochs: Epochs of each run.
    """

    def __init__(self, console: Console, names: Sequence[str], *, seeds: int, epochs: int) -> None:
        self._console = console
        self._seeds = seeds
        self._epochs = epochs
        self._epochs_done = 0
        self._epochs_in_all = len(names) * seeds * epochs
        self._started = time.perf_counter()
        self._width = max(map(len, names))
        self._bars = Progress(
            TextColumn(f"{{task.description:<{self._width}}}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._lines = {name: self._bars.add_task(name, total=seeds * epochs, status="") for name in names}
        self._all = self._bars.add_task("all runs", total=self._epochs_in_all, status="")

    def __enter__(self) -> RunsProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def after_epoch(self, name: str, *, run: int, number: int, epoch: Epoch) -> None:
        """Show an epoch.

        Args:
            name: The contender.
            run: Number of its run, from 1.
            number: Number of the epoch within the run, from 1.
            epoch: What is known after it.
        """
        self._epochs_done += 1
        status = f"run {run} of {self._seeds}  loss {epoch.train_loss:6.4f}  accuracy {epoch.accuracy:7.2%}"
        time_left = f"about {self._seconds_left():.0f} s left"
        self._bars.update(self._lines[name], advance=1, status=status)
        self._bars.update(self._all, advance=1, status=time_left)
        if number == self._epochs and not self._console.is_terminal:
            self._console.print(f"{name:<{self._width}}  {status}  {time_left}", highlight=False, soft_wrap=True)

    def _seconds_left(self) -> float:
        elapsed = time.perf_counter() - self._started
        return elapsed / self._epochs_done * (self._epochs_in_all - self._epochs_done)
