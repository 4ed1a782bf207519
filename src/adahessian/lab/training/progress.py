"""Progress of a run: on a terminal, in log.jsonl and in TensorBoard."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from adahessian.lab.configs.run import Metric, Run
from adahessian.lab.results.run_file import RunFiles
from adahessian.lab.training.atomic_files import atomic_write

# Seconds between two lines where a line cannot be overwritten.
_LINE_EVERY = 30.0


class Progress:
    """Shows step, loss, metric, learning rate, step time and time left. Only rank 0 prints and writes.

    Args:
        run: The run.
        files: Its files.
        console: Where to print.
        is_writer: This process is rank 0.
    """

    def __init__(self, run: Run, files: RunFiles, console: Console, *, is_writer: bool = True) -> None:
        self._run, self._files, self._console, self._is_writer = run, files, console, is_writer
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), TextColumn("{task.fields[status]}"))
        self._bar = Bar(*columns, console=console, disable=not (is_writer and console.is_terminal))
        self._task = self._bar.add_task(run.label, total=None, status="loading")
        self._tensorboard: Any = None
        self._total_steps = 0
        self._metric = ""
        self._seconds_per_step = math.nan
        self._looked_at, self._looked, self._printed = 0, 0.0, 0.0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def start(
        self, records: Sequence[dict[str, float]], step: int, total_steps: int, parameters: int, conditions: Any
    ) -> None:
        """Print what is trained, and open the logs. Entries that are newer than the checkpoint are dropped."""
        self._total_steps, self._looked_at = total_steps, step
        self._looked = self._printed = time.perf_counter()
        self._bar.update(self._task, total=total_steps, completed=step, status="first step")
        if not self._is_writer:
            return
        with atomic_write(self._files.log) as log:
            log.write("".join(map(_line, records)).encode())
        self._tensorboard = _summary_writer(self._files, step)
        self._print(
            f"{self._run.task}: {self._run.label}, seed {self._run.seed}. {parameters:,} parameters, "
            f"{total_steps:,} steps on {conditions['device']}, {conditions['precision']}, {conditions['mode']}"
            + (f", resumed after step {step:,}." if step else ".")
        )

    def step(self, step: int, loss: float, lr: float) -> None:
        """Show a step. Called about once per second."""
        self._show(step, loss, lr, prints=time.perf_counter() - self._printed > _LINE_EVERY)
        if self._tensorboard is not None:
            self._tensorboard.add_scalar("step_loss", loss, step)
            self._tensorboard.add_scalar("lr", lr, step)

    def evaluated(self, record: dict[str, float]) -> None:
        """Show and log an evaluation."""
        step, metric = int(record["step"]), self._run.config.task.validation_metric
        self._metric = shown(metric, record)
        self._show(step, record["train_loss"], record["lr"], prints=True)
        if self._is_writer:
            with self._files.log.open("a") as log:
                log.write(_line(record))
        if self._tensorboard is not None:
            for name, value in record.items():
                if name != "step":
                    self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()

    def stopping(self) -> None:
        """Confirm a request to stop."""
        self._print("Stopping after this step. Press Ctrl-C again to stop without a checkpoint.")

    def _show(self, step: int, loss: float, lr: float, *, prints: bool) -> None:
        now = time.perf_counter()
        if step > self._looked_at:
            recent = (now - self._looked) / (step - self._looked_at)
            is_known = math.isfinite(self._seconds_per_step)
            self._seconds_per_step = 0.7 * self._seconds_per_step + 0.3 * recent if is_known else recent
            self._looked_at, self._looked = step, now
        left = self._seconds_per_step * (self._total_steps - step)
        parts = [f"step {step:,}/{self._total_steps:,}", f"loss {loss:.4f}", self._metric, f"lr {lr:.2g}"]
        if math.isfinite(left):
            parts += [f"{1e3 * self._seconds_per_step:.1f} ms/step", f"{_duration(left)} left"]
        status = "  ".join(filter(None, parts))
        self._bar.update(self._task, completed=step, status=status)
        if prints and not self._console.is_terminal:
            self._printed = now
            self._print(status)

    def _print(self, text: str) -> None:
        if self._is_writer:
            self._console.print(text, highlight=False, markup=False, soft_wrap=not self._console.is_terminal)


def shown(metric: Metric, values: Mapping[str, float]) -> str:
    """Return a metric with its value as text, such as ``"test accuracy 91.20%"``. Empty if there is no value."""
    if metric.name not in values:
        return ""
    title, _, unit = metric.title.partition(", ")
    return f"{title} {values[metric.name]:.{metric.digits}f}{'%' * (unit == '%')}"


def _line(record: Mapping[str, float]) -> str:
    return json.dumps({name: value if math.isfinite(value) else None for name, value in record.items()}) + "\n"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def _summary_writer(files: RunFiles, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(files.tensorboard), purge_step=step + 1)
