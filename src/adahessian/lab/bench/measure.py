"""Time per step and memory of each optimizer, relative to a baseline."""

from __future__ import annotations

import logging
import math
import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from logging.handlers import BufferingHandler
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from torch.utils.benchmark import timer

from adahessian.base.errors import first_line
from adahessian.base.log import logger
from adahessian.lab.bench.jobs import BASELINE, Job, Row, prepare


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Measures the time of steps in rounds, in which all optimizers take turns."""

    rounds: int
    min_seconds: float = 0.2  # of each optimizer per round, at least

    def in_rounds(self, turns: Mapping[str, _Process]) -> dict[str, list[float]]:
        """Return the seconds per step of optimizers that are warm, one value per round."""
        counts = {
            name: each.cycle * max(1, math.ceil(self.min_seconds / each.seconds(each.cycle)))
            for name, each in turns.items()
        }
        found: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(self.rounds):
            for name, each in turns.items():
                found[name].append(each.seconds(counts[name]) / counts[name])
        return found


def median_ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of the ratios within rounds. Anything that slows down a round affects both sides."""
    return median(own / other for own, other in zip(times, reference, strict=True))


def measure(jobs: Sequence[Job], *, clock: Clock, at_once: int = 1) -> Iterator[Row]:
    """Yield one row per job, relative to the baseline of the same workload and mode.

    Every job trains in a process of its own, so that ``at_once`` of them can compile at the same time. Then all of them
    wait while one takes its turn. If a job cannot be prepared, its row has an ``error`` instead of numbers. The
    BASELINE of a workload and mode must come before its other jobs.
    """
    baselines: dict[Any, _Process] = {}
    with ExitStack() as until_the_end:
        for start in range(0, len(jobs), at_once):
            with ExitStack() as for_now:
                processes = []
                for job in jobs[start : start + at_once]:
                    stack = until_the_end if job.label == BASELINE else for_now
                    processes.append(_Process(job))
                    stack.callback(processes[-1].end)
                slowest = max(process.row().get("ready_s", 0.0) for process in processes)
                logger.info("%d of %d jobs were prepared in %.0f s.", start + len(processes), len(jobs), slowest)
                for kind, group in groupby(processes, key=lambda process: process.job[:2]):
                    members = [*group]
                    yield from _rows(members, baselines.setdefault(kind, members[0]), clock)


def _rows(members: Sequence[_Process], baseline: _Process, clock: Clock) -> Iterator[Row]:
    """Let some processes and their baseline take turns, and yield the rows of the processes."""
    turns = [process for process in dict.fromkeys([baseline, *members]) if "error" not in process.row()]
    times = clock.in_rounds({process.job.label: process for process in turns})
    for process in members:
        job, row, reference = process.job, process.row(), baseline.row().get("peak_mib")
        if process in turns:
            own = times[job.label]
            row |= {"step_ms": 1e3 * median(own), "round_ms": [1e3 * each for each in own]}
            row["ratio"] = median_ratio(own, times[BASELINE]) if BASELINE in times else None
            row["memory_ratio"] = row["peak_mib"] / reference if reference else None
        yield {"mode": job.mode, "label": job.label, "optimizer": job.config.title, "config": asdict(job.config), **row}


class _Process:
    """A process that prepares a job and takes steps when it is told to."""

    def __init__(self, job: Job) -> None:
        self.job, self.cycle = job, job.cycle
        self._row: Row | None = None
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(self.job, there))
        self._process.start()
        there.close()  # so that receiving fails if the process dies

    def end(self) -> None:
        """End the process."""
        self._connection.close()  # ends a process that waits for its turn
        self._process.join(0 if self._row is None else 10)
        self._process.terminate()
        self._process.join()

    def row(self) -> Row:
        """Wait until the job is prepared, and return what is known of its row."""
        if self._row is None:
            try:
                self._row = self._connection.recv()
            except EOFError:
                self._process.join()
                self._row = {"error": f"its process died with exit code {self._process.exitcode}"}
        return self._row

    def seconds(self, count: int) -> float:
        """Take some steps and return their time, from an idle device to an idle device."""
        self._connection.send(count)
        elapsed: float = self._connection.recv()
        return elapsed


def _serve(job: Job, connection: Connection) -> None:
    """Prepare a job, send what is known of its row, and take steps until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark ends its processes itself
    warnings = BufferingHandler(1000)  # of the library, such as steps that cannot be captured
    warnings.setLevel(logging.WARNING)
    logger.addHandler(warnings)
    began = timer()
    try:
        training, row = prepare(job)
    except Exception as error:  # any error of an optimizer, of the compiler or of the capture
        row = {"error": first_line(error)}
    messages = [record.getMessage() for record in warnings.buffer]
    row |= {"ready_s": timer() - began, "warnings": [each for each in messages if not each.startswith("Compiling ")]}
    with suppress(EOFError, OSError):
        connection.send(row)
        while "error" not in row:
            count = connection.recv()
            began = timer()
            for _ in range(count):
                training()
            connection.send(timer() - began)
