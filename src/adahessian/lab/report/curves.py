"""Curves of a task: its metric, what stands beside it and its training loss, by epoch and by time."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from adahessian.lab.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION
from adahessian.lab.report.costs import hardware
from adahessian.lab.report.document import Picture
from adahessian.lab.report.groups import Group, shown_beside
from adahessian.lab.report.phrases import phrases
from adahessian.lab.report.tables import differ_in_conditions
from adahessian.lab.report.themes import Theme, style
from adahessian.lab.report.wording import group_title, section_anchor, section_title
from adahessian.lab.runs import Result
from adahessian.lab.settings import OptimizerName
from adahessian.lab.tasks.task import Metric

COLOURS: dict[OptimizerName, str] = {
    "sgd": GREY,
    "adam": ORANGE,
    "adamw": PURPLE,
    "adagrad": GREEN,
    "rmsprop": VERMILION,
    "adahessian": BLUE,
}
_LINES = ("-", "--", "-.", ":")

_TRAIN_LOSS = Metric(name="train_loss", title="training loss", higher_is_better=False)

# With more choices than this, the lines of single seeds are left out, and then whole choices: nobody could follow them.
_MOST_WITH_SEEDS = 6
_MOST = 8

_TITLE_WIDTH = 56

# Share of the epochs whose values decide no axis: the way to the first sensible network hides all that follows.
_FIRST = 0.1
# Share of the epochs, at the end, that are drawn again in a corner that the curves leave free, and how large that is.
_LAST = 0.25
_CORNER = 0.38


def task_pictures(groups: Sequence[Group]) -> Iterator[Picture]:
    """Plots of a task, unless no run has two epochs: by epoch, and by time of the runs whose times count.

    Args:
        groups: All runs of the task, of one budget.
    """
    experiment = groups[0].experiment
    if all(len(run.epochs) < 2 for group in groups for run in group.runs):
        return
    for metric in dict.fromkeys((experiment.curve, _TRAIN_LOSS, *shown_beside(groups))):
        # What older runs did not record is drawn of the others.
        having = [group for group in groups if metric not in experiment.beside or group.records(metric)]
        drawn = plainest(having)
        timed = [group for group in drawn if any(not run.shared for run in group.runs)]
        for by, shown in (("epoch", drawn), ("time", timed)):
            if shown:
                yield Picture(
                    file=f"{section_anchor(groups[0])}-{metric.name.replace('_', '-')}-by-{by}.png",
                    caption=f"{section_title(groups[0])}: {metric.title} by {by}",
                    draw=partial(_draw, shown, len(groups), metric, by),
                )


def plainest(groups: Sequence[Group]) -> list[Group]:
    """As many as a plot can hold: those with the most seeds, and of these with the fewest settings of their own."""

    def rank(place: int) -> tuple[int, int]:
        return -len(groups[place].runs), len(phrases(groups[place].distinctive, groups[place].experiment.economies))

    return [groups[place] for place in sorted(sorted(range(len(groups)), key=rank)[:_MOST])]


def _looks(groups: Sequence[Group], theme: Theme) -> Iterator[tuple[Group, dict[str, Any]]]:
    """Groups with how each is drawn: a colour an optimizer, and within it a line, and then a shade, a choice."""
    seen: Counter[OptimizerName] = Counter()
    for group in groups:
        shade, line = divmod(seen[group.optimizer], len(_LINES))
        seen[group.optimizer] += 1
        colour = _towards_white(COLOURS[group.optimizer], min(0.75, 0.5 * shade + (0.3 if theme == "dark" else 0.0)))
        yield group, {"color": colour, "linestyle": _LINES[line]}


def _towards_white(colour: str, share: float) -> tuple[float, float, float]:
    red, green, blue = (part + share * (1 - part) for part in to_rgb(colour))
    return red, green, blue


def _draw(groups: Sequence[Group], of: int, metric: Metric, by: str, theme: Theme) -> Figure:
    with matplotlib.rc_context(style(theme)):
        named = differ_in_conditions(groups)
        titles = [textwrap.fill(group_title(group, with_conditions=named), 34) for group in groups]
        legend_lines = sum(max(title.count("\n") + 1 for title in titles[i : i + 2]) for i in range(0, len(titles), 2))
        figure = Figure(figsize=(6, 3.7 + 0.19 * legend_lines), layout="constrained")
        axes = figure.subplots()
        unit, length = _unit(groups) if by == "time" else ("epoch", 1.0)
        seeds = len(groups) <= _MOST_WITH_SEEDS
        for (group, look), title in zip(_looks(groups, theme), titles, strict=True):
            _draw_group(axes, group, metric, by, length, look, title, seeds=seeds)
        name, *of_unit = metric.title.split(", ", 1)
        title = f"{section_title(groups[0])}: {', '.join([f'{name} by {by}', *of_unit])}"
        axes.set(title=textwrap.fill(title, _TITLE_WIDTH), xlabel=unit)
        if by == "epoch":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if _limit(axes, groups, metric):
            axes.set_xlabel(f"{unit} (the first are off the scale)")
        if by == "epoch" and (corner := _end_in_corner(axes, groups, metric)) is not None:
            for group, look in _looks(groups, theme):
                _draw_group(corner, group, metric, by, length, look, "", seeds=seeds)
        left_out = None if of == len(groups) else f"{len(groups)} of {of} choices of settings"
        figure.legend(loc="outside lower center", ncols=2, title=left_out)
    return figure


def _draw_group(
    axes: Axes, group: Group, metric: Metric, by: str, length: float, look: dict[str, Any], title: str, *, seeds: bool
) -> None:
    runs = group.runs if by == "epoch" else _of_one_hardware([run for run in group.runs if not run.shared])
    curves = [_curve(run, metric, by, length) for run in runs]
    several = [curve for run, curve in zip(runs, curves, strict=True) if run in group.finished and curve.size]
    for run, curve in zip(runs, curves, strict=True):
        if (seeds and len(runs) > 1) or run not in group.finished:
            axes.plot(*curve, **look, linewidth=0.7, alpha=0.35)
        if run not in group.finished and curve.size:
            axes.plot(*curve[:, -1], "x", color=look["color"], markersize=8, markeredgewidth=2)
    if several and len({curve.shape for curve in several}) == 1:
        axes.plot(*_middle(several, metric), **look, linewidth=1.5, label=title)
    else:
        axes.plot([], [], **look, marker="x", label=f"{title} (diverged)" if not several else title)


def _curve(run: Result, metric: Metric, by: str, length: float) -> np.ndarray[Any, Any]:
    """Positions and values of a run, as far as these are finite."""
    points = [
        (record["epoch"] if by == "epoch" else record["seconds"] / length, record[metric.name])
        for record in run.epochs
        if math.isfinite(record.get(metric.name, math.nan))
    ]
    return np.array(points).reshape(-1, 2).T


def _middle(curves: Sequence[np.ndarray[Any, Any]], metric: Metric) -> np.ndarray[Any, Any]:
    """The mean curve: geometric on a logarithmic axis, where another would follow the highest seed."""
    if metric is not _TRAIN_LOSS or any((curve[1] <= 0).any() for curve in curves):
        return np.asarray(np.mean(curves, axis=0))
    positions, values = np.moveaxis(np.array(curves), 1, 0)
    return np.stack([positions.mean(axis=0), np.exp(np.log(values).mean(axis=0))])


def _of_one_hardware(runs: Sequence[Result]) -> list[Result]:
    """The runs on what most ran on: times on two machines have no mean."""
    most = Counter(map(hardware, runs)).most_common(1)[0][0]
    return [run for run in runs if hardware(run) == most]


def _unit(groups: Sequence[Group]) -> tuple[str, float]:
    longest = max(run.epochs[-1]["seconds"] for group in groups for run in group.runs)
    name, length = next(
        (unit for unit in (("hours", 3600.0), ("minutes", 60.0)) if longest > 2 * unit[1]), ("seconds", 1.0)
    )
    return f"{name} of training", length


def _limit(axes: Axes, groups: Sequence[Group], metric: Metric) -> bool:
    """Choose the scale: logarithmic for a loss, and for a metric what comes after the first epochs.

    Returns whether some of these do not fit.
    """
    if metric is _TRAIN_LOSS:
        axes.set_yscale("log")
        return False
    curves = [_curve(run, metric, "epoch", 1.0)[1] for group in groups for run in group.finished]
    values = [value for curve in curves for value in curve[int(_FIRST * len(curve)) :]]
    if not values:
        return False
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.5
    axes.set_ylim(low - margin, high + margin)
    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
    firsts = (value for line in drawn for value in line[: int(_FIRST * len(line))])
    return any(not low - margin <= value <= high + margin for value in firsts)


def _end_in_corner(axes: Axes, groups: Sequence[Group], metric: Metric) -> Axes | None:
    """Axes for the last epochs, where runs differ by less than the width of a line; None if no corner is free."""
    curves = [_curve(run, metric, "epoch", 1.0) for group in groups for run in group.finished]
    last = max((curve[0, -1] for curve in curves if curve.size), default=0.0)
    if metric is _TRAIN_LOSS or last * _LAST < 3:
        return None
    low, high = axes.get_ylim()
    # Where the corner's own labels are, too.
    right = (0.9 - _CORNER) * last
    beside = [(value - low) / (high - low) for curve in curves for value in curve[1, curve[0] >= right]]
    ends = [value for curve in curves for value in curve[1, curve[0] > (1 - _LAST) * last]]
    if min(beside) > _CORNER + 0.15:
        bottom = 0.13
    elif max(beside) < 0.85 - _CORNER:
        bottom = 0.97 - _CORNER
    else:
        return None
    corner = axes.inset_axes((0.98 - _CORNER, bottom, _CORNER, _CORNER))
    margin = 0.05 * (max(ends) - min(ends)) or 0.5
    corner.set(xlim=((1 - _LAST) * last, last), ylim=(min(ends) - margin, max(ends) + margin))
    corner.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    corner.yaxis.set_major_locator(MaxNLocator(4))
    corner.tick_params(labelsize="small")
    return corner
