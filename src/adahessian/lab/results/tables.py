"""Tables of runs as text, for the terminal, the page and RESULTS.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from adahessian.lab.configs import find_preset
from adahessian.lab.configs.optimizers import OPTIMIZERS
from adahessian.lab.configs.run import Metric
from adahessian.lab.results import frames, paper

Choices = Mapping[str, Mapping[str, str]]
"""By task: options that all runs to compare share (``"shared"``), and labels of optimizers without the preset's."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """The runs of one task and length. Only these are compared."""

    title: str
    task: str
    runs: pd.DataFrame

    @property
    def metric(self) -> Metric:
        """The metric of the final weights."""
        return frames.task_metric(self.task)


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the runs of each study, task and length, trials on their own."""
    keys = ["study", "task", "length", "is_trial"]
    for (study, task, length, is_trial), together in runs.groupby(keys, sort=False):
        parts = [study, heading(str(task)), length, "trials with held-out data" if is_trial else ""]
        yield Section(title=", ".join(filter(None, map(str, parts))), task=str(task), runs=together)


def heading(task: str) -> str:
    """Return the title of a task with a capital letter."""
    title = find_preset(task).title
    return title[0].upper() + title[1:]


def number(value: float | None, digits: int) -> str:
    """Return a number as text: nothing for NaN, and two significant digits for very small numbers."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:.2g}" if 0 < abs(value) < 10.0**-digits else f"{value:.{digits}f}"


def spread(mean: float, std: float, digits: int) -> str:
    """Return a mean with its standard deviation, if there is one."""
    if math.isnan(std):
        return number(mean, digits)
    return f"{number(mean, digits)} ± {number(std, digits) if abs(mean) < 10.0**-digits else f'{std:.{digits}f}'}"


def result(runs: pd.DataFrame, metric: str | None = None, digits: int | None = None) -> str:
    """Return mean, standard deviation and number of runs of one label: ``92.12 ± 0.33 (5)``."""
    if runs.empty:
        return ""
    row = frames.summarize(frames.most_seeds(runs), metric).iloc[0]
    places = frames.task_metric(row["task"]).digits if digits is None else digits
    return f"{spread(row['mean'], row['std'], places)} ({row['n']})" if row["n"] else "diverged"


def task_table(section: Section) -> pd.DataFrame:
    """Return the table of one section, one row per label and conditions."""
    runs = section.runs.sort_values("label", key=_place, kind="stable")
    summary, metric = frames.summarize(runs), section.metric
    names = frames.short_labels(summary.label.unique())
    words = [names[label].partition(" ") for label in summary.label]
    table = pd.DataFrame({"optimizer": [first for first, _, _ in words], "options": [rest for _, _, rest in words]})
    if summary.conditions.nunique() > 1:
        table["conditions"] = summary.conditions
    table[metric.title] = [spread(row["mean"], row["std"], metric.digits) for row in summary.to_dict("records")]
    table["seeds"] = summary.n.map(str)
    if summary.diverged.any():
        table["diverged"] = summary.diverged.map(str)
    if (summary.best - summary["mean"]).abs().max() > 10.0**-metric.digits / 2:
        table["best evaluation"] = [number(value, metric.digits) for value in summary.best]
    for name in dict.fromkeys(name for final in runs.final for name in final if name != metric.name):
        other = frames.summarize(runs, name)
        means = other["mean"].where(other.n == summary.n)  # runs of earlier versions may lack it
        table[name.replace("_", " ")] = [number(value, 3 if value < 10 else 2) for value in means]
    for column, title, digits in (
        ("train_loss", "training loss", 4),
        ("step_ms", "ms per step", 2),
        ("peak_mib", "peak MiB", 0),
    ):
        if summary[column].notna().any():
            table[title] = [number(value, digits) for value in summary[column]]
    return table.loc[:, (table != "").any()]


