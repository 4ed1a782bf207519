"""Runs that differ in nothing but their seed, and what they came to together."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import mean, stdev
from typing import Any

from adahessian.lab.report.phrases import phrases
from adahessian.lab.runs import Result, label
from adahessian.lab.settings import REMOVED, OptimizerName, Settings, is_economical
from adahessian.lab.tasks.registry import EXPERIMENTS
from adahessian.lab.tasks.task import Experiment, Metric

# In the order of the paper's tables; what is not in them comes before AdaHessian.
OPTIMIZER_ORDER: tuple[OptimizerName, ...] = ("sgd", "adam", "adamw", "adagrad", "rmsprop", "adahessian")


@dataclass(frozen=True)
class Spread:
    """Values of several seeds."""

    mean: float
    deviation: float | None
    """The standard deviation of a sample; None for one value."""

    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Of values, or None if there are none.

        Example:
            >>> Spread.of([1.0, 3.0])
            Spread(mean=2.0, deviation=1.4142135623730951, count=2)
        """
        if not values:
            return None
        return cls(mean(values), stdev(values) if len(values) > 1 else None, len(values))

    def shown(self, digits: int) -> str:
        """For people: the mean, and the deviation if there is one."""
        spread = "" if self.deviation is None else f" ± {self.deviation:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The runs of one optimizer with one choice of settings, under the same conditions."""

    experiment: Experiment[Any]
    optimizer: OptimizerName
    name: str
    changed: Mapping[str, Any]
    """Those of the settings that are not the task's own, as JSON has them."""

    distinctive: Mapping[str, Any]
    """Those of them that not all groups of the same task and budget have."""

    conditions: Mapping[str, Any]
    runs: Sequence[Result]
    """One a seed, by seed."""

    repeated: Sequence[int]
    """Seeds that there were several differing runs of, of which the latest is here."""

    @property
    def budget(self) -> int | None:
        """How many epochs it has, if these are not the task's own. What has more is not to be compared with it."""
        epochs: int | None = self.changed.get("epochs")
        return epochs

    @property
    def finished(self) -> list[Result]:
        """The runs that have a result."""
        return [run for run in self.runs if not _diverged(run, self.experiment.metric.name)]

    @property
    def diverged(self) -> int:
        """How many runs have none, since their loss was not finite any more."""
        return len(self.runs) - len(self.finished)

    def final(self, metric: str) -> Spread | None:
        """What the final weights came to, over the runs that did not diverge; None if some have not recorded it."""
        if any(metric not in run.final for run in self.finished):
            return None
        return Spread.of([run.final[metric] for run in self.finished])

    def records(self, metric: Metric) -> bool:
        """Whether all runs that did not diverge have a number, in the end and after every epoch."""
        return bool(self.finished) and all(
            metric.name in record for run in self.finished for record in (run.final, *run.epochs)
        )

    @property
    def best_epoch(self) -> Spread | None:
        """The best that any epoch came to, over the runs that did not diverge."""
        curve = self.experiment.curve
        best = max if curve.higher_is_better else min
        return Spread.of([best(epoch[curve.name] for epoch in run.epochs) for run in self.finished])

    @property
    def train_loss(self) -> Spread | None:
        """Mean loss of the last epoch, over the runs that did not diverge."""
        return Spread.of([run.epochs[-1]["train_loss"] for run in self.finished])

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that any run took."""
        return max((run.peak_bytes for run in self.runs if run.peak_bytes is not None), default=None)


def _diverged(run: Result, metric: str) -> bool:
    return run.diverged or not math.isfinite(run.final.get(metric, math.nan))


def shown_beside(groups: Sequence[Group]) -> list[Metric]:
    """Metrics beside the task's own that half of the groups have recorded, or more. Of fewer there is no comparison."""
    finished = [group for group in groups if group.finished]
    return [
        metric
        for metric in groups[0].experiment.beside
        if 2 * sum(group.records(metric) for group in finished) >= len(finished)
    ]


