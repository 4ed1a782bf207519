"""``adahessian queue``: many runs, in the order of a list, several at a time."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any

import tyro
from rich.console import Console

from adahessian.lab.interruption import Interruption
from adahessian.lab.runs import NotARunError, differences, read_result
from adahessian.lab.train import Session, parse_train
from adahessian.lab.training import Plan

_SECONDS_BETWEEN_LOOKS = 0.1
_LINES_OF_A_FAILURE = 5
# What a run returns that was asked to stop, before it could say so and after.
_STOPPED = (-signal.SIGTERM, 130)


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Work through a list of runs. What is finished is passed over, what was interrupted goes on."""

    file: Annotated[Path, tyro.conf.Positional]
    """A line for each run: what follows `adahessian train`. With several seeds it is one run each."""

    at_once: int = 1
    """Runs at the same time. Those that share a device say so, and reports leave out their times."""

    minutes: float | None = None
    """Stop after so many minutes, each run with a checkpoint: the same command goes on."""

    data_dir: Path = Session.data_dir
    """Folder with the data, for lines that do not name their own."""

    output: Path = Session.output
    """Folder for the runs."""

    def run(self) -> None:
        """Run them all, or as many as there is time for."""
        if self.at_once < 1 or (self.minutes is not None and self.minutes <= 0):
            raise SystemExit("adahessian queue: --at-once is 1 or more, --minutes above 0")
        console = Console(highlight=False, soft_wrap=True, markup=False)
        jobs = self._jobs()
        waiting = [job for job in jobs if not job.plan.files.result.exists()]
        console.print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are finished")
        left, failed, interrupted = self._work(waiting, console)
        if left:
            console.print(f"{left} are left: the same command goes on")
        if interrupted:
            raise SystemExit(130)
        if failed:
            raise SystemExit(f"adahessian queue: {failed} failed, as said above")
        if not left:
            console.print(f"now: adahessian report {self.output}")

    def _work(self, waiting: list[_Job], console: Console) -> tuple[int, int, bool]:
        """Returns how many runs are left, how many have failed, and whether somebody asked to stop."""
        until = time.monotonic() + (60 * self.minutes if self.minutes is not None else float("inf"))
        running: list[_Running] = []
        is_stopping = False
        stopped = failed = 0

        def tell() -> None:
            console.print("stopping, as soon as all runs have written their checkpoints; Ctrl-C again stops at once")

        with ExitStack() as stack, Interruption(tell) as interruption:
            while running or (waiting and not is_stopping):
                while waiting and len(running) < self.at_once and not is_stopping:
                    said = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
                    running.append(_Running(waiting.pop(0), said, self._environment(), console))
                    stack.callback(running[-1].end)  # whatever happens here, no run is left alone
                if not is_stopping and (interruption.asked or time.monotonic() > until):
                    is_stopping = True
                    for each in running:
                        each.process.terminate()
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                for each in [each for each in running if each.process.poll() is not None]:
                    running.remove(each)
                    each.tell()
                    stopped += each.process.returncode in _STOPPED
                    failed += each.process.returncode not in (0, *_STOPPED)
        return len(waiting) + stopped, failed, interruption.asked

    def _environment(self) -> dict[str, str]:
        """What runs find around them. Several at once share the cores, which otherwise each of them would take."""
        own = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.at_once))} if self.at_once > 1 else {}
        return own | os.environ

    def _jobs(self) -> list[_Job]:
        """All runs, each once.

        Raises:
            SystemExit: If a line is not one, or means another run than what has its name.
        """
        try:
            lines = self.file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(f"adahessian queue: {self.file} cannot be read: {error}") from error
        known: dict[Path, tuple[_Job, int]] = {}
        problems = []
        for number, line in enumerate(lines, 1):
            try:
                for job in self._jobs_of(line):
                    earlier, there = known.setdefault(job.plan.files.result, (job, number))
                    if differing := differences(earlier.identity, job.identity):
                        raise SystemExit(
                            f"it has the name of line {there} and differs in {differing}: give it a --name"
                        )
                    job.refuse_another()
            except SystemExit as problem:
                # What is no text has been said already, by the parser of options.
                words = problem.code if isinstance(problem.code, str) else line
                problems.append(f"adahessian queue: {self.file}, line {number}: {words}")
        if problems:
            raise SystemExit("\n".join(problems))
        if not known:
            raise SystemExit(f"adahessian queue: {self.file} names no run: a line is what follows adahessian train")
        return [job for job, _ in known.values()]

    def _jobs_of(self, line: str) -> Iterator[_Job]:
        try:
            arguments = shlex.split(re.split(r"(?:^|\s)#", line, maxsplit=1)[0])
        except ValueError as error:
            raise SystemExit(str(error)) from error
        if arguments[:2] == ["adahessian", "train"]:
            del arguments[:2]
        if not arguments:
            return
        train = parse_train(arguments)
        session = train.session
        if session.overwrite or session.resume or session.output != Session.output:
            raise SystemExit("--output, --resume and --overwrite are the queue's own business")
        if session.stop_after_epochs or session.stop_after_steps:
            raise SystemExit(
                "a queue works until its runs are finished, or for some --minutes: leave --stop-after away"
            )
        data_dir = self.data_dir if session.data_dir == Session.data_dir else session.data_dir
        session = replace(session, output=self.output, data_dir=data_dir, resume=True, shared=self.at_once > 1)
        common = ["--output", str(self.output), "--data-dir", str(data_dir), "--resume", "--seeds"]
        for plan in replace(train, session=session).plans():
            own = [*_without_seeds(arguments), *["--shared"] * session.shared, *common, str(plan.seed)]
            yield _Job(own, plan)


def _without_seeds(arguments: list[str]) -> Iterator[str]:
    is_seed = False
    for argument in arguments:
        if argument.startswith("--"):
            is_seed = argument.partition("=")[0] == "--seeds"
        if not is_seed:
            yield argument


@dataclass(frozen=True)
class _Job:
    arguments: list[str]
    plan: Plan

    @property
    def title(self) -> str:
        files = self.plan.files
        return f"{files.task}: {files.name}, seed {files.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        return self.plan.identity(processes=1)

    def refuse_another(self) -> None:
        """Refuse a finished run of that name that is not this one."""
        place = self.plan.files.result
        if not place.exists():
            return
        try:
            result = read_result(place)
        except NotARunError as error:
            raise SystemExit(str(error)) from error
        if differing := differences(result.identity, self.identity):
            raise SystemExit(f"{place} is another run, which differs in {differing}: give this one a --name")


class _Running:
    """A run in a process of its own, which ends without harm to the others whatever happens to it."""

    def __init__(self, job: _Job, said: IO[str], environment: dict[str, str], console: Console) -> None:
        self._job = job
        self._console = console
        self._said = said
        console.print(f"begins    {job.title}")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "adahessian", "train", *job.arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            env=environment,
        )

    def end(self) -> None:
        """Have it end, if it has not."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def tell(self) -> None:
        """Say what it has come to."""
        self._said.seek(0)
        lines = [line for line in self._said.read().splitlines() if line.strip()]
        self._said.close()
        if self.process.returncode == 0:
            self._console.print(f"finished  {lines[-1] if lines else self._job.title}")
        elif self.process.returncode in _STOPPED:
            self._console.print(f"stopped   {self._job.title}")
        else:
            self._console.print(f"failed    {self._job.title}")
            for line in lines[-_LINES_OF_A_FAILURE:]:
                self._console.print(f"          {line}")
