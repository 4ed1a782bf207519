"""Progress of a run: on a terminal and in log.jsonl."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from adahessian.lab.configs.run import Metric, Run
from adahessian.lab.results.run_file import RunFiles
from adahessian.lab.training.atomic_files import atomic_write
from adahessian.lab.training.distributed import rank

# Seconds between two lines where a line cannot be overwritten.
_LINE_EVERY = 30.0


class Progress:
    """Shows step, loss, metric, learning rate, step time and time left. Only rank 0 writes the log."""

    def __init__(self, run: Run, files: RunFiles, console: Console) -> None:
        self._run, self._files, self._console = run, files, console
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), TextColumn("{task.fields[status]}"))
        self._bar = Bar(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=300)
        self._task = self._bar.add_task(run.label, total=None, status="loading")
        self._metric = ""
        self._printed = time.monotonic()

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(
        self, records: Sequence[dict[str, float]], step: int, total_steps: int, parameters: int, conditions: Any
    ) -> None:
        """Print what is trained, and open the log. Entries that are newer than the checkpoint are dropped."""
        self._bar.reset(self._task, total=total_steps, completed=step, status="first step")
        if rank() == 0:
            with atomic_write(self._files.log) as log:
                log.write("".join(map(_line, records)).encode())
        self._print(
            f"{self._run.task}: {self._run.label}, seed {self._run.seed}. {parameters:,} parameters, "
            f"{total_steps:,} steps on {conditions['device']}, {conditions['precision']}, {conditions['mode']}"
            + (f", resumed after step {step:,}." if step else ".")
        )

    def step(self, step: int, loss: float, lr: float) -> None:
        """Show a step. Called about once per second."""
        self._show(step, loss, lr, prints=time.monotonic() - self._printed > _LINE_EVERY)

    def evaluated(self, record: dict[str, float]) -> None:
        """Show and log an evaluation."""
        step = int(record["step"])
        self._metric = shown(self._run.config.task.validation_metric, record)
        self._show(step, record["train_loss"], record["lr"], prints=True)
        if rank() == 0:
            with self._files.log.open("a") as log:
                log.write(_line(record))

    def stopping(self) -> None:
        """Confirm a request to stop."""
        self._print("Stopping after this step. Press Ctrl-C again to stop without a checkpoint.")

    def _show(self, step: int, loss: float, lr: float, *, prints: bool) -> None:
        self._bar.update(self._task, completed=step)
        task = self._bar.tasks[0]
        parts = [f"step {step:,}/{task.total:,}", f"loss {loss:.4f}", self._metric, f"lr {lr:.2g}"]
        if task.speed and task.time_remaining is not None:
            parts += [f"{1e3 / task.speed:.1f} ms/step", f"{timedelta(seconds=task.time_remaining)} left"]
        status = "  ".join(filter(None, parts))
        self._bar.update(self._task, status=status)
        if prints and not self._console.is_terminal:
            self._printed = time.monotonic()
            self._print(status)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=not self._console.is_terminal)


def shown(metric: Metric, values: Mapping[str, float]) -> str:
    """Return a metric with its value as text, such as ``"test accuracy 91.20%"``. Empty if there is no value."""
    if metric.name not in values:
        return ""
    title, _, unit = metric.title.partition(", ")
    return f"{title} {values[metric.name]:.{metric.digits}f}{'%' * (unit == '%')}"


def _line(record: Mapping[str, float]) -> str:
    return json.dumps({name: value if math.isfinite(value) else None for name, value in record.items()}) + "\n"
