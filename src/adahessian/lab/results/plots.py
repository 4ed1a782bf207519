"""Figures of runs. Each function draws rows of frames as one figure."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter

from adahessian.lab.configs.run import Metric
from adahessian.lab.paper_figures.style import STYLE
from adahessian.lab.results.frames import leading, race_points, short_labels, shown_in, summarize
from adahessian.lab.results.frames import title as title_of

# Okabe and Ito's colors, which people with any kind of color vision can tell apart, and grays.
COLORS = {
    "adahessian-kron": "#0072B2",
    "adahessian": "#56B4E9",
    "adamw": "#E69F00",
    "sgd": "#D55E00",
    "muon": "#009E73",
    "soap": "#CC79A7",
    "sophia": "#7A7A7A",
    "lbfgs": "#333333",
    "adam": "#8A6D00",
    "adagrad": "#999999",
    "rmsprop": "#B5B5B5",
}
_MARKERS, _LINES = "osD^vPX*", ("-", "--", "-.", ":")


@contextmanager
def _styled() -> Iterator[None]:
    changes: dict[Any, Any] = {"font.size": 9, "axes.titlesize": 10, "lines.linewidth": 1.6, "lines.markersize": 5}
    with matplotlib.rc_context(STYLE | changes):
        yield


@_styled()
def race(runs: pd.DataFrame, metric: Metric, title: str = "Result by budget") -> Figure:
    """Draw the final metric of complete runs against their budget: means and standard deviations over seeds."""
    points = race_points(runs)
    unit = {"seconds": "time of training, seconds", "steps": "steps"}[points.attrs["unit"]]
    figure, axes = _axes(title, xlabel=f"{unit} (each point: complete runs)", ylabel=metric.title)
    for family, look in _looks(runs[runs.family.isin(points.family)], "family").items():
        own = points[points.family == family]
        axes.errorbar(own.budget, own["mean"], own["std"].fillna(0), capsize=2.5, **look)
    _ticks(axes, points.budget)
    return _with_legend(figure, axes)


@_styled()
def lr_sensitivity(runs: pd.DataFrame, metric: Metric, title: str = "Result by learning rate") -> Figure:
    """Draw the final metric against the learning rate: a line of means per recipe, and a dot per seed.

    Runs that diverged are crosses at the edge where bad values are. So are runs that are off the scale, which covers
    the best value of each recipe and the better half of all values.
    """
    sweeps = shown_in("lr", runs)
    figure, axes = _axes(title, xlabel="learning rate", ylabel=metric.title)
    bests = sweeps.groupby("recipe")["value"].agg("max" if metric.higher_is_better else "min")
    worst = _limit(axes, sweeps.value, metric, 0.5, bests)
    for recipe, look in _looks(sweeps, "recipe").items():
        own = sweeps[sweeps.recipe == recipe]
        values = own.value.fillna(worst)
        shown = values.clip(lower=worst) if metric.higher_is_better else values.clip(upper=worst)
        means = shown.groupby(own.lr).mean()
        axes.plot(means.index, means, **look)
        axes.plot(own.lr, shown.where(shown != worst), look["marker"], color=look["color"], alpha=0.35, mew=0)
        axes.plot(own.lr, shown.where(shown == worst), "x", color=look["color"], markersize=7, clip_on=False)
    _ticks(axes, sweeps.lr)
    return _with_legend(figure, axes)


@_styled()
def cost_against_quality(runs: pd.DataFrame, metric: Metric, title: str = "Cost and quality") -> Figure:
    """Draw the final metric against the time per step relative to AdamW (else to the fastest), one dot per setting."""
    timed = summarize(shown_in("cost", runs))
    units = timed.loc[timed.label == "adamw", "step_ms"]
    unit, name = (units.iloc[0], "AdamW") if len(units) else (timed.step_ms.min(), "the fastest")
    figure, axes = _axes(title, xlabel=f"time per step, relative to {name}", ylabel=metric.title)
    for label, look in _looks(timed, "label").items():
        row = timed[timed.label == label].iloc[0].fillna({"std": 0.0})
        look |= {"linestyle": "none", "markersize": 7}
        axes.errorbar(row["step_ms"] / unit, row["mean"], row["std"], capsize=2.5, **look)
    axes.set_xlim(left=0)
    axes.axvline(1, color="#BDBDBD", linewidth=1, zorder=0)
    return _with_legend(figure, axes)


@_styled()
def every_seed(runs: pd.DataFrame, metric: Metric, title: str = "Every seed") -> Figure:
    """Draw the final metric of every run as a dot, one row per label, with a bar at the mean."""
    finished = shown_in("seeds", runs)
    looks = _looks(finished, "label", most=14, of_each=14)
    figure, axes = _axes(title, xlabel=metric.title, height=0.8 + 0.34 * len(looks))
    for row, (label, look) in enumerate(looks.items()):
        values = finished[finished.label == label].value
        # Seeds with the same value would hide each other.
        offsets = np.linspace(-0.16, 0.16, len(values)) if len(values) > 1 else np.zeros(1)
        axes.plot(values, row + offsets, "o", color=look["color"], alpha=0.8, mew=0)
        axes.plot([values.mean()] * 2, [row - 0.34, row + 0.34], color=look["color"], linewidth=2.2)
    axes.set_yticks(range(len(looks)), [look["label"] for look in looks.values()])
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.set_ylim(len(looks) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    return figure


@_styled()
def curves(rows: pd.DataFrame, column: str, title: str, *, metric: Metric | None = None) -> Figure:
    """Draw mean and range of the seeds. The worst fifth of a ``metric`` is off the scale. Losses are logarithmic."""
    x = "epoch" if rows.epoch.max() > 1 else "step"
    figure, axes = _axes(title, xlabel=x, ylabel=title)
    for label, look in _looks(rows, "label", most=6, of_each=2).items():
        own = rows[rows.label == label].groupby(x)[column].agg(["mean", "min", "max"])
        axes.plot(own.index, own["mean"], **{**look, "marker": "", "linewidth": 1.3})
        axes.fill_between(own.index, own["min"], own["max"], color=look["color"], alpha=0.15, linewidth=0)
    if metric is not None:
        _limit(axes, rows[column], metric, 0.2)
    elif rows[column].min() > 0:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _with_legend(figure, axes)


def svg(figure: Figure, salt: str) -> str:
    """Return a figure as an SVG element for a page. Figures of one page need different salts."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return text.getvalue()[text.getvalue().index("<svg") :]


