"""Whole training steps: the time and memory of each optimizer, relative to a baseline."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from logging.handlers import BufferingHandler
from statistics import median
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.benchmark import timer

from adahessian.base.errors import first_line
from adahessian.base.log import logger, warn_once
from adahessian.cuda_graphs import CapturedFunction, Memory
from adahessian.lab.bench.memory import held, peak_mib, state_bytes
from adahessian.lab.bench.workloads import Batch, LossFn, Workload
from adahessian.lab.configs import optimizers as configs
from adahessian.lab.configs.optimizers import OptimizerConfig
from adahessian.lab.training.optimizers import build_optimizer
from adahessian.lab.training.steps import make_step

Mode = Literal["eager", "captured"]
Row: TypeAlias = dict[str, Any]

LR = 1e-6  # so low that training on noise does not diverge
BASELINE = "baseline"


def _labels() -> dict[str, OptimizerConfig]:
    rounded: dict[str, Any] = {"lr": LR, "batch_fraction": 0.25, "product_dtype": "bfloat16"}
    kron = partial(configs.AdaHessianKron, curvature_warmup=0)
    return {
        "sgd": configs.SGD(lr=LR, momentum=0.9),
        **{name: configs.OPTIMIZERS[name](lr=LR) for name in ("adam", "adamw", "adagrad", "rmsprop")},
        **{name: configs.OPTIMIZERS[name](lr=LR) for name in ("muon", "soap", "sophia")},
        "adahessian": configs.AdaHessian(lr=LR, block_size=32),
        **{
            f"adahessian/every-{every}": configs.AdaHessian(block_size=32, curvature_every=every, **rounded)
            for every in (10, 20)
        },
        "adahessian-kron": kron(lr=LR),
        **{f"adahessian-kron/every-{every}": kron(curvature_every=every, **rounded) for every in (10, 20)},
        **{f"adahessian-kron/block-{size}": kron(block_size=size, **rounded) for size in (64, 1024)},
    }


LABELS = _labels()
"""Optimizers and their settings, by the label of their row."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Measures the time of steps."""

    device: torch.device
    rounds: int
    min_seconds: float = 0.2
    """Shortest time of each step per round."""

    def seconds(self, step: Callable[[], Any], count: int) -> float:
        """Return the time of some steps, from an idle device to an idle device."""
        started = timer()
        for _ in range(count):
            step()
        return timer() - started

    def in_rounds(self, steps: Mapping[str, tuple[Callable[[], Any], int]]) -> dict[str, list[float]]:
        """Return the seconds per step, one value per round. All steps take turns in every round.

        Args:
            steps: Steps that are warm, each with the number of calls after which its cost repeats.
        """
        counts = {
            name: cycle * max(1, math.ceil(self.min_seconds / self.seconds(step, cycle)))
            for name, (step, cycle) in steps.items()
        }
        found: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(self.rounds):
            for name, (step, _cycle) in steps.items():
                found[name].append(self.seconds(step, counts[name]) / counts[name])
        return found


