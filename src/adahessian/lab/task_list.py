"""``adahessian tasks``: what can be trained, how the paper set it, and what came out."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from adahessian.lab.settings import OF_ADAHESSIAN, OPTIMIZER_TITLES
from adahessian.lab.tasks.registry import EXPERIMENTS, UnknownTaskError, experiment_named
from adahessian.lab.tasks.task import Experiment, PaperNumber


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """List all tasks, with the paper's numbers; or one of them, with its settings for each optimizer."""

    task: tyro.conf.Positional[str | None] = None
    """The task to describe; without one, all are listed."""

    def run(self) -> None:
        """Print it."""
        console = Console()
        if self.task is None:
            console.print(_all_tasks())
            console.print("adahessian tasks NAME shows the settings of one, for each optimizer.", highlight=False)
            return
        try:
            experiment = experiment_named(self.task)
        except UnknownTaskError as error:
            raise SystemExit(f"adahessian tasks: {error}") from error
        console.print(f"{experiment.title}: {experiment.metric.title}.\nData: {experiment.data}\n", highlight=False)
        console.print(f"For all optimizers: {_common_settings(experiment)}\n", highlight=False)
        console.print(_differing_settings(experiment), "")
        for note in experiment.notes:
            console.print(f"- {note}", highlight=False)
        where = "" if experiment.needs_no_data else " --data-dir DIR"
        console.print(f"\n  adahessian train {experiment.name}{where}", highlight=False)


def _all_tasks() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for experiment in EXPERIMENTS.values():
        paper = ", ".join(f"{OPTIMIZER_TITLES[name]} {_number(number)}" for name, number in experiment.paper.items())
        described = f"{experiment.title}: {experiment.metric.title}"
        table.add_row(experiment.name, f"{described}\nthe paper: {paper}" if paper else described)
    return table


def _number(number: PaperNumber | None) -> str:
    if number is None:
        return ""
    return f"{number.mean:g}" + (f" ± {number.deviation:g}" if number.deviation is not None else "")


def _settings_of_all(experiment: Experiment[Any]) -> list[str]:
    """The settings that all optimizers have alike."""
    every = list(experiment.defaults.values())
    return [
        field.name
        for field in fields(every[0])
        if field.name not in OF_ADAHESSIAN and all(_same(settings, every[0], field.name) for settings in every)
    ]


def _same(one: Any, other: Any, name: str) -> bool:
    return bool(getattr(one, name) == getattr(other, name))


def _common_settings(experiment: Experiment[Any]) -> str:
    settings = next(iter(experiment.defaults.values()))
    return _typed(settings, _settings_of_all(experiment))


def _differing_settings(experiment: Experiment[Any]) -> Table:
    said = _settings_of_all(experiment)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for optimizer, settings in experiment.defaults.items():
        foreign = () if optimizer == "adahessian" else OF_ADAHESSIAN
        own = _typed(settings, [each.name for each in fields(settings) if each.name not in (*said, *foreign)])
        paper = experiment.paper.get(optimizer)
        table.add_row(OPTIMIZER_TITLES[optimizer], f"{own}\nthe paper: {_number(paper)}" if paper else own)
    return table


def _typed(settings: Any, names: list[str]) -> str:
    """Settings as they are typed; what is not set is left out."""
    return "  ".join(filter(None, (_option(name.replace("_", "-"), getattr(settings, name)) for name in names)))


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    values = value if isinstance(value, tuple) else (value,)
    if not values or value is None:
        return ""
    return " ".join([f"--{name}", *map(_short, values)])


def _short(value: Any) -> str:
    """As short as it can be typed: with fewer digits it would be another run."""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