def compared(runs: pd.DataFrame, choices: Choices) -> Iterator[tuple[str, Metric, dict[str, pd.DataFrame]]]:
    """Yield title, metric and runs by optimizer: at each task's preset settings, and at those that a sweep selected."""
    for task, own in runs.groupby("task", sort=False):
        choice, metric = choices.get(str(task), {}), frames.task_metric(str(task))
        title = f"{heading(str(task))}, {metric.title}{'' if metric.higher_is_better else ' (lower is better)'}"
        selected = own[own.selection.notna()].groupby("optimizer")["label"].last()
        labels = {name: choice.get(name, f"{name} {choice.get('shared', '')}".strip()) for name in frames.ORDER}
        for kind, chosen in (("", labels), (", tuned", dict(selected))):
            found = {name: frames.most_seeds(own[own.label == label]) for name, label in chosen.items()}
            if any(len(each) for each in found.values()):
                yield title + kind, metric, found


def comparison(runs: pd.DataFrame, choices: Choices) -> pd.DataFrame:
    """Return the main table: a row per task, a column per optimizer. An asterisk marks settings of ``choices``."""
    rows = [
        {
            "task": title,
            **{
                OPTIMIZERS[name].title: result(each) + ("*" if _is_choice(each, choices) else "")
                for name, each in found.items()
            },
        }
        for title, _, found in compared(runs, choices)
    ]
    return _present(rows)


def differences(runs: pd.DataFrame, choices: Choices, baseline: str = "adamw") -> pd.DataFrame:
    """Return differences to a baseline with their 95% intervals, where both have several seeds."""
    rows = []
    for title, metric, found in compared(runs, choices):
        base = found.get(baseline, runs.iloc[:0])
        others = {name: each for name, each in found.items() if name != baseline and each.value.count() > 1}
        if base.value.count() > 1 and others:
            cells = {OPTIMIZERS[name].title: interval(each, base, metric) for name, each in others.items()}
            rows.append({"task": title, **cells})
    return _present(rows)


def interval(runs: pd.DataFrame, baseline: pd.DataFrame, metric: Metric) -> str:
    """Return the difference of two means and its 95% interval: ``+0.10 [-0.31, +0.51]``."""
    mean, low, high = frames.difference(runs.value, baseline.value)
    bounds = "" if math.isnan(low) else f" [{low:+.{metric.digits}f}, {high:+.{metric.digits}f}]"
    return f"{mean:+.{metric.digits}f}{bounds}"


def verdict(runs: pd.DataFrame, baseline: pd.DataFrame) -> str:
    """Return :func:`interval` and what it says: ``+0.10 [-0.31, +0.51], no significant difference``."""
    metric = frames.task_metric(runs.task.iloc[0])
    _, low, high = frames.difference(runs.value, baseline.value)
    better, worse = ("better", "worse") if metric.higher_is_better else ("worse", "better")
    if math.isnan(low):
        text = "too few runs"
    else:
        text = better if low > 0 else worse if high < 0 else "no significant difference"
    return f"{interval(runs, baseline, metric)}, {text}"


def verdicts(runs: pd.DataFrame, optimizer: str, baseline: str, choices: Choices) -> Iterator[str]:
    """Yield title and :func:`verdict` for each row of :func:`comparison` that has both optimizers."""
    for title, _, found in compared(runs, choices):
        pair = [found.get(name, runs.iloc[:0]) for name in (optimizer, baseline)]
        if all(map(len, pair)):
            yield f"{title}: {verdict(*pair)}"


def race_table(runs: pd.DataFrame, baseline: str = "adamw") -> pd.DataFrame:
    """Return a row per family of one task: its result by length, and the budget for the baseline's longest result."""
    points, metric = frames.race_points(runs), frames.task_metric(runs.task.iloc[0])
    base = points[points.family == baseline]
    rows = []
    for family, own in points.groupby("family", sort=False):
        cells = {
            f"{steps:,} steps": result(runs[runs.label == label])
            for steps, label in zip(own.steps, own.label, strict=True)
        }
        if len(base):
            needed = frames.budget_for(own, base["mean"].iloc[-1], higher_is_better=metric.higher_is_better)
            cells["budget for the result of " + frames.title(baseline)] = (
                number(needed / base.budget.iloc[-1], 2) or "not reached"
            )
        rows.append({"setting": frames.title(str(family)), **cells})
    return _present(rows)


