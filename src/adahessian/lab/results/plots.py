"""Figures of runs. Each function draws rows of frames as one figure."""

from __future__ import annotations

import io
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from adahessian.lab.configs.run import Metric
from adahessian.lab.paper_figures.style import BLUE, GRAY, GREEN, ORANGE, PINK, SKY, VERMILION, styled
from adahessian.lab.results.frames import heading, leading, metric_of, race_points, short_labels, shown_in, summarize
from adahessian.lab.results.frames import title as title_of

# Optimizers that are seldom compared are gray.
COLORS = {"adahessian-kron": BLUE, "adahessian": SKY, "adamw": ORANGE, "sgd": VERMILION, "muon": GREEN, "soap": PINK}
_MARKERS, _LINES = "osD^vPX*", ("-", "--", "-.", ":")


@styled
def race(runs: pd.DataFrame, metric: Metric, title: str = "Result by budget") -> Figure:
    """Draw the final metric of complete runs against their budget: means and standard deviations over seeds."""
    points = race_points(runs)
    unit = {"seconds": "time of training, seconds", "steps": "steps"}[points.attrs["unit"]]
    figure, axes = _axes(title, xlabel=f"{unit} (each point: complete runs)", ylabel=metric.title)
    for family, look in _looks(runs[runs.family.isin(points.family)], "family").items():
        own = points[points.family == family].fillna({"std": 0.0})
        axes.errorbar(own.budget, own["mean"], own["std"], capsize=2.5, **look)
    _make_logarithmic(axes)
    return _with_legend(figure, axes)


@styled
def lr_sensitivity(runs: pd.DataFrame, metric: Metric, title: str = "Result by learning rate") -> Figure:
    """Draw the final metric against the learning rate. Runs that diverged or are off the scale are crosses."""
    sweeps = shown_in("lr", runs)
    figure, axes = _axes(title, xlabel="learning rate", ylabel=metric.title)
    worst = _limit(axes, sweeps.value, metric)
    for recipe, look in _looks(sweeps, "recipe").items():
        own = sweeps[sweeps.recipe == recipe]
        values = own.value.fillna(worst)
        shown = values.clip(lower=worst) if metric.higher_is_better else values.clip(upper=worst)
        means = shown.groupby(own.lr).mean()
        axes.plot(means.index, means, **look)
        axes.plot(own.lr, shown.where(shown != worst), look["marker"], color=look["color"], alpha=0.35, mew=0)
        axes.plot(own.lr, shown.where(shown == worst), "x", color=look["color"], markersize=7, clip_on=False)
    _make_logarithmic(axes)
    return _with_legend(figure, axes)


@styled
def cost_against_quality(runs: pd.DataFrame, metric: Metric, title: str = "Cost and quality") -> Figure:
    """Draw the final metric against the time per step relative to AdamW (else to the fastest), one dot per setting."""
    timed = summarize(shown_in("cost", runs))
    units = timed.loc[timed.label == "adamw", "step_ms"]
    unit, name = (units.iloc[0], "AdamW") if len(units) else (timed.step_ms.min(), "the fastest")
    figure, axes = _axes(title, xlabel=f"time per step, relative to {name}", ylabel=metric.title)
    for label, look in _looks(timed, "label").items():
        own = timed[timed.label == label].fillna({"std": 0.0})
        axes.errorbar(own.step_ms / unit, own["mean"], own["std"], capsize=2.5, **look | {"linestyle": "none"})
    axes.set_xlim(left=0)
    axes.axvline(1, color="#BDBDBD", linewidth=1, zorder=0)
    return _with_legend(figure, axes)


@styled
def every_seed(runs: pd.DataFrame, metric: Metric, title: str = "Every seed") -> Figure:
    """Draw the final metric of every run as a dot, one row per label, with a bar at the mean."""
    finished = shown_in("seeds", runs)
    looks = _looks(finished, "label", most=14, of_each=14)
    figure, axes = _axes(title, xlabel=metric.title, height=0.8 + 0.34 * len(looks))
    for row, (label, look) in enumerate(looks.items()):
        values = finished[finished.label == label].value
        offsets = 0.08 * (np.arange(len(values)) - (len(values) - 1) / 2)  # equal values would hide each other
        axes.plot(values, row + offsets, "o", color=look["color"], alpha=0.8, mew=0)
        axes.plot([values.mean()] * 2, [row - 0.34, row + 0.34], color=look["color"], linewidth=2.2)
    axes.set_yticks(range(len(looks)), [look["label"] for look in looks.values()])
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.set_ylim(len(looks) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    return figure


@styled
def curves(rows: pd.DataFrame, metric: Metric, title: str = "") -> Figure:
    """Draw mean and range of the seeds over the steps. Errors and losses are on a logarithmic scale."""
    figure, axes = _axes(title or metric.title, xlabel="step", ylabel=metric.title)
    for label, look in _looks(rows, "label", most=6, of_each=2).items():
        own = rows[rows.label == label].groupby("step")[metric.name].agg(["mean", "min", "max"])
        axes.plot(own.index, own["mean"], **{**look, "marker": ""})
        axes.fill_between(own.index, own["min"], own["max"], color=look["color"], alpha=0.15, linewidth=0)
    if metric.higher_is_better:
        _limit(axes, rows[metric.name], metric)
    elif rows[metric.name].min() > 0:
        axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return _with_legend(figure, axes)


def draw(name: str, runs: pd.DataFrame) -> Figure:
    """Return a figure of the runs of one task."""
    drawn = {"race": race, "lr": lr_sensitivity, "cost": cost_against_quality, "seeds": every_seed}
    return drawn[name](runs, metric_of(runs), heading(runs.task.iloc[0]))


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
    names, colors = short_labels(chosen), [COLORS.get(optimizer, GRAY) for optimizer in chosen.values()]
    return {
        label: {
            "color": color,
            "linestyle": _LINES[colors[:place].count(color) % len(_LINES)],
            "marker": _MARKERS[place % len(_MARKERS)],
            "label": fill(title_of(names[label]), 44, break_on_hyphens=False),
        }
        for place, (label, color) in enumerate(zip(chosen, colors, strict=True))
    }


def _limit(axes: Axes, values: pd.Series[float], metric: Metric) -> float:
    """Fit the axis to all values but the worst fifth. Return its worse end."""
    sign = 1 if metric.higher_is_better else -1
    best, last = float((sign * values).max()), float((sign * values).quantile(0.2))
    margin = 0.08 * (best - last) or 0.01 * abs(best) or 1.0
    axes.set_ylim(*sorted((sign * (last - margin), sign * (best + margin))))
    return sign * (last - margin)


def _make_logarithmic(axes: Axes) -> None:
    """Make the horizontal axis logarithmic, with plain numbers."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 1000 else f"{x:.4g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
