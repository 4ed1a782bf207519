"""The paper's tables of what learning rate, block size and delay of the Hessian change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from adahessian.lab.bench.tables import PAPER_OVERHEAD
from adahessian.lab.paper.cells import Cell, Cost, Entry, PaperTable
from adahessian.lab.paper.numbers import (
    BLOCK_SIZES,
    BLOCK_SWEEP,
    DELAY_AFTER_EPOCHS,
    DELAYED,
    DELAYS,
    LR_FACTORS,
    LR_SWEEP,
    SWEPT_TASK,
    THEORETICAL_COST,
)
from adahessian.lab.report.groups import OPTIMIZER_ORDER, Group
from adahessian.lab.report.phrases import ECONOMICAL_IN_WORDS, phrases
from adahessian.lab.report.tables import shown_paper
from adahessian.lab.settings import OPTIMIZER_TITLES, OptimizerName
from adahessian.lab.tasks.registry import EXPERIMENTS

# Settings of which curvature is measured, when, and how: a run that differs in these alone is the same but cheaper.
_OF_MEASURING = frozenset({"update_every", "measured_epochs", "batch_fraction", "tangents", "steady_start"})

# Delays that the paper does not have.
_MORE_DELAYS = (10, 20)


def sweep_tables() -> Iterator[PaperTable]:
    """The paper's tables."""
    yield _lr_sweep_of_paper()
    yield _block_sweep_of_paper()
    yield from (_delays(task) for task in DELAYED)


def other_sweep_tables(groups: Sequence[Group]) -> Iterator[PaperTable]:
    """Sweeps that the paper does not have: of other tasks that have runs of them, and economical AdaHessian."""
    yield from (_lr_sweep(task, groups) for task in _tasks_with(groups, {"lr"}))
    yield from (_block_sweep(task, groups) for task in _tasks_with(groups, {"block_size"}))
    economies = _economies(groups)
    if economies.rows:
        yield economies


def _tasks_with(groups: Iterable[Group], names: set[str]) -> list[str]:
    """Tasks other than the paper's with runs that differ in one setting alone."""
    tasks = [group.experiment.name for group in groups if group.changed.keys() == names]
    return [task for task in dict.fromkeys(tasks) if task != SWEPT_TASK]


# Learning rate --------------------------------------------------------------------------------------------------------


def _lr_cell(task: str, optimizer: OptimizerName, factor: float) -> Cell:
    lr = EXPERIMENTS[task].defaults[optimizer].lr
    return Cell(task=task, optimizer=optimizer, settings={} if factor == 1 else {"lr": lr * factor})


def _lr_sweep_of_paper() -> PaperTable:
    rows: list[list[Entry]] = []
    for optimizer, numbers in LR_SWEEP.items():
        title = OPTIMIZER_TITLES[optimizer]
        rows.append([f"{title}, paper", *(shown_paper(number, 2) or "diverges" for number in numbers)])
        rows.append([f"{title}, ours", *(_lr_cell(SWEPT_TASK, optimizer, factor) for factor in LR_FACTORS)])
    return PaperTable(
        title="Table 6: learning rate times a factor, IWSLT14, BLEU",
        headings=["learning rate times", *(f"{factor:g}" for factor in LR_FACTORS)],
        rows=rows,
    )


def _lr_sweep(task: str, groups: Sequence[Group]) -> PaperTable:
    experiment = EXPERIMENTS[task]
    found: dict[OptimizerName, set[float]] = {}
    for group in groups:
        if group.experiment.name == task and group.changed.keys() == {"lr"}:
            factor = group.changed["lr"] / experiment.defaults[group.optimizer].lr
            found.setdefault(group.optimizer, {1.0}).add(float(f"{factor:.4g}"))
    factors = sorted(set().union(*found.values()))
    return PaperTable(
        title=f"Learning rate times a factor: {experiment.title}, {experiment.metric.title}",
        headings=["learning rate times", *(f"{factor:g}" for factor in factors)],
        rows=[
            [OPTIMIZER_TITLES[optimizer], *(_lr_cell(task, optimizer, factor) for factor in factors)]
            for optimizer in OPTIMIZER_ORDER
            if optimizer in found
        ],
        note="As Table 6, for a task of which the paper has no such runs.",
    )


# Block size -----------------------------------------------------------------------------------------------------------


def _block_cell(task: str, size: int) -> Cell:
    same = EXPERIMENTS[task].defaults["adahessian"].block_size == size
    return Cell(task=task, optimizer="adahessian", settings={} if same else {"block_size": size})