def lr_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per recipe of one task with several learning rates, a column per multiple of the preset's."""
    sweeps = runs[runs.groupby("recipe")["lr"].transform("nunique") > 2]
    preset = find_preset(runs.task.iloc[0])
    default = {name: preset.config(name).optimizer.lr for name in sweeps.optimizer.unique()}
    sweeps = sweeps.assign(
        factor=[float(f"{lr / default[name]:.2g}") for lr, name in sweeps[["lr", "optimizer"]].values]
    )
    factors = {factor: f"x {factor:g}" for factor in sorted(set(sweeps.factor))}
    rows = [
        {"setting": frames.title(str(recipe))}
        | {title: result(own[own.factor == factor]) for factor, title in factors.items()}
        for recipe, own in sweeps.groupby("recipe", sort=False)
    ]
    return _present(rows)


def variants(runs: pd.DataFrame, labels: Mapping[str, str], lengths: Mapping[str, str]) -> pd.DataFrame:
    """Return a row per setting of one task: its result by length, and its training loss at the first one.

    Args:
        runs: Rows of ``frames.runs`` of one task.
        labels: Labels by their titles.
        lengths: Options of each length by its title, such as ``{"16 epochs": "epochs=16"}``.
    """
    rows = []
    for title, label in labels.items():
        found = {name: runs[runs.label == f"{label} {options}".strip()] for name, options in lengths.items()}
        first = next(iter(found.values()))
        loss = {"training loss": number(first.train_loss.mean(), 3)} if len(first) else {}
        rows.append({"setting": title, **{name: result(each) for name, each in found.items()}, **loss})
    return _present(rows)


def paper_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's numbers that runs of ours can be compared with."""
    both = paper.beside_paper(runs)
    rows = []
    for row in both[both.n + both.diverged > 0].to_dict("records"):
        digits = frames.task_metric(row["task"]).digits
        cells = {name: row[name].replace("_", " ") for name in ("table", "task", "metric")}
        cells["setting"] = frames.title(row["label"])
        cells["paper"] = spread(row["mean"], row["std"], digits)
        cells["ours"] = f"{spread(row['ours'], row['ours_std'], digits)} ({row['n']})" if row["n"] else "diverged"
        rows.append(cells | {"best evaluation": number(row["best"], digits)})
    return _present(rows)


def benches(bench: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield title and table of each benchmark: time per step, memory and state of every optimizer in each workload."""
    if bench.empty:
        return
    bench = bench[(bench.label != "baseline") & bench.step_ms.notna()].fillna({"mode": "update alone"})
    for (file, mode, hardware), own in bench.groupby(["file", "mode", "hardware"], sort=False):
        rows: dict[str, dict[str, str]] = {}
        for row in own.to_dict("records"):
            step = row.get("step", mode)
            name = row["label"] if step == mode or not isinstance(step, str) else f"{row['label']} ({step})"
            cells = rows.setdefault(name, {"setting": name})
            for key, unit, digits in _COSTS:
                cells[f"{row['workload']}: {unit}"] = number(row.get(key), digits)
        yield f"{mode}, {hardware} ({file})", _present(list(rows.values()))


_COSTS = (
    ("step_ms", "ms", 2),
    ("ratio", "ratio", 2),
    ("peak_mib", "MiB", 0),
    ("state_bytes_per_parameter", "state", 1),
)


def _place(labels: pd.Series[str]) -> pd.Series[float]:
    """Return sort keys: optimizers in their order, then few options before many."""
    places = {name: place for place, name in enumerate(frames.ORDER)}
    return labels.map(lambda label: places.get(label.split()[0], len(places)) + len(label) / 1e4)


def _is_choice(runs: pd.DataFrame, choices: Choices) -> bool:
    return len(runs) > 0 and choices.get(runs.task.iloc[0], {}).get(runs.optimizer.iloc[0]) == runs.label.iloc[0]


def _present(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return rows without the columns that are empty in all of them."""
    table = pd.DataFrame(rows).fillna("")
    return table.loc[:, (table != "").any()] if len(table) else table
