"""Files as tables: one row per run, per evaluation, or per row of a benchmark."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd

from adahessian.lab.configs import PRESETS, find_preset
from adahessian.lab.configs.optimizers import OPTIMIZERS
from adahessian.lab.configs.run import Metric, TaskConfig
from adahessian.lab.errors import RunFileError
from adahessian.lab.results.run_file import RunResult, find_runs, read_stored

# Runs that agree in these columns differ in their seeds alone.
GROUP = ["task", "label", "conditions"]
# Optimizers in the order of tables.
ORDER = ("sgd", "adam", "adamw", *(name for name in reversed(OPTIMIZERS) if name not in ("sgd", "adam", "adamw")))


def runs(paths: Sequence[Path], warn: Callable[[str], None] = lambda _: None) -> pd.DataFrame:
    """Read runs, one row per run. If runs differ only in their dates, keep the latest.

    Runs that diverged have no value, and runs that shared their device no ``step_ms``. ``family`` is the label without
    the length of training, ``recipe`` the label without the learning rate. ``is_trial`` marks runs that held out data.
    """
    rows = []
    for file, run in find_runs(paths, warn):
        if run.task in PRESETS:
            rows.append(_row(run))
        else:
            warn(f"{file} is left out, because there is no preset {run.task}.")
    if not rows:
        return pd.DataFrame(columns=["task", "label", "seed", "is_trial"])
    latest = pd.DataFrame(rows).sort_values("date", kind="stable").drop_duplicates([*GROUP, "seed"], keep="last")
    return latest.sort_index().sort_values("task", key=lambda tasks: tasks.map([*PRESETS].index), kind="stable")


def curves(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per evaluation, with the columns of the run's curve."""
    columns = zip(runs.curve, runs.label, runs.optimizer, strict=True)
    parts = [pd.DataFrame(curve).assign(label=label, optimizer=optimizer) for curve, label, optimizer in columns]
    return pd.concat(parts, ignore_index=True)


def bench(paths: Iterable[Path]) -> pd.DataFrame:
    """Read the benchmark files in folders: one row per row of each file, with the file, its commit and hardware."""
    rows = []
    for file in (file for path in paths for file in sorted(path.rglob("*.json"))):
        with suppress(RunFileError):  # reported by runs()
            if content := read_stored(file, "rows"):
                first = content["provenance"][0]
                origin = {"file": file.name, "commit": first["commit"], "hardware": hardware(first)}
                rows += [row | origin for row in content["rows"]]
    return pd.DataFrame(rows)


def summarize(runs: pd.DataFrame, metric: str | None = None) -> pd.DataFrame:
    """Return statistics of a column or of a final metric (default: the task's), a row per group of seeds."""
    if metric in runs:
        runs = runs.assign(value=runs[metric])
    elif metric is not None:
        found = pd.Series([final.get(metric) for final in runs.final], runs.index, dtype=float)
        runs = runs.assign(value=found.where(runs.status == "finished"))
    columns = {"optimizer": "first", "family": "first", "steps": "first", "best": "mean", "train_loss": "mean"}
    return runs.groupby(GROUP, sort=False, as_index=False).agg(
        **{name: (name, how) for name, how in (columns | {"step_ms": "median", "peak_mib": "max"}).items()},
        mean=("value", "mean"),
        std=("value", "std"),
        n=("value", "count"),
        diverged=("status", lambda states: (states == "diverged").sum()),
    )


