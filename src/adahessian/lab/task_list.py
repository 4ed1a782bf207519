"""``adahessian tasks``: what can be trained, how the paper set it, and what came out."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from adahessian.lab.settings import OPTIMIZER_TITLES
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


def _settings_by_option(experiment: Experiment[Any]) -> dict[str, list[str]]:
    """The values of each option, optimizer by optimizer."""
    every = list(experiment.defaults.values())
    return {
        f"--{field.name.replace('_', '-')}": [_value(getattr(settings, field.name)) for settings in every]
        for field in fields(every[0])
    }


def _common_settings(experiment: Experiment[Any]) -> str:
    return "  ".join(
        f"{option} {values[0]}"
        for option, values in _settings_by_option(experiment).items()
        if len({*values}) == 1 and values[0] not in ("", "None")
    )


def _differing_settings(experiment: Experiment[Any]) -> Table:
    differing = {name: values for name, values in _settings_by_option(experiment).items() if len(set(values)) > 1}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for i, name in enumerate(experiment.defaults):
        own = "  ".join(f"{option} {values[i]}" for option, values in differing.items())
        paper = experiment.paper.get(name)
        table.add_row(OPTIMIZER_TITLES[name], f"{own}\nthe paper: {_number(paper)}" if paper else own)
    return table


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_value, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
