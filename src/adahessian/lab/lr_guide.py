"""``adahessian study-lr``: which learning rates work, and how settings move them. The guide rests on its files."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import adahessian
from adahessian.lab.digits import Batch
from adahessian.lab.lr_settings import OPTIMIZERS, VARIATIONS, Setting
from adahessian.lab.lr_tasks import TASK_NAMES, Task, TaskName, mean_loss, task_named
from adahessian.lab.provenance import provenance
from adahessian.lab.threads import one_thread

# A learning rate is usable if it makes this share of the best one's progress from the untrained loss.
USABLE_SHARE = 0.98

# Batches of the range test, which takes so many steps by default.
RANGE_STEPS = 80


@dataclass(frozen=True)
class Row:
    """A setting at each of its learning rates. Losses are means on what was held out, never scaled."""

    setting: str
    untrained_loss: float
    losses: dict[float, list[float]]
    """For each learning rate the loss at the end of each seed's run; infinite where it diverged."""

    suggestions: list[float]
    """What the range test suggests with each seed."""

    suggestion_losses: list[float]
    """The loss of each seed's run at its own suggestion."""

    seconds: float

    @property
    def best_lr(self) -> float:
        """The learning rate with the lowest mean loss."""
        return min(self.losses, key=lambda lr: mean(self.losses[lr]))

    @property
    def usable_lrs(self) -> list[float]:
        """The learning rates that make nearly the progress of the best."""
        best = mean(self.losses[self.best_lr])
        worst_usable = self.untrained_loss - USABLE_SHARE * (self.untrained_loss - best)
        return [lr for lr, losses in self.losses.items() if mean(losses) <= worst_usable]

    def record(self) -> dict[str, Any]:
        """All of it for the file of results, with None for what JSON has no number for."""
        return {
            "setting": self.setting,
            "best_lr": self.best_lr,
            "best_loss": mean(self.losses[self.best_lr]),
            "usable_lrs": self.usable_lrs,
            "suggestions": self.suggestions,
            "suggestion_loss": _finite(mean(self.suggestion_losses)),
            "losses": {f"{lr:g}": [_finite(loss) for loss in losses] for lr, losses in self.losses.items()},
            "untrained_loss": self.untrained_loss,
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True, kw_only=True)
class StudyLr:
    """Which learning rates work for SGD, AdamW and AdaHessian on small real tasks, and how settings move them."""

    tasks: tuple[TaskName, ...] = TASK_NAMES
    """What to train: two networks on the digits that scikit-learn carries, a small GPT on characters."""

    settings: tuple[str, ...] = ()
    """Only settings of these names, such as AdamW or hessian_power=0.5; all by default."""

    seeds: int = 3
    """Runs of each setting at each learning rate, with the seeds 0, 1, 2 and so on."""

    steps: int | None = None
    """Length of each run; that of the task by default."""

    data_dir: Path | None = None
    """Folder with ptb/ptb.train.txt and ptb/ptb.valid.txt, the text."""

    output: Path = Path("runs")
    """Folder for the results: one file a task, written after every setting."""

    def run(self) -> None:
        """Run every setting at every learning rate, print a line for each setting and write the files."""
        if self.seeds < 1 or (self.steps is not None and self.steps < 1):
            raise SystemExit("adahessian study-lr: --seeds and --steps must be 1 or more")
        names = [setting.name for setting in (*OPTIMIZERS, *VARIATIONS)]
        if unknown := [name for name in self.settings if name not in names]:
            raise SystemExit(f"adahessian study-lr: --settings knows no {unknown[0]!r}, but {names}")
        console = Console()
        self.output.mkdir(parents=True, exist_ok=True)
        with one_thread():
            for name in self.tasks:
                try:
                    task = task_named(name, self.data_dir)
                except FileNotFoundError as missing:
                    raise SystemExit(f"adahessian study-lr: {missing}") from missing
                self._study(task, console)

    def _study(self, task: Task, console: Console) -> None:
        steps = self.steps or task.steps
        path = self.output / f"lr-{task.name}.json"
        about = {
            "provenance": provenance(seed=list(range(self.seeds))),
            "settings": {
                "task": task.name,
                "steps": steps,
                "schedule": "half a cosine to 0",
                "usable_share": USABLE_SHARE,
                "parameters": sum(param.numel() for param in task.model(0).parameters()),
            },
        }
        rows = []
        console.rule(f"{task.name}: {steps} steps, {self.seeds} seeds", align="left")
        for setting in (*OPTIMIZERS, *VARIATIONS):
            if task.name in setting.only_on and (not self.settings or setting.name in self.settings):
                row = sweep(task, setting, seeds=self.seeds, steps=steps)
                rows.append(row.record())
                path.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")
                console.print(_line(row), highlight=False, soft_wrap=True)
        console.print(f"  {path}", highlight=False, soft_wrap=True)


