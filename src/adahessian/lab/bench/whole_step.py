"""Whole training steps: the time and memory of each optimizer, relative to a baseline."""

from __future__ import annotations

import logging
import math
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from logging.handlers import BufferingHandler
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.benchmark import timer

from adahessian.base.errors import first_line
from adahessian.base.log import logger
from adahessian.cuda_graphs import CapturedFunction, Memory
from adahessian.lab.bench.memory import held, peak_mib, state_bytes
from adahessian.lab.bench.workloads import Batch, Workload
from adahessian.lab.configs import optimizers as configs
from adahessian.lab.configs.optimizers import OptimizerConfig
from adahessian.lab.training.optimizers import build_optimizer, set_precision
from adahessian.lab.training.steps import LossFn, Step, make_step

Mode = Literal["eager", "captured"]
Row: TypeAlias = dict[str, Any]

LR = 1e-6  # so low that training on noise does not diverge
BASELINE = "baseline"
# AdaHessianKron refreshes its roots at each of the first measurements, and then at every third one.
_FIRST, _EVERY_THIRD = 20, 3
_PLAIN = ("adam", "adamw", "adagrad", "rmsprop", "muon", "soap", "sophia")
_ROUNDED: dict[str, Any] = {"lr": LR, "batch_fraction": 0.25, "product_dtype": "bfloat16"}
_kron = partial(configs.AdaHessianKron, curvature_warmup=_FIRST)
# Optimizers and their settings, by the label of their row.
LABELS: dict[str, OptimizerConfig] = {
    "sgd": configs.SGD(lr=LR, momentum=0.9),
    **{name: configs.OPTIMIZERS[name](lr=LR) for name in _PLAIN},
    "adahessian": configs.AdaHessian(lr=LR, block_size=32),
    **{f"adahessian/every-{n}": configs.AdaHessian(block_size=32, curvature_every=n, **_ROUNDED) for n in (10, 20)},
    "adahessian-kron": _kron(lr=LR),
    **{f"adahessian-kron/every-{n}": _kron(curvature_every=n, **_ROUNDED) for n in (10, 20)},
    **{f"adahessian-kron/block-{n}": _kron(block_size=n, **_ROUNDED) for n in (64, 1024)},
}


class Timed(NamedTuple):
    """Something that takes steps."""

    seconds: Callable[[int], float]  # takes that many steps and returns their time
    cycle: int = 1  # number of steps after which the cost of a step repeats


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Measures the time of steps in rounds, in which all optimizers take turns."""

    rounds: int
    min_seconds: float = 0.2  # of each optimizer per round, at least

    def in_rounds(self, timed: Mapping[str, Timed]) -> dict[str, list[float]]:
        """Return the seconds per step of optimizers that are warm, one value per round."""
        counts = {
            name: each.cycle * max(1, math.ceil(self.min_seconds / each.seconds(each.cycle)))
            for name, each in timed.items()
        }
        found: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(self.rounds):
            for name, each in timed.items():
                found[name].append(each.seconds(counts[name]) / counts[name])
        return found


def seconds(step: Callable[[], Any], count: int) -> float:
    """Return the time of some steps, from an idle device to an idle device."""
    started = timer()
    for _ in range(count):
        step()
    return timer() - started


def median_ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of the ratios within rounds. Whatever slows down a round slows down both sides."""
    return median(own / other for own, other in zip(times, reference, strict=True))


class Job(NamedTuple):
    """An optimizer to measure. Jobs are sent to processes of their own."""

    workload: Workload
    mode: Mode
    label: str
    config: OptimizerConfig
    device: torch.device
    seed: int = 0

    @classmethod
    def of(cls, workload: Workload, mode: Mode, label: str, device: torch.device) -> Job:
        """Return the job of a label of LABELS, or of the BASELINE."""
        return cls(workload, mode, label, LABELS[workload.baseline if label == BASELINE else label], device)

    @property
    def cycle(self) -> int:
        """The number of steps after which the cost of a step repeats."""
        refreshes = _EVERY_THIRD if isinstance(self.config, configs.AdaHessianKron) else 1
        every: int = getattr(self.config, "curvature_every", getattr(self.config, "precondition_every", 1))
        return refreshes * every


@dataclass(frozen=True)
class Training:
    """A model in training. It keeps alive everything that a CUDA graph knows only by address."""

    model: nn.Module
    batch: Batch
    optimizer: Optimizer
    step: Step

    def __call__(self) -> Tensor:
        """Take a step and return its loss."""
        return self.step(self.batch)


def measure_steps(
    jobs: Sequence[Job], *, clock: Clock, at_once: int = 1, say: Callable[[str], None] = lambda message: None
) -> Iterator[Row]:
    """Yield one row per job, relative to the baseline of the same workload and mode.

    Every job trains in a process of its own, so that several can compile at the same time. Then all of them wait while
    one takes its turn. If a job cannot be prepared, its row has an ``error`` instead of numbers. The BASELINE of a
    workload and mode comes before its other jobs. ``at_once`` jobs are prepared at the same time.
    """
    baselines: dict[Any, _Process] = {}
    with ExitStack() as until_the_end:
        for start in range(0, len(jobs), at_once):
            with ExitStack() as for_now:
                processes = []
                for job in jobs[start : start + at_once]:
                    stack = until_the_end if job.label == BASELINE else for_now
                    processes.append(stack.enter_context(_Process(job)))
                slowest = max(process.wait().get("ready_s", 0.0) for process in processes)
                say(f"{len(processes)} of {len(jobs)} prepared in {slowest:.0f} s")
                for kind, group in groupby(processes, key=lambda process: process.job[:2]):
                    members = [*group]
                    yield from _rows(members, baselines.setdefault(kind, members[0]), clock)


