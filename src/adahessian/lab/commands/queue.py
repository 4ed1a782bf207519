"""`adahessian queue`: many runs in the order of a file, several at once, within a time limit."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import tyro
from tyro.conf import Positional

from adahessian.lab.commands.train import parse_runs
from adahessian.lab.configs.checks import Count, Options, Positive
from adahessian.lab.configs.run import Run, Session
from adahessian.lab.errors import ConfigError, LabError, RunFileError, StoppedError
from adahessian.lab.results.run_file import RunFiles, read_run
from adahessian.lab.training.interrupts import Interrupts

_say = partial(print, flush=True)
_RESERVED = ("output", "resume", "overwrite", "exclusive", "stop_after_epochs", "stop_after_steps")


class Queue(Options):
    """Train a list of runs. Finished runs are skipped, and interrupted runs are resumed."""

    file: Positional[Path]  # File with a line per run: TASK OPTIMIZER --options, the most important first.
    at_once: Count = 1  # Runs at the same time. With 1, their times are recorded as exclusive.
    minutes: Positive | None = None  # Time limit. After it, runs write checkpoints, and the same command resumes them.
    data_dir: Path = Session.data_dir  # Folder with the data, for lines that do not set their own.
    output: Path = Session.output  # Folder for the runs.


class _Job:
    """A run in a process of its own."""

    def __init__(self, run: Run, arguments: Sequence[str], precision: str, output: Path) -> None:
        self.run, self.arguments, self.precision = run, arguments, precision
        self.name = f"{run.task}: {run.label}, seed {run.seed}"
        self.result = RunFiles(output=output, task=run.task, label=run.label, seed=run.seed).result
        self.log = self.result.with_suffix(".log")

    @property
    def is_finished(self) -> bool:
        """Whether its result exists. Damaged results, and those of other settings, are left to `adahessian train`."""
        try:
            return bool(read_run(self.result).config == json.loads(json.dumps(asdict(self.run.config))))
        except (OSError, RunFileError):
            return False

    def start(self, at_once: int) -> None:
        """Start the process. Without OMP_NUM_THREADS, several processes share the cores."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        program = Path(sys.argv[0])  # a user's script, which knows tasks of its own, or this package
        is_script = program.suffix == ".py" and program.name != "__main__.py"
        command = [sys.executable, *([program] if is_script else ["-m", "adahessian"]), "train", *self.arguments]
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_once))} if at_once > 1 else {}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=threads | os.environ
            )

    def end(self) -> tuple[str, bool]:
        """Return how the run ended and whether it failed. Delete its log unless it failed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        if self.process.returncode not in (0, -signal.SIGTERM, -signal.SIGINT, 130):  # the others were asked to stop
            return "\n          ".join([f"failed    {self.name}", *lines[-8:], f"Log: {self.log}"]), True
        self.log.unlink()
        return f"stopped   {self.name}" if self.process.returncode else f"finished  {lines[-1]}", False


def main(argv: Sequence[str]) -> None:
    """Train all runs, or as many as the time limit allows."""
    queue = tyro.cli(Queue, args=argv, prog="adahessian queue")
    jobs = _read(queue)
    waiting = [job for job in jobs if not job.is_finished]
    _say(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are finished.")
    with Interrupts() as interrupts:
        failed = _work(queue, waiting, interrupts)
    if left := sum(not job.is_finished for job in jobs) - failed:
        _say(f"{left} runs are left. Run the same command to continue.")
    if interrupts.requested:
        raise StoppedError("The queue was interrupted.", planned=False)
    if failed:
        raise LabError(f"{failed} runs of {queue.file} failed. See their last lines above.")


def _work(queue: Queue, waiting: list[_Job], interrupts: Interrupts) -> int:
    """Start runs until none is left or time is over, and return how many failed."""
    until = time.monotonic() + 60 * (queue.minutes or float("inf"))
    running: list[_Job] = []
    is_stopping, failed = False, 0
    try:
        while True:
            if not is_stopping and (interrupts.requested or time.monotonic() > until):
                is_stopping = True
                _say("Stopping. Every run writes a checkpoint.")
                for job in running:
                    job.process.terminate()
            while waiting and len(running) < queue.at_once and not is_stopping:
                job = waiting.pop(0)
                _say(f"started   {job.name}")
                job.start(queue.at_once)
                running.append(job)
            if not running:
                return failed
            time.sleep(0.1)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                how, has_failed = job.end()
                failed += has_failed
                _say(how)
    finally:  # whatever happens, no process stays behind
        for job in running:
            job.process.terminate()
            job.process.wait()


def _read(queue: Queue) -> list[_Job]:
    """Return the runs of the file, each once. All lines are checked, and one error names all that are wrong."""
    try:
        lines = queue.file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{queue.file} cannot be read ({error}). Pass a file with one run per line.") from error
    known: dict[Path, _Job] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        try:
            for job in _parse(re.sub(r"(^|\s)#.*", "", line), queue):
                earlier = known.setdefault(job.result, job)
                if (earlier.run, earlier.precision) != (job.run, job.precision):
                    raise ConfigError("An earlier line with other options has the same name. Pass another --name.")
        except (LabError, ValueError, SystemExit) as error:  # before it exits, the parser prints why
            problems.append(f"{queue.file}, line {number}: {line if isinstance(error, SystemExit) else error}")
    if problems or not known:
        raise ConfigError("\n".join(problems) or f"{queue.file} has no runs. Write one per line.")
    return [*known.values()]


def _parse(line: str, queue: Queue) -> Iterator[_Job]:
    """Yield the runs of a line, one per seed."""
    line = line.strip().removeprefix("adahessian train")
    if not line:
        return
    runs, session = parse_runs(shlex.split(line), "adahessian train")
    if reserved := [name for name in _RESERVED if getattr(session, name) != getattr(Session, name)]:
        option = reserved[0].replace("_", "-")
        raise ConfigError(f"--{option} cannot be set in a queue. Pass --output and --minutes to `adahessian queue`.")
    common = ["--output", str(queue.output), "--resume", *["--exclusive"] * (queue.at_once == 1)]
    if session.data_dir == Session.data_dir:
        common += ["--data-dir", str(queue.data_dir)]
    own = shlex.split(re.sub(r"--seeds[=\s][\d\s]*", "", line))
    for run in runs:
        yield _Job(run, [*own, *common, "--seeds", str(run.seed)], session.precision, queue.output)