def sweep(task: Task, setting: Setting, *, seeds: int, steps: int) -> Row:
    """Train at every learning rate of a setting with every seed, and ask for suggestions."""
    started = time.perf_counter()
    suggestions = [suggested_lr(task, setting, seed=seed) for seed in range(seeds)]
    return Row(
        setting=setting.name,
        untrained_loss=mean(task.held_out_loss(task.model(seed)) for seed in range(seeds)),
        losses={lr: [train(task, setting, lr, seed=seed, steps=steps) for seed in range(seeds)] for lr in setting.lrs},
        suggestions=suggestions,
        suggestion_losses=[train(task, setting, lr, seed=seed, steps=steps) for seed, lr in enumerate(suggestions)],
        seconds=time.perf_counter() - started,
    )


def train(task: Task, setting: Setting, lr: float, *, seed: int, steps: int) -> float:
    """Train once. For one seed, all settings begin with the same weights and see the same batches.

    Returns:
        The loss on what was held out, infinite if the run diverged.
    """
    run = Run(task, setting, lr, seed)
    schedule = LambdaLR(run.optimizer, lambda step: lr_factor(step, steps, round(setting.warmup * steps)))
    for batch in run.batches(steps):
        if run.curvature is not None:
            run.curvature.measure(batch)
        run.optimizer.zero_grad()
        loss = run.loss_fn(run.model, batch)
        if not loss.isfinite():
            return math.inf
        loss.backward()
        run.optimizer.step()
        schedule.step()
    held_out = task.held_out_loss(run.model)
    return held_out if math.isfinite(held_out) else math.inf


def lr_factor(step: int, steps: int, warmup_steps: int) -> float:
    """What the learning rate is multiplied with: it rises in a line, then falls to 0 along half a cosine."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps)))


def suggested_lr(task: Task, setting: Setting, *, seed: int) -> float:
    """What the range test suggests at the start of a run, whatever learning rate the optimizer was made with."""
    run = Run(task, setting, setting.lrs[0], seed)
    source = run.curvature or run.optimizer
    found = adahessian.suggest_lr(source, list(run.batches(RANGE_STEPS)), model=run.model, loss_fn=run.loss_fn)
    return found.suggestion


class Run:
    """A network, its optimizer and its data, at the start.

    Args:
        task: What to train on what.
        setting: With which optimizer.
        lr: The learning rate.
        seed: Seed of the weights, of the order of the data and of the curvature's probes.
    """

    def __init__(self, task: Task, setting: Setting, lr: float, seed: int) -> None:
        self._task = task
        self._setting = setting
        self._seed = seed
        self.model = task.model(seed)
        self.optimizer = setting.build(self.model, lr, seed)
        self.curvature: adahessian.Curvature[nn.Module] | None = None
        if isinstance(self.optimizer, adahessian.AdaHessian):
            self.curvature = adahessian.Curvature(
                self.model, self.loss_fn, self.optimizer, batch_fraction=setting.batch_fraction
            )

    def loss_fn(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss, multiplied as the setting says."""
        return self._setting.loss_scale * mean_loss(model, batch)

    def batches(self, number: int) -> Iterator[Batch]:
        """The first batches of the seed."""
        stream = self._task.batches(torch.Generator().manual_seed(self._seed))
        return (batch for _, batch in zip(range(number), stream, strict=False))


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _line(row: Row) -> str:
    low, high = row.usable_lrs[0], row.usable_lrs[-1]
    proposed = ", ".join(f"{lr:.2g}" for lr in row.suggestions)
    return (
        f"{row.setting:36} best lr {row.best_lr:<6g} loss {mean(row.losses[row.best_lr]):.3f}  "
        f"usable {low:g} to {high:g}  suggested {proposed}: loss {mean(row.suggestion_losses):.3f}  {row.seconds:.0f} s"
    )