def _rows(members: Sequence[_Process], baseline: _Process, clock: Clock) -> Iterator[Row]:
    """Let some processes and their baseline take turns, and yield the rows of the former."""
    turns = [process for process in dict.fromkeys([baseline, *members]) if "error" not in process.wait()]
    times = clock.in_rounds({process.job.label: Timed(process.seconds, process.job.cycle) for process in turns})
    for process in members:
        job, row, reference = process.job, process.wait(), baseline.wait().get("peak_mib")
        if process in turns:
            own = times[job.label]
            row |= {"step_ms": 1e3 * median(own), "round_ms": [1e3 * each for each in own]}
            row["ratio"] = median_ratio(own, times[BASELINE]) if BASELINE in times else None
            row["memory_ratio"] = row["peak_mib"] / reference if reference else None
        about = {"part": "steps", "mode": job.mode, "label": job.label, "optimizer": job.config.title}
        yield {**about, "config": asdict(job.config), **row}


class _Process:
    """A process that prepares a job and takes steps when it is told to."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._row: Row | None = None

    def __enter__(self) -> _Process:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(self.job, there))
        self._process.start()
        there.close()  # so that receiving fails if the process dies
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()  # ends a process that waits for its turn
        self._process.join(0 if self._row is None else 10)
        self._process.terminate()
        self._process.join()

    def wait(self) -> Row:
        """Wait until the job is prepared, and return what is known of its row."""
        if self._row is None:
            try:
                self._row = self._connection.recv()
            except EOFError:
                self._process.join()
                self._row = {"error": f"its process died with exit code {self._process.exitcode}"}
        return self._row

    def seconds(self, count: int) -> float:
        """Take some steps and return their time."""
        self._connection.send(count)
        elapsed: float = self._connection.recv()
        return elapsed


def _serve(job: Job, connection: Connection) -> None:
    """Prepare a job, send what is known of its row, and take steps until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark ends its processes itself
    began = timer()
    with _warnings() as warnings, suppress(EOFError, OSError):
        try:
            training, row = prepare(job)
        except Exception as error:  # any error of an optimizer, of the compiler or of the capture
            connection.send({"error": first_line(error), "warnings": warnings})
            return
        connection.send(row | {"ready_s": timer() - began, "warnings": warnings})
        while True:
            connection.send(seconds(training, connection.recv()))


def prepare(job: Job) -> tuple[Training, Row]:
    """Start a training, take steps until their cost repeats, and measure the memory of a cycle."""
    if job.device.type == "cuda":
        set_precision("tf32")
        torch.backends.cudnn.benchmark = True  # as `train` does
        start(job._replace(label="", mode="eager", config=configs.SGD(lr=LR)))()  # one-time allocations do not count
    captured = job.mode == "captured"
    before = held(job.device, captured=captured)
    training = start(job)
    seconds(training, 2 * job.cycle + getattr(job.config, "curvature_warmup", 0))
    peak = peak_mib(partial(seconds, training, job.cycle), before, job.device, captured=captured)
    if not math.isfinite(training().item()):
        raise ArithmeticError("The loss is not finite.")
    parameters = sum(param.numel() for param in training.model.parameters())
    return training, {
        "step": training.step.mode,
        "peak_mib": peak,
        "state_bytes_per_parameter": state_bytes(training.optimizer) / parameters,
        "parameters": parameters,
    }


def start(job: Job) -> Training:
    """Build the model, the optimizer and the step of a job."""
    model, batch = job.workload.build(job.device, job.seed)
    optimizer = build_optimizer(job.config, model, seed=job.seed)
    if job.label == BASELINE and job.mode == "captured" and job.device.type == "cuda":
        return Training(model, batch, optimizer, _one_graph(model, job.workload.loss, optimizer, batch))
    step = make_step(model, job.workload.loss, optimizer, job.config, compiled=job.mode == "captured")
    return Training(model, batch, optimizer, step)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what the library warns about, such as steps that cannot be captured."""
    found: list[str] = []
    handler = BufferingHandler(1000)
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        messages = [record.getMessage() for record in handler.buffer]
        found += [message for message in messages if not message.startswith("Compiling ")]


def _one_graph(model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, batch: Batch) -> Step:
    """Return a step whose compiled gradient and fused update are captured together as one CUDA graph.

    TrainingStep captures the gradient only, because schedules and hooks need an ordinary update.
    """
    params = list(model.parameters())
    loss_of = torch.compile(loss_fn, dynamic=False)
    for group in optimizer.param_groups:
        group["capturable"] = True

    def step() -> Tensor:
        loss = loss_of(model, batch)
        # backward() would accumulate gradients on the stream on which it first ran.
        for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
            is_ordered = gradient.stride() == param.stride()
            param.grad = gradient if is_ordered else torch.empty_like(param).copy_(gradient)
        optimizer.step()
        return loss.detach()

    captured = CapturedFunction(step, model, Memory())
    return Step(lambda _: captured.replay(), "captured")
