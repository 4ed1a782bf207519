"""``adahessian queue``: many runs, in the order of a list, several at a time."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import tyro
from rich.console import Console

from adahessian.lab.interruption import Interruption
from adahessian.lab.runs import RunFiles, label
from adahessian.lab.tasks.registry import experiment_named
from adahessian.lab.train import parse_train

_SECONDS_BETWEEN_LOOKS = 0.1
_LINES_OF_A_FAILURE = 5


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Work through a list of runs. What is finished is passed over, what was interrupted goes on."""

    file: Annotated[Path, tyro.conf.Positional]
    """A line for each run: what follows `adahessian train`. With several seeds it is one run each."""

    at_once: int = 1
    """Runs at the same time. Those that share a device say so, and reports leave out their times."""

    minutes: float | None = None
    """Stop after so many minutes, each run with a checkpoint: the same command goes on."""

    data_dir: Path = Path("data")
    """Folder with the data, for lines that do not name their own."""

    output: Path = Path("runs")
    """Folder for the runs."""

    def run(self) -> None:
        """Run them all, or as many as there is time for."""
        if self.at_once < 1 or (self.minutes is not None and self.minutes <= 0):
            raise SystemExit("adahessian queue: --at-once is 1 or more, --minutes above 0")
        console = Console(highlight=False, soft_wrap=True)
        jobs = list(self._jobs())
        waiting = [job for job in jobs if not job.files.result.exists()]
        console.print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are finished")
        until = time.monotonic() + (60 * self.minutes if self.minutes is not None else float("inf"))
        running: list[_Running] = []
        failed = 0
        is_stopping = False
        with Interruption() as interruption:
            while running or (waiting and not is_stopping):
                while waiting and len(running) < self.at_once and not is_stopping:
                    running.append(_Running(waiting.pop(0), console))
                if not is_stopping and (interruption.asked or time.monotonic() > until):
                    is_stopping = True
                    for each in running:
                        each.process.send_signal(signal.SIGTERM)
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                for each in [each for each in running if each.process.poll() is not None]:
                    running.remove(each)
                    if not each.tell_the_end(is_stopping):
                        failed += 1
        left = sum(not job.files.result.exists() for job in jobs) - failed
        if left:
            console.print(f"{left} are left: the same command goes on")
        if interruption.asked:
            raise SystemExit(130)
        if failed:
            raise SystemExit(f"adahessian queue: {failed} failed, as said above; all others went on")
        if not left:
            console.print(f"now: adahessian report {self.output}")

    def _jobs(self) -> Iterator[_Job]:
        try:
            lines = self.file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(f"adahessian queue: {self.file} cannot be read: {error}") from error
        seen = set()
        for number, line in enumerate(lines, 1):
            for job in self._jobs_of(line, f"adahessian queue: {self.file}, line {number}"):
                if job.files.result not in seen:  # two processes must not write the same run
                    seen.add(job.files.result)
                    yield job

    def _jobs_of(self, line: str, where: str) -> Iterator[_Job]:
        try:
            arguments = shlex.split(line, comments=True)
        except ValueError as error:
            raise SystemExit(f"{where}: {error}") from error
        if not arguments:
            return
        common = ["--output", str(self.output), "--resume", *["--shared"] * (self.at_once > 1)]
        if not any(argument.partition("=")[0] == "--data-dir" for argument in arguments):
            common += ["--data-dir", str(self.data_dir)]
        try:
            train = parse_train([*arguments, *common])
        except SystemExit as error:
            # What is no text has been said already, by the parser of options.
            raise SystemExit(f"{where}: {error.code if isinstance(error.code, str) else line}") from error
        own = experiment_named(train.task).defaults[train.optimizer]
        name = train.name or label(train.optimizer, train.settings, own)
        for seed in train.seeds:
            files = RunFiles(output=self.output, task=train.task, name=name, seed=seed)
            # The last --seeds counts.
            yield _Job([*arguments, *common, "--seeds", str(seed)], files)


@dataclass(frozen=True)
class _Job:
    arguments: list[str]
    files: RunFiles

    @property
    def title(self) -> str:
        return f"{self.files.task}: {self.files.name}, seed {self.files.seed}"


class _Running:
    """A run in a process of its own, which ends without harm to the others whatever happens to it."""

    def __init__(self, job: _Job, console: Console) -> None:
        self._job = job
        self._console = console
        self._said: IO[Any] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed at the end)
        console.print(f"begins    {job.title}")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "adahessian", "train", *job.arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )

    def tell_the_end(self, is_stopping: bool) -> bool:
        """Say what it has come to; whether it has not failed."""
        self._said.seek(0)
        lines = [line for line in self._said.read().splitlines() if line.strip()]
        self._said.close()
        if self.process.returncode == 0:
            self._console.print(f"finished  {lines[-1] if lines else self._job.title}")
            return True
        if is_stopping and not self._job.files.result.exists():
            self._console.print(f"stopped   {self._job.title}")
            return True
        self._console.print(f"failed    {self._job.title}")
        for line in lines[-_LINES_OF_A_FAILURE:]:
            self._console.print(f"          {line}", markup=False)
        return False
