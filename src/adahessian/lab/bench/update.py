"""The update alone: a step without a measurement, relative to fused AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import median

import torch
from torch import nn
from torch.optim import Optimizer

import adahessian
from adahessian.lab.bench.memory import state_bytes
from adahessian.lab.bench.whole_step import LABELS, Clock, Row, Timed, median_ratio, seconds
from adahessian.lab.bench.workloads import GPT2
from adahessian.lab.configs.optimizers import AdaHessian, AdaHessianKron, OptimizerConfig
from adahessian.lab.training.optimizers import build_optimizer

UPDATES = ("adamw", "muon", "adahessian", "adahessian-kron")


def measure_update(
    labels: Sequence[str], build: Callable[[], nn.Module] = GPT2, *, clock: Clock, device: torch.device, seed: int = 0
) -> Iterator[Row]:
    """Yield the row of AdamW, then one row per optimizer out of UPDATES.

    All of them take turns on the parameters of the model that ``build`` makes. Its gradients are noise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().to(device)
        params = list(model.parameters())
        for param in params:
            param.grad = torch.randn(param.shape).mul_(0.02).to(device)
    count = sum(param.numel() for param in params)
    configs = {label: LABELS[label] for label in [UPDATES[0], *labels]}
    started = {label: _start(config, model, seed) for label, config in configs.items()}
    timed = {label: Timed(partial(seconds, each.step)) for label, each in started.items()}
    for each in timed.values():
        each.seconds(2)
    times = clock.in_rounds(timed)
    for label, config in configs.items():
        yield {
            "part": "update",
            "mode": "eager",
            "label": label,
            "optimizer": config.title,
            "config": asdict(config),
            "step_ms": 1e3 * median(times[label]),
            "ratio": median_ratio(times[label], times[UPDATES[0]]),
            "state_bytes_per_parameter": state_bytes(started[label]) / count,
            "parameters": count,
        }


def _start(config: OptimizerConfig, model: nn.Module, seed: int) -> Optimizer:
    """Return an optimizer that has measured a quadratic, if it measures, and does not measure again."""
    if isinstance(config, (AdaHessian, AdaHessianKron)):
        config = replace(config, curvature_every=10**9)
    optimizer = build_optimizer(config, model, seed=seed)
    if isinstance(optimizer, adahessian.AdaHessian):
        adahessian.Curvature(model, _quadratic, optimizer, compile=False).measure(torch.ones(4))
    return optimizer


def _quadratic(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.stack([param.square().sum() for param in model.parameters()]).sum()
