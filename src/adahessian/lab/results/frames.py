"""Files as tables: one row per run, per evaluation, or per row of a benchmark."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from adahessian.lab.configs import PRESETS, find_preset
from adahessian.lab.configs.optimizers import OPTIMIZERS
from adahessian.lab.configs.run import Metric, TaskConfig
from adahessian.lab.results.run_file import RunResult, find_run_files, read_json

# Runs that agree in these columns differ in their seeds alone.
GROUP = ["study", "task", "label", "conditions"]

ORDER = ("sgd", "adam", "adamw", *(name for name in reversed(OPTIMIZERS) if name not in ("sgd", "adam", "adamw")))
"""Optimizers in the order of tables."""

_SHORT = {
    "curvature-every=": "every=",
    "curvature-warmup=": "warmup=",
    "batch-fraction=": "fraction=",
    "weight-decay=": "wd=",
    "product-dtype=bfloat16": "bf16",
    "=True": "",
}
_LENGTH = re.compile(r" (epochs|steps|decay-epochs|eval-every)=\S+")
_LR = re.compile(r" (lr|weight-decay)=\S+")

Warn = Callable[[str], None]


def runs(paths: Iterable[Path], warn: Warn = lambda _: None) -> pd.DataFrame:
    """Read runs: one row per run, and only the latest of runs that differ in nothing but their dates.

    A run that diverged has the status ``"diverged"`` and no value. ``step_ms`` is missing unless the run had its device
    to itself. ``family`` is the label without the length of training, ``recipe`` the label without its learning rate.
    ``is_trial`` marks runs that held out training examples.

    Args:
        paths: Run files, and folders that are searched for them.
        warn: Receives messages about damaged files and unknown tasks.
    """
    order = [*PRESETS]
    results = sorted(_results(paths, warn), key=lambda result: order.index(result[1].task))
    return pd.DataFrame([_row(study, run) for study, run in results], columns=_COLUMNS)


def curves(paths: Iterable[Path], warn: Warn = lambda _: None) -> pd.DataFrame:
    """Read curves: one row per evaluation, with the columns of the run's curve."""
    parts = [
        pd.DataFrame(run.curve).assign(
            **dict(zip(GROUP, _group(study, run), strict=True)), optimizer=run.optimizer, seed=run.seed
        )
        for study, run in _results(paths, warn)
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*GROUP, "optimizer", "seed", "step"])


def bench(paths: Iterable[Path]) -> pd.DataFrame:
    """Read benchmark files: one row per row of each file, with the file, its hardware, commit and date."""
    rows = []
    for path in paths:
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            content = read_json(file)
            if isinstance(content, Mapping) and "rows" in content and content.get("schema") == 2:
                first = content["provenance"][0]
                origin = {name: first.get(name) for name in ("command", "commit", "date")}
                rows += [{**row, "file": file.name, **origin, "hardware": _hardware(first)} for row in content["rows"]]
    return pd.DataFrame(rows)


def summarize(runs: pd.DataFrame, metric: str | None = None) -> pd.DataFrame:
    """Return mean, standard deviation and number of runs, one row per group of runs that differ in their seeds.

    Args:
        runs: Rows of :func:`runs`.
        metric: A number of the final weights, or a column of ``runs``. None takes the task's metric.
    """
    if metric is not None and metric not in runs:
        finished = runs.status == "finished"
        runs = runs.assign(value=[final.get(metric) for final in runs.final]).astype({"value": float})
        runs.loc[~finished, "value"] = math.nan
    elif metric is not None:
        runs = runs.assign(value=runs[metric])
    together = runs.groupby(GROUP, sort=False)
    first = {name: (name, "first") for name in ("optimizer", "metric", "lr", "length", "steps", "family", "recipe")}
    numbers = {name: ("value", how) for name, how in {"mean": "mean", "std": "std", "n": "count"}.items()}
    others = {"best": "mean", "train_loss": "mean", "seconds": "mean", "step_ms": "median", "peak_mib": "max"}
    summary = together.agg(**first, **numbers, **{name: (name, how) for name, how in others.items()})
    summary["diverged"] = together["status"].agg(lambda states: int((states == "diverged").sum()))
    summary["seeds"] = together["seed"].agg(lambda seeds: " ".join(map(str, sorted(seeds))))
    return summary.reset_index()