def _block_sweep_of_paper() -> PaperTable:
    return PaperTable(
        title="Table 7: block size, IWSLT14, BLEU",
        headings=["block size", *map(str, BLOCK_SIZES)],
        rows=[
            ["AdaHessian, paper", *(shown_paper(number, 2) for number in BLOCK_SWEEP)],
            ["AdaHessian, ours", *(_block_cell(SWEPT_TASK, size) for size in BLOCK_SIZES)],
        ],
    )


def _block_sweep(task: str, groups: Sequence[Group]) -> PaperTable:
    experiment = EXPERIMENTS[task]
    sizes = {experiment.defaults["adahessian"].block_size} | {
        group.changed["block_size"]
        for group in groups
        if group.experiment.name == task and group.changed.keys() == {"block_size"}
    }
    return PaperTable(
        title=f"Block size: {experiment.title}, {experiment.metric.title}",
        headings=["block size", *map(str, sorted(sizes))],
        rows=[["AdaHessian", *(_block_cell(task, size) for size in sorted(sizes))]],
        note="As Table 7, for a task of which the paper has no such runs.",
    )


# Delay of the Hessian -------------------------------------------------------------------------------------------------


def _delay_cell(task: str, every: int) -> Cell:
    settings = {} if every == 1 else {"update_every": every, "measured_epochs": DELAY_AFTER_EPOCHS}
    return Cell(task=task, optimizer="adahessian", settings=settings)


def _delays(task: str) -> PaperTable:
    experiment = EXPERIMENTS[task]
    nothing = [""] * len(_MORE_DELAYS)
    cells = [_delay_cell(task, every) for every in (*DELAYS, *_MORE_DELAYS)]
    costs = PAPER_OVERHEAD[task.removeprefix("cifar10-")]
    bases: tuple[tuple[OptimizerName, str], ...] = (("sgd", "time_to_sgd"), ("adam", "time_to_adam"))
    rows: list[list[Entry]] = [
        [f"{experiment.metric.title}, paper", *(shown_paper(number, 2) for number in DELAYED[task]), *nothing],
        [f"{experiment.metric.title}, ours", *cells],
        ["time of a step x SGD, in theory", *(f"{cost:.2f}" for cost in THEORETICAL_COST), *nothing],
    ]
    for base, key in bases:
        heading = f"time of a step x {OPTIMIZER_TITLES[base]}"
        rows.append([f"{heading}, paper", *(f"{cost:.2f}" for cost in costs[key]), *nothing])
        rows.append([f"{heading}, ours", *(Cost(of=cell, base=base) for cell in cells)])
    return PaperTable(
        title=f"Table 8: Hessian every so many steps, {experiment.title}",
        headings=["Hessian every", *(str(every) for every in (*DELAYS, *_MORE_DELAYS))],
        rows=rows,
        note=f"After {DELAY_AFTER_EPOCHS:g} epochs with a Hessian at every step. Times are those of whole runs, ours "
        "with the same hardware and precision on both sides of a ratio; the paper's are from one RTX Titan.",
    )


def is_the_same_but_cheaper(group: Group) -> bool:
    """Whether runs have the paper's settings, or those of ``--economical``, but for the curvature they measure."""
    others = _but_for_measuring(group.changed)
    return not others or others == _but_for_measuring(group.experiment.economies)


def _but_for_measuring(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _OF_MEASURING}


def _economies(groups: Sequence[Group]) -> PaperTable:
    """Other ways to spend less on curvature, on any task, beside the full AdaHessian and SGD."""
    delayed = [
        (task, dict(_delay_cell(task, every).settings)) for task in DELAYED for every in (*DELAYS, *_MORE_DELAYS)
    ]
    # One for each choice, under whatever names and conditions it was run.
    choices = {
        (group.experiment.name, tuple(group.changed.items())): group
        for group in groups
        if group.changed
        and is_the_same_but_cheaper(group)
        and (group.experiment.name, dict(group.changed)) not in delayed
    }
    rows: list[list[Entry]] = []
    for group in choices.values():
        full = Cell(task=group.experiment.name, optimizer="adahessian")
        cheaper = Cell(task=group.experiment.name, optimizer="adahessian", settings=group.changed)
        rows.append(
            [
                f"{group.experiment.title}: {', '.join(phrases(group.changed, group.experiment.economies))}",
                group.experiment.metric.title,
                cheaper,
                full,
                Cost(of=cheaper, base="sgd"),
                Cost(of=full, base="sgd"),
            ]
        )
    return PaperTable(
        title="AdaHessian with less curvature",
        headings=["task", "metric", "less", "every step", "time x SGD, less", "time x SGD, every step"],
        rows=rows,
        note=f"Ours: the paper has no such runs. {ECONOMICAL_IN_WORDS}",
    )
