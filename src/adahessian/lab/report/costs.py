"""Time of a step, by the epochs of finished runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from statistics import median

from adahessian.lab.report.groups import OPTIMIZER_ORDER, Group
from adahessian.lab.runs import Result
from adahessian.lab.settings import OptimizerName, Settings

# What each optimizer may have for itself, and a step takes as long with. All else makes another network or batch.
_OWN = frozenset(field.name for field in fields(Settings)) - {"batch_size"}


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """How long a step takes."""

    seconds: float
    ratio: float | None
    """Over that of ``base``; None if nothing comparable was run."""

    base: OptimizerName | None


def hardware(run: Result) -> str:
    """What a run was computed on."""
    of_run = run.provenance[0]["hardware"]
    if run.conditions["device"] == "cuda":
        return str(of_run["accelerator"])
    return f"{of_run['processor']}, threads: {of_run['threads']}"


def step_seconds(run: Result) -> float | None:
    """Seconds a step: the median of the epochs but the first, in which there is compiling. None if there are none.

    A run of one epoch has no other, so it counts there. One that shared its device with others has none of its own.
    """
    if run.shared:
        return None
    if len(run.epochs) == 1:
        return run.epochs[0]["seconds"] / run.epochs[0]["step"]
    times = [
        (after["seconds"] - before["seconds"]) / (after["step"] - before["step"])
        for before, after in zip(run.epochs, run.epochs[1:], strict=False)
    ]
    return median(times) if times else None


def step_time(group: Group, others: Iterable[Group], bases: tuple[OptimizerName, ...] = ()) -> StepTime | None:
    """The time of a step of a group's runs, on the hardware that most of them had.

    Args:
        group: The runs.
        others: Those it may be set against: the first of ``bases`` that ran the same network on batches of the same
            size, on the same hardware, under the same conditions.
        bases: Optimizers to set it against; by default SGD, or whichever first-order optimizer comes first.
    """
    by_hardware = _times(group)
    if not by_hardware:
        return None
    place = max(by_hardware, key=lambda name: len(by_hardware[name]))
    seconds = median(by_hardware[place])
    order = bases or tuple(name for name in OPTIMIZER_ORDER if name != "adahessian")
    candidates = [
        other
        for other in others
        if other.experiment.name == group.experiment.name
        and other.optimizer in order
        and other.conditions == group.conditions
        and _network(other) == _network(group)
        and place in _times(other)
    ]
    if not candidates:
        return StepTime(seconds=seconds, ratio=None, base=None)
    base = min(candidates, key=lambda other: (order.index(other.optimizer), len(other.changed), -len(other.runs)))
    return StepTime(seconds=seconds, ratio=seconds / median(_times(base)[place]), base=base.optimizer)


def _times(group: Group) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for run in group.finished:
        seconds = step_seconds(run)
        if seconds is not None:
            times.setdefault(hardware(run), []).append(seconds)
    return times


def _network(group: Group) -> dict[str, object]:
    return {name: value for name, value in group.changed.items() if name not in _OWN}
