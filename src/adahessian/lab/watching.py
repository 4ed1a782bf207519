"""Live progress of a training run, and its numbers for TensorBoard."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn

from adahessian.lab.processes import is_first
from adahessian.lab.tasks.task import Metric
from adahessian.lab.training import Plan, per_step

# In a log, where nothing can be overwritten: seconds from a line to the next within an epoch, and after epochs.
_LINE_EVERY = 30.0
_EPOCH_LINE_EVERY = 5.0
# What stands between two parts of a line.
_PARTED = "  "


class LiveWatcher:
    """Shows epoch, loss, metric, learning rate, time of a step and time left: on a terminal live, behind a bar.

    Args:
        console: Where to show it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TaskProgressColumn(),
            _FoldedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._handlers: list[logging.Handler] = []
        self._line: Any = None
        self._plan: Plan | None = None
        self._writer: Any = None
        self._loss = float("nan")
        self._metrics: list[str] = []
        self._printed = self._looked = time.perf_counter()
        self._seconds = 0.0
        self._looks = 0
        self._step = self._step_looked_at = self._steps = 0

    def __enter__(self) -> LiveWatcher:
        # The library's messages go through the console, above the bar.
        logger = logging.getLogger("adahessian")
        self._handlers, logger.handlers = logger.handlers, [_ConsoleHandler(self._console)]
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
        logging.getLogger("adahessian").handlers = self._handlers
        if self._writer is not None:
            self._writer.close()

    def start(self, plan: Plan, *, steps_per_epoch: int, steps_done: int, parameters: int) -> None:
        """Say what is trained."""
        self._plan = plan
        self._steps = steps_per_epoch * plan.settings.epochs
        self._step = self._step_looked_at = steps_done
        self._writer = _tensorboard(plan, steps_done)
        name = f"{plan.files.name}, seed {plan.seed}"
        continued = f", continued after step {steps_done:,}" if steps_done else ""
        self._console.print(
            f"{plan.experiment.title}: {name}. {parameters:,} parameters; "
            f"{counted(plan.settings.epochs, 'epoch')} of {counted(steps_per_epoch, 'step')} on {plan.device} in "
            f"{plan.precision}"
            f"{', compiled' if plan.compiled else ''}{continued}",
            highlight=False,
            # A log has whole lines; on a terminal they break between words.
            soft_wrap=not self._console.is_terminal,
        )
        first = f"the {'next' if steps_done else 'first'} step{', which compiles' if plan.compiled else ''}"
        self._line = self._bar.add_task(plan.optimizer, total=self._steps, completed=steps_done, status=[first])
        self._printed = self._looked = time.perf_counter()

    def step(self, *, step: int, loss: float | None, lr: float) -> None:
        """Move the bar."""
        self._step = step
        if loss is not None:
            self._loss = loss
            self._time_steps()
            self._bar.update(self._line, completed=step, status=self._status(lr))
            if self._writer is not None:
                self._writer.add_scalar("step_loss", loss, step)
                self._writer.add_scalar("lr", lr, step)
            self._print(lr, every=_LINE_EVERY)

    def epoch(self, record: dict[str, float]) -> None:
        """Show an epoch's result."""
        assert self._plan is not None
        experiment = self._plan.experiment
        self._metrics = [shown(metric, record) for metric in (experiment.curve, *experiment.beside)]
        self._loss = record["train_loss"]
        self._time_steps()
        self._bar.update(self._line, completed=self._step, status=self._status(record["lr"]))
        is_last = record["epoch"] == self._plan.settings.epochs
        self._print(record["lr"], every=0.0 if is_last else _EPOCH_LINE_EVERY)
        if self._writer is not None:
            for name, value in record.items():
                if name not in ("epoch", "step", "lr"):
                    self._writer.add_scalar(name, value, record["step"])
            self._writer.flush()

    def stopping(self) -> None:
        """Say that it has been heard."""
        self._console.print("stopping after this step, with a checkpoint; Ctrl-C again stops at once", highlight=False)

    def _print(self, lr: float, *, every: float) -> None:
        now = time.perf_counter()
        if not self._console.is_terminal and now - self._printed >= every:
            self._printed = now
            self._console.print(_PARTED.join(self._status(lr)), highlight=False, soft_wrap=True)

    def _time_steps(self) -> None:
        """The time of a step of late, so that compiling is soon forgotten; evaluation counts, as it takes time too."""
        now, steps = time.perf_counter(), self._step - self._step_looked_at
        if steps:
            recent = (now - self._looked) / steps
            # The first look has seen the compiler at work: it is not shown, and the second does not count it in.
            self._seconds = recent if self._looks < 2 else 0.7 * self._seconds + 0.3 * recent
            self._looks += 1
            self._looked, self._step_looked_at = now, self._step

    def _status(self, lr: float) -> list[str]:
        assert self._plan is not None
        seconds = self._seconds
        epochs = self._plan.settings.epochs
        epoch = max(1, math.ceil(self._step * epochs / max(1, self._steps)))
        parts = [
            f"epoch {epoch}/{epochs}",
            f"loss {self._loss:.4f}",
            *self._metrics,
            f"lr {lr:.2g}",
        ]
        if self._looks > 1:
            parts += [
                per_step(seconds),
                f"{_duration(seconds * (self._steps - self._step))} left",
            ]
        return [*filter(None, parts)]


class _FoldedColumn(ProgressColumn):
    """The status, in several lines where the terminal is narrow."""

    def render(self, task: Task) -> _Folded:
        return _Folded(task.fields["status"])


class _Folded:
    """Parts that stay whole, as many a line as there is room for, if there is for the longest."""

    def __init__(self, parts: list[str]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for part in self._parts:
            longer = line + _PARTED + part if line else part
            if line and len(longer) > options.max_width:
                yield line
                longer = part
            line = longer
        yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, self._parts)), len(_PARTED.join(self._parts)))


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), highlight=False, markup=False, soft_wrap=True)


def shown(metric: Metric, results: Mapping[str, float]) -> str:
    """A metric's value among these results with its name, for people; empty if it is not there."""
    value = results.get(metric.name)
    if value is None:
        return ""
    name, *_ = metric.title.split(", ")
    unit = "%" if metric.title.endswith(", %") else ""
    return f"{metric.short or name} {value:.{metric.digits}f}{unit}"


def counted(count: int, what: str) -> str:
    """A number of things: 1 epoch, 2 epochs."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _tensorboard(plan: Plan, steps_done: int) -> Any:
    if not is_first():
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    # What a killed run has written after its last checkpoint is written again.
    return SummaryWriter(str(plan.files.tensorboard), purge_step=steps_done + 1)