def _axes(title: str, *, height: float = 3.4, **labels: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.5, height), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, **labels)
    return figure, axes


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def _looks(rows: pd.DataFrame, column: str, *, most: int = 8, of_each: int = 8) -> dict[str, dict[str, Any]]:
    """Return color, marker, line and short name of the leading labels. The color is the optimizer's."""
    chosen = leading(rows, column, most=most, per_optimizer=of_each)
    names, optimizers = short_labels(chosen), list(chosen.values())
    return {
        label: {
            "color": COLORS[optimizer],
            "linestyle": _LINES[optimizers[:place].count(optimizer) % len(_LINES)],
            "marker": _MARKERS[place % len(_MARKERS)],
            "label": fill(title_of(names[label]), 44, break_on_hyphens=False),
        }
        for place, (label, optimizer) in enumerate(chosen.items())
    }


def _limit(
    axes: Axes, values: pd.Series[float], metric: Metric, left_out: float, shown: pd.Series[float] | None = None
) -> float:
    """Fit the axis to all values but a fraction of the worst, and to what must be shown. Return its worse end."""
    sign = 1 if metric.higher_is_better else -1
    best, last = float((sign * values).max()), float((sign * values).quantile(left_out))
    last = last if shown is None else min(last, float((sign * shown).min()))
    margin = 0.08 * (best - last) or 0.01 * abs(best) or 1.0
    axes.set_ylim(*sorted((sign * (last - margin), sign * (best + margin))))
    return sign * (last - margin)


def _ticks(axes: Axes, values: pd.Series[float]) -> None:
    """Make the axis logarithmic, with a tick at each value, or else at some powers of ten and multiples."""
    axes.set_xscale("log")
    places = sorted(set(values.dropna()))
    if 0 < len(places) <= 8 and all(after > 1.15 * before for before, after in pairwise(places)):
        axes.xaxis.set_major_locator(FixedLocator(places))
    else:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if places[-1] < 100 * places[0] else (1.0,)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 1000 else f"{x:.4g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