def median_ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of the ratios within rounds. Whatever slows down a round slows down both sides."""
    return median(own / other for own, other in zip(seconds, reference, strict=True))


@dataclass(frozen=True)
class _Training:
    """A model in training. It keeps alive everything that a CUDA graph knows only by address."""

    model: nn.Module
    batch: Batch
    optimizer: Optimizer
    step: Callable[[Batch], Tensor]
    kind: str
    """Whether the step is captured, compiled, partly so ("mixed"), or eager."""

    def __call__(self) -> Tensor:
        return self.step(self.batch)


def measure_steps(
    workload: Workload, mode: Mode, labels: Sequence[str], *, clock: Clock, warm_only: bool = False, seed: int = 0
) -> Iterator[Row]:
    """Yield the row of the baseline, then one row per optimizer.

    Each optimizer trains a model of its own, which is freed before the next one starts. Only the baseline stays, and
    takes turns with each of them. If an optimizer fails, its row has an ``error`` instead of numbers.

    Args:
        workload: What to train.
        mode: How to train it.
        labels: Keys of LABELS, and BASELINE, which is measured in any case.
        clock: Measures the time.
        warm_only: Take two steps with each of ``labels`` to fill the compiler's cache, and measure nothing.
        seed: Seed of parameters and data.
    """
    baseline: _Training | None = None
    baseline_peak: float | None = None
    if clock.device.type == "cuda" and not warm_only:  # so that one-time allocations are not charged to the baseline
        _start(workload, "eager", workload.baseline, clock.device, seed)()
    for label in labels if warm_only else dict.fromkeys([BASELINE, *labels]):
        config = _config(workload, label)
        row: Row = {"part": "steps", "mode": mode, "label": label, "optimizer": config.title, "config": asdict(config)}
        start = partial(_start, workload, mode, label, clock.device, seed)
        with _warnings() as warnings:
            try:
                if warm_only:
                    row["seconds"] = clock.seconds(partial(_two_steps, start), 1)
                else:
                    training, numbers = _measure(start, interval(config), mode, clock, baseline)
                    peak = numbers["peak_mib"]
                    if label == BASELINE:
                        baseline, baseline_peak, numbers["ratio"] = training, peak, 1.0
                    del training
                    row |= numbers | {"memory_ratio": peak / baseline_peak if peak and baseline_peak else None}
            except Exception as error:  # any error of an optimizer, of the compiler or of the capture
                row["error"] = first_line(error)
        yield row | {"warnings": warnings}
    torch.compiler.reset()


def interval(config: OptimizerConfig) -> int:
    """Return the number of steps after which the cost of a step repeats."""
    every: int = getattr(config, "curvature_every", getattr(config, "precondition_every", 1))
    return every


def _config(workload: Workload, label: str) -> OptimizerConfig:
    return LABELS[workload.baseline if label == BASELINE else label]


def _start(workload: Workload, mode: Mode, label: str, device: torch.device, seed: int) -> _Training:
    model, batch = workload.build(device, seed)
    config = _config(workload, label)
    optimizer = build_optimizer(config, model, seed=seed)
    if label == BASELINE and mode == "captured" and device.type == "cuda":
        return _Training(model, batch, optimizer, _one_graph(model, workload.loss, optimizer, batch), "captured")
    step = make_step(model, workload.loss, optimizer, config, compiled=mode == "captured")
    return _Training(model, batch, optimizer, step, step.mode)


def _two_steps(start: Callable[[], _Training]) -> None:
    training = start()
    for _ in range(2):
        training()


def _measure(
    start: Callable[[], _Training], cycle: int, mode: Mode, clock: Clock, baseline: _Training | None
) -> tuple[_Training, Row]:
    before = held(clock.device)
    training = start()
    for _ in range(2):  # compiles and captures, then repeats the cycle without that
        clock.seconds(training, cycle)
    run_cycle = partial(clock.seconds, training, cycle)
    peak = peak_mib(run_cycle, before, clock.device, captured=mode == "captured")
    steps = {"own": (training, cycle)} | ({BASELINE: (baseline, 1)} if baseline else {})
    seconds = clock.in_rounds(steps)
    if not math.isfinite(training().item()):
        raise ArithmeticError("The loss is not finite.")
    parameters = sum(param.numel() for param in training.model.parameters())
    return training, {
        "step": training.kind,
        "step_ms": 1e3 * median(seconds["own"]),
        "ratio": median_ratio(seconds["own"], seconds[BASELINE]) if baseline else None,
        "peak_mib": peak,
        "state_bytes_per_parameter": state_bytes(training.optimizer) / parameters,
        "parameters": parameters,
        "round_ms": [1e3 * each for each in seconds["own"]],
    }


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what the library warns about, such as steps that cannot be captured."""
    found: list[str] = []
    handler = BufferingHandler(1000)
    handler.setLevel(logging.WARNING)
    warn_once.cache_clear()
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        messages = [record.getMessage() for record in handler.buffer]
        found += [message for message in messages if not message.startswith("Compiling ")]


def _one_graph(model: nn.Module, loss_fn: LossFn, optimizer: Optimizer, batch: Batch) -> Callable[[Batch], Tensor]:
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
    return lambda _: captured.replay()