def most_seeds(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs under the conditions that most of them share."""
    return runs[runs.conditions == runs.conditions.mode()[0]] if len(runs) else runs


def shown_in(figure: str, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of a figure: families of several lengths, recipes of three learning rates, or the main length."""
    if figure == "race":
        return runs[runs.groupby("family")["label"].transform("nunique") > 1]
    if figure == "lr":
        return runs[runs.groupby("recipe")["lr"].transform("nunique") > 2]
    main: pd.DataFrame = runs[runs.length == runs.length.mode()[0]]
    return main.dropna(subset=["step_ms", "value"] if figure == "cost" else ["value"])


def leading(rows: pd.DataFrame, column: str, *, most: int, per_optimizer: int) -> dict[str, str]:
    """Return the labels to show and their optimizers: those with the fewest options and the most rows."""
    found = rows.groupby(column)["optimizer"].agg(["first", "size"])
    ranked = found.loc[sorted(found.index, key=lambda name: (" " in name, -found["size"][name], len(name)))]
    chosen: dict[Any, str] = ranked.groupby("first").head(per_optimizer)["first"].head(most).to_dict()
    return dict(sorted(chosen.items(), key=lambda item: (ORDER.index(item[1]), len(item[0]))))


def race_points(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the means of complete runs by family and length, for the families of one task with several lengths.

    The column ``budget`` is the time of training. It is the number of steps if a family has no exclusive runs, or if
    these had different hardware. ``attrs["unit"]`` says which.
    """
    racing = shown_in("race", most_seeds(runs))
    racing = racing[racing.family.isin(leading(racing, "family", most=10, per_optimizer=2))]
    points, timed = summarize(racing), racing[racing.exclusive]
    step_ms = points.family.map(timed.groupby("family")["step_ms"].median())
    is_timed = bool(step_ms.notna().all()) and timed.hardware.nunique() == 1
    points["budget"] = points.steps * step_ms / 1e3 if is_timed else points.steps
    points = points.sort_values(["family", "steps"], ignore_index=True)
    points.attrs["unit"] = "seconds" if is_timed else "steps"
    return points


def short_labels(labels: Iterable[str]) -> dict[str, str]:
    """Return labels without the options that all of them have."""
    labels = list(labels)
    common = set.intersection(*({*label.split()[1:]} for label in labels)) if len(labels) > 1 else set()
    return {label: " ".join(word for word in label.split() if word not in common) for label in labels}


def title(label: str) -> str:
    """Return a label as tables and figures show it: ``"AdaHessian every=10 bf16"``."""
    optimizer, *options = label.split(" ", 1)
    text = " ".join([OPTIMIZERS[optimizer].title if optimizer in OPTIMIZERS else optimizer, *options])
    text = text.replace("product-dtype=bfloat16", "bf16").replace("weight-decay=", "wd=").replace("=True", "")
    return re.sub("(curvature|batch)-(every|warmup|fraction)=", r"\2=", text)


def heading(task: Any) -> str:
    """Return the title of a task with a capital letter."""
    title = find_preset(task).title
    return title[0].upper() + title[1:]


def metric_of(runs: pd.DataFrame) -> Metric:
    """Return the metric of the final weights, for runs of one task: on validation data if all are trials."""
    config = task_config(runs.task.iloc[0], {"holdout": int(runs.is_trial.all())})
    return config.validation_metric if runs.is_trial.all() else config.metric


def task_config(task: str, stored: Mapping[str, Any] | None = None) -> TaskConfig:
    """Return the config of a preset's task, with the stored values of a run."""
    preset = find_preset(task)
    config: Any = preset.config(preset.optimizers[0]).task
    known = {option.name for option in fields(config)}
    changed: TaskConfig = replace(config, **{name: value for name, value in (stored or {}).items() if name in known})
    return changed


def hardware(provenance: Any) -> str:
    """Return the GPU, or the processor and the number of threads."""
    found = provenance["hardware"]
    return str(found.get("accelerator") or f"{found['processor']}, threads: {found['threads']}")


def _row(run: RunResult) -> dict[str, Any]:
    config, conditions, cost = task_config(run.task, run.config["task"]), run.conditions, run.cost
    watched = config.validation_metric
    metric = watched if config.holdout else config.metric
    value = run.final.get(metric.name, math.nan)
    is_finished = run.status == "finished" and math.isfinite(value)
    evaluations = run.curve.get(watched.name, []) if is_finished else []
    compiled = ", compiled" if conditions["compiled"] else ""
    processes = f", {conditions['processes']} processes" if conditions.get("processes", 1) > 1 else ""
    steps, epochs = run.config["steps"], run.config["epochs"]
    stored = ("task", "optimizer", "label", "seed", "curve", "final", "selection", "provenance")
    return {
        **{name: getattr(run, name) for name in stored},
        "conditions": f"{conditions['device']}, {conditions['precision']}{compiled}{processes}",
        "status": "finished" if is_finished else "diverged",
        "watched": watched.name,
        "value": value if is_finished else math.nan,
        "best": (max if watched.higher_is_better else min)(evaluations, default=math.nan),
        "train_loss": run.curve["train_loss"][-1] if is_finished else math.nan,
        "lr": run.config["optimizer"]["lr"],
        "length": f"{steps} steps" if steps else f"{epochs} epoch{'s' if epochs > 1 else ''}",
        "steps": max(run.curve["step"], default=0),
        "step_ms": cost["step_ms"] or math.nan if cost["exclusive"] else math.nan,
        "peak_mib": math.nan if cost["peak_mib"] is None else cost["peak_mib"],
        "exclusive": bool(cost["exclusive"]),
        "is_trial": bool(config.holdout),
        "family": re.sub(r" (epochs|steps|decay-epochs|eval-every)=\S+", "", run.label),
        "recipe": re.sub(r" (lr|weight-decay)=\S+", "", run.label),
        "hardware": hardware(run.provenance[0]),
        "date": run.provenance[-1]["date"],
    }