def known(runs: Iterable[Result]) -> tuple[list[Result], list[str]]:
    """Those of the runs whose task this version knows, and what is wrong with the others."""
    usable, strangers = [], []
    for run in runs:
        if run.task in EXPERIMENTS and run.optimizer in EXPERIMENTS[run.task].defaults:
            usable.append(run)
        else:
            strangers.append(f"left out: {run.task}, {run.name}, seed {run.seed}: no such task or optimizer here")
    return usable, strangers


def group_runs(runs: Iterable[Result]) -> list[Group]:
    """Runs by task, budget, optimizer, settings and conditions, in the order of the tasks and of the paper's tables.

    A run that is there twice counts once, and of several with the same seed the latest one counts.
    """
    members: dict[tuple[str, ...], list[Result]] = {}
    for run in runs:
        key = (run.task, run.optimizer, run.name, _text(changed_settings(run)), _text(run.conditions))
        members.setdefault(key, []).append(run)
    groups = _tell_apart([_group(of_key) for of_key in members.values()])
    tasks = list(EXPERIMENTS)
    return sorted(
        groups,
        key=lambda group: (
            tasks.index(group.experiment.name),
            group.budget or 0,
            OPTIMIZER_ORDER.index(group.optimizer),
            len(phrases(group.changed, group.experiment.economies)),
            [(name, _sortable(value)) for name, value in group.changed.items()],
            group.name,
            _text(group.conditions),
        ),
    )


def _group(runs: Sequence[Result]) -> Group:
    first = runs[0]
    of_seed: dict[int, list[Result]] = {}
    for run in sorted(runs, key=lambda run: (run.seed, run.provenance[-1]["date"])):
        of_seed.setdefault(run.seed, []).append(run)
    return Group(
        experiment=EXPERIMENTS[first.task],
        optimizer=first.optimizer,
        name=first.name,
        changed=changed_settings(first),
        distinctive=changed_settings(first),
        conditions=first.conditions,
        runs=[several[-1] for several in of_seed.values()],
        # As text, since a run that diverged holds values that do not even equal themselves.
        repeated=[seed for seed, several in of_seed.items() if len({_text(run.to_json()) for run in several}) > 1],
    )


def _tell_apart(groups: Sequence[Group]) -> list[Group]:
    """What all groups of a task and budget have besides its own settings need not be said of each."""
    sections: dict[tuple[str, int | None], list[Group]] = {}
    for group in groups:
        sections.setdefault((group.experiment.name, group.budget), []).append(group)
    return [_telling(group, _common(section)) for section in sections.values() for group in section]


def _telling(group: Group, common: Container[str]) -> Group:
    distinctive = {name: value for name, value in group.changed.items() if name != "epochs" and name not in common}
    return replace(group, distinctive=distinctive)


def _common(groups: Sequence[Group]) -> set[str]:
    """The settings that several groups have alike, or leave alike at the task's own."""
    together = groups[0].experiment.economies.keys()
    names = {*together, *(name for group in groups for name in group.changed)}
    common = {
        name
        for name in names
        if len(groups) > 1 and all(_same(group.changed, groups[0].changed, name) for group in groups)
    }
    if any(is_economical(group.changed) for group in groups) and not common >= together:
        common -= together  # read as one phrase, these are said together or not at all
    return common


def _same(some: Mapping[str, Any], others: Mapping[str, Any], name: str) -> bool:
    return bool(some.get(name, _ABSENT) == others.get(name, _ABSENT))


def changed_settings(run: Result) -> dict[str, Any]:
    """Those of a run's settings that are not its task's own and make another run."""
    defaults: Settings = EXPERIMENTS[run.task].defaults[run.optimizer]
    stored = {**json.loads(json.dumps(asdict(defaults))), **REMOVED}
    differing = {name: value for name, value in run.settings.items() if value != stored.get(name, _ABSENT)}
    known_names = {field.name for field in fields(defaults)}
    return {
        name: value
        for name, value in differing.items()
        # Whether a setting makes another run is for the name of the run to decide.
        if name not in known_names
        or label(run.optimizer, replace(defaults, **{name: value}), defaults) != run.optimizer
    }


_ABSENT = object()


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _sortable(value: Any) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int | float) else (0.0, str(value))