def most_seeds(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs under the conditions that most of them share."""
    return runs[runs.conditions == runs.conditions.mode()[0]] if len(runs) else runs


def difference(values: pd.Series[float], baseline: pd.Series[float]) -> tuple[float, float, float]:
    """Return the difference of two means and its 95% interval (Welch), NaN where there are not two values each."""
    from scipy.stats import ttest_ind

    values, baseline = values.dropna(), baseline.dropna()
    if min(len(values), len(baseline)) < 2:
        return float(values.mean() - baseline.mean()), math.nan, math.nan
    interval = ttest_ind(values, baseline, equal_var=False).confidence_interval()
    return float(values.mean() - baseline.mean()), float(interval.low), float(interval.high)


def leading(rows: pd.DataFrame, column: str, *, most: int, per_optimizer: int | None = None) -> dict[str, str]:
    """Return the labels to show and their optimizers: those with the fewest options and the most rows.

    Args:
        rows: Rows with the columns ``optimizer`` and ``column``.
        column: Column of the labels.
        most: Largest number of labels.
        per_optimizer: Largest number of labels of one optimizer.
    """
    rows_of = rows.groupby(column)["optimizer"].agg(["first", "size"])
    optimizers, sizes = dict(rows_of["first"]), dict(rows_of["size"])
    ranked = sorted(optimizers, key=lambda name: (" " in name, -sizes[name], len(name)))
    of_each = {name: [label for label in ranked if optimizers[label] == name] for name in rows_of["first"]}
    chosen = [label for label in ranked if label in of_each[optimizers[label]][:per_optimizer]][:most]
    places = {name: place for place, name in enumerate(ORDER)}
    return {label: optimizers[label] for label in sorted(chosen, key=lambda x: (places[optimizers[x]], len(x)))}


def race_points(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the means of complete runs by family and length, for the families of one task with several lengths.

    There are at most two families per optimizer. The column ``budget`` is the time of training in seconds: steps times
    the family's time per step, which is measured in its exclusive runs. It is the number of steps if a family has none,
    or if these runs had different hardware. The attribute ``attrs["unit"]`` says which.
    """
    runs = most_seeds(runs)
    racing = runs[runs.groupby("family")["label"].transform("nunique") > 1]
    racing = racing[racing.family.isin(leading(racing, "family", most=10, per_optimizer=2))]
    points = racing.groupby(["family", "label"], sort=False, as_index=False).agg(
        optimizer=("optimizer", "first"),
        steps=("steps", "max"),
        mean=("value", "mean"),
        std=("value", "std"),
        n=("value", "count"),
    )
    timed = racing[racing.exclusive]
    step_ms = points.family.map(timed.groupby("family")["step_ms"].median())
    is_timed = bool(step_ms.notna().all()) and timed.hardware.nunique() == 1
    points["budget"] = points.steps * step_ms / 1e3 if is_timed else points.steps
    points = points.sort_values(["family", "steps"], ignore_index=True)
    points.attrs["unit"] = "seconds" if is_timed else "steps"
    return points


def budget_for(points: pd.DataFrame, target: float, *, higher_is_better: bool = True) -> float:
    """Return the budget at which a family reaches a target, NaN if it never does.

    Budgets between two points are interpolated on a logarithmic scale.

    Args:
        points: Rows of :func:`race_points` of one family.
        target: Value of the metric.
        higher_is_better: Direction of the metric.
    """
    sign = 1.0 if higher_is_better else -1.0
    reached = np.maximum.accumulate(sign * points["mean"].fillna(-sign * math.inf).to_numpy(dtype=float))
    places = np.flatnonzero(reached >= sign * target)
    if not len(places):
        return math.nan
    end, budgets = int(places[0]), np.log(points["budget"].to_numpy(dtype=float))
    if end == 0 or not math.isfinite(reached[end - 1]):
        return float(np.exp(budgets[end]))
    share = (sign * target - reached[end - 1]) / (reached[end] - reached[end - 1])
    return float(np.exp(budgets[end - 1] + share * (budgets[end] - budgets[end - 1])))


def short_labels(labels: Iterable[str]) -> dict[str, str]:
    """Return labels without the options that all of them have."""
    labels = list(labels)
    common = set.intersection(*({*label.split()[1:]} for label in labels)) if len(labels) > 1 else set()
    return {label: " ".join(word for word in label.split() if word not in common) for label in labels}


def title(label: str) -> str:
    """Return a label as tables and figures show it: ``"AdaHessian every=10 bf16"``."""
    optimizer, *options = label.split(" ", 1)
    known = OPTIMIZERS.get(optimizer)
    text = " ".join([known.title if known else optimizer, *options])
    for long, short in _SHORT.items():
        text = text.replace(long, short)
    return text


def task_metric(task: str) -> Metric:
    """Return the metric of a task's final weights."""
    return task_config(task).metric


def task_config(task: str, stored: Mapping[str, Any] | None = None) -> TaskConfig:
    """Return the config of a preset's task, with the stored values of a run."""
    preset = find_preset(task)
    config: Any = preset.config(preset.optimizers[0]).task
    known = {option.name for option in fields(config)}
    changed: TaskConfig = replace(config, **{name: value for name, value in (stored or {}).items() if name in known})
    return changed


def _results(paths: Iterable[Path], warn: Warn) -> Iterator[tuple[str, RunResult]]:
    latest: dict[tuple[Any, ...], tuple[str, RunResult]] = {}
    for path in paths:
        for file, run in find_run_files([path], warn):
            study = "/".join(file.relative_to(path).parts[:-2]) if path.is_dir() else ""
            key = (*_group(study, run), run.seed)
            if run.task not in PRESETS:
                warn(f"{file} is left out, because there is no preset {run.task}.")
            elif key not in latest or _date(latest[key][1]) <= _date(run):
                latest[key] = (study, run)
    yield from latest.values()


def _group(study: str, run: RunResult) -> tuple[str, ...]:
    """Return the values of the columns GROUP."""
    conditions = run.conditions
    processes = conditions.get("processes", 1)
    compiled = ", compiled" if conditions["compiled"] else ""
    several = f", {processes} processes" if processes > 1 else ""
    return study, run.task, run.label, f"{conditions['device']}, {conditions['precision']}{compiled}{several}"


def _row(study: str, run: RunResult) -> dict[str, Any]:
    config = task_config(run.task, run.config["task"])
    metric, watched = config.metric, config.validation_metric
    value = run.final.get(metric.name, math.nan)
    diverged = run.status == "diverged" or not math.isfinite(value)
    evaluations = [] if diverged else run.curve.get(watched.name, [])
    optimizer, steps, epochs = run.config["optimizer"], run.config["steps"], run.config["epochs"]
    return {
        **dict(zip(GROUP, _group(study, run), strict=True)),
        "optimizer": run.optimizer,
        "seed": run.seed,
        "status": "diverged" if diverged else "finished",
        "metric": metric.name,
        "watched": watched.name,
        "value": math.nan if diverged else value,
        "best": (max if watched.higher_is_better else min)(evaluations, default=math.nan),
        "train_loss": math.nan if diverged else run.curve["train_loss"][-1],
        "lr": optimizer["lr"],
        "length": f"{steps} steps" if steps else f"{epochs} epoch{'s' if epochs > 1 else ''}",
        "steps": max(run.curve["step"], default=0),
        "seconds": max(run.curve["seconds"], default=math.nan),
        "step_ms": run.cost["step_ms"] if run.cost["exclusive"] and run.cost["step_ms"] else math.nan,
        "peak_mib": math.nan if run.cost["peak_mib"] is None else run.cost["peak_mib"],
        "exclusive": bool(run.cost["exclusive"]),
        "is_trial": bool(config.holdout),
        "family": _LENGTH.sub("", run.label),
        "recipe": _LR.sub("", run.label),
        "hardware": _hardware(run.provenance[0]),
        "final": run.final,
        "selection": run.selection,
        "provenance": run.provenance,
    }


_COLUMNS = [
    *(*GROUP, "optimizer", "seed", "status", "metric", "watched", "value", "best", "train_loss", "lr", "length"),
    *(
        "steps",
        "seconds",
        "step_ms",
        "peak_mib",
        "exclusive",
        "is_trial",
        "family",
        "recipe",
        "hardware",
        "final",
        "selection",
    ),
    "provenance",
]


def _hardware(provenance: Mapping[str, Any]) -> str:
    hardware = provenance["hardware"]
    return str(hardware.get("accelerator") or f"{hardware['processor']}, threads: {hardware['threads']}")


def _date(run: RunResult) -> str:
    return str(run.provenance[-1]["date"])
