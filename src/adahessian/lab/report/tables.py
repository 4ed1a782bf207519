"""The table of a task: a row for each optimizer and choice of settings."""

from __future__ import annotations

from collections.abc import Sequence

from adahessian.lab.report.costs import StepTime, step_time
from adahessian.lab.report.document import Table
from adahessian.lab.report.groups import Group, shown_beside
from adahessian.lab.report.wording import group_title
from adahessian.lab.settings import OPTIMIZER_TITLES
from adahessian.lab.tasks.task import Metric, PaperNumber


def task_table(groups: Sequence[Group], of_task: Sequence[Group]) -> Table:
    """What the runs of a task came to, beside the paper's numbers.

    Args:
        groups: The runs.
        of_task: All runs of the task, among which times find what they are set against.
    """
    experiment = groups[0].experiment
    metric, beside, others = experiment.metric, shown_beside(groups), experiment.others
    several_conditions = differ_in_conditions(groups)
    shows_best = experiment.paper_is_best_epoch
    return Table(
        headings=[
            "optimizer",
            metric.title,
            *(other.title for other in beside),
            "best epoch",
            "paper",
            "seeds",
            *(other.title for other in others),
            "training loss",
            "time of a step",
            "peak memory",
        ],
        rows=[
            [
                group_title(group, with_conditions=several_conditions),
                shown_final(group, metric.name, metric.digits),
                *_shown_others(group, beside),
                group.best_epoch.shown(metric.digits) if shows_best and group.best_epoch else "",
                "" if group.changed else shown_paper(group.experiment.paper.get(group.optimizer), metric.digits),
                shown_seeds(group),
                *_shown_others(group, others),
                "" if group.train_loss is None else group.train_loss.shown(4),
                _shown_time(step_time(group, of_task)),
                "" if group.peak_bytes is None else f"{group.peak_bytes / 2**30:.2f} GiB",
            ]
            for group in groups
        ],
    ).without_empty_columns()


def differ_in_conditions(groups: Sequence[Group]) -> bool:
    """Whether device, precision, compilation or processes are not the same everywhere."""
    return any(group.conditions != groups[0].conditions for group in groups)


def shown_final(group: Group, metric: str, digits: int) -> str:
    """Mean and deviation of the seeds that did not diverge, or that all did."""
    if not group.finished:
        return "diverged"
    spread = group.final(metric)
    return "" if spread is None else spread.shown(digits)


def _shown_others(group: Group, metrics: Sequence[Metric]) -> list[str]:
    # That it diverged is said once.
    return [shown_final(group, metric.name, metric.digits) if group.finished else "" for metric in metrics]


def shown_seeds(group: Group) -> str:
    """How many seeds a number is of, and how many more diverged."""
    if group.diverged:
        return f"{group.diverged} of {len(group.runs)} diverged"
    return counted_seeds(len(group.runs))


def counted_seeds(count: int) -> str:
    """A number of seeds, in words."""
    return "1 seed" if count == 1 else f"{count} seeds"


def shown_paper(number: PaperNumber | None, digits: int) -> str:
    """The paper's number; empty if it has none."""
    if number is None:
        return ""
    spread = "" if number.deviation is None else f" ± {number.deviation:.{digits}f}"
    return f"{number.mean:.{digits}f}{spread}"


def shown_seconds(seconds: float) -> str:
    """A short time, with its unit."""
    number, unit = (seconds, "s") if seconds >= 1 else (1000 * seconds, "ms")
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}"


def _shown_time(time: StepTime | None) -> str:
    if time is None:
        return ""
    if time.ratio is None or time.base is None:
        return shown_seconds(time.seconds)
    return f"{shown_seconds(time.seconds)}, {time.ratio:.2f} x {OPTIMIZER_TITLES[time.base]}"
