"""Tables of runs as text, for the terminal, the page and RESULTS.md."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import ttest_ind
from tabulate import tabulate

from adahessian.lab.configs import find_preset
from adahessian.lab.configs.optimizers import OPTIMIZERS
from adahessian.lab.results import frames

Choices = Mapping[str, Mapping[str, str]]
"""By task: options that all runs to compare share (``"shared"``), and labels of optimizers without the preset's."""

WORDS = ("task", "optimizer", "options", "setting", "conditions", "table", "metric")
"""Columns of text. Other columns are aligned to the right."""

_STEP_TIME = "step_ms / "


def sections(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield title and runs of each task and length, trials on their own. Only these are compared."""
    for (task, length, is_trial), together in runs.groupby(["task", "length", "is_trial"], sort=False):
        yield f"{frames.heading(task)}, {length}{', trials with held-out data' if is_trial else ''}", together


def text(table: pd.DataFrame, form: str = "pipe", width: int | None = None) -> str:
    """Return a table as Markdown or in another of tabulate's formats, with columns of limited width."""
    look: Any = {"tablefmt": form, "maxcolwidths": width, "disable_numparse": True, "break_on_hyphens": False}
    sides = ["left" if name in WORDS else "right" for name in table]
    return tabulate(table.to_dict("list"), [*table], colalign=sides, **look)


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
    digits = frames.metric_of(runs).digits if digits is None else digits
    return f"{spread(row['mean'], row['std'], digits)} ({row['n']})" if row["n"] else "diverged"


def task_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the table of one section, one row per label and conditions."""
    # Optimizers are in their order, and few options come before many.
    runs = runs.sort_values("label", key=lambda labels: labels.map(_place), kind="stable")
    summary, metric = frames.summarize(runs), frames.metric_of(runs)
    names = frames.short_labels(summary.label.unique())
    table = summary.label.map(names).str.partition(" ")[[0, 2]].set_axis(["optimizer", "options"], axis=1)
    if summary.conditions.nunique() > 1:
        table["conditions"] = summary.conditions
    table[metric.title] = [spread(*each, metric.digits) for each in zip(summary["mean"], summary["std"], strict=True)]
    table["seeds"] = summary.n.map(str)
    if summary.diverged.any():
        table["diverged"] = summary.diverged.map(str)
    for name in dict.fromkeys(name for final in runs.final for name in final if name != metric.name):
        if runs.is_trial.all() and name.startswith("test_"):  # nothing is to be chosen on the test set
            continue
        other = frames.summarize(runs, name)
        means = other["mean"].where(other.n == summary.n)  # runs of earlier versions may lack it
        table[name.replace("_", " ")] = [number(value, 3 if value < 10 else 2) for value in means]
    costs = {"train_loss": ("training loss", 4), "step_ms": ("ms per step", 2), "peak_mib": ("peak MiB", 0)}
    for column, (title, digits) in costs.items():
        table[title] = [number(value, digits) for value in summary[column]]
    return _present(table)


def compared(runs: pd.DataFrame, choices: Choices) -> Iterator[tuple[str, Mapping[str, str], dict[str, pd.DataFrame]]]:
    """Yield title, choices and runs by optimizer: at each task's preset settings, and at those a sweep selected."""
    for task, own in runs.groupby("task", sort=False):
        choice, metric = choices.get(str(task), {}), frames.metric_of(own)
        title = f"{frames.heading(task)}, {metric.title}{'' if metric.higher_is_better else ' (lower is better)'}"
        is_selected = [bool(each) and each.get("budget", 1) == 1 for each in own.selection]
        selected = own[is_selected].groupby("optimizer")["label"].last()
        labels = {name: choice.get(name, f"{name} {choice.get('shared', '')}".strip()) for name in frames.ORDER}
        for kind, chosen in (("", labels), (", tuned", dict(selected))):
            found = {name: frames.most_seeds(own[own.label == label]) for name, label in chosen.items()}
            if any(map(len, found.values())):
                yield title + kind, choice, found


def comparison(runs: pd.DataFrame, choices: Choices) -> pd.DataFrame:
    """Return the main table: a row per task, a column per optimizer. An asterisk marks settings of ``choices``."""
    rows = []
    for title, choice, found in compared(runs, choices):
        cells = {name: result(own) + "*" * (choice.get(name) in set(own.label)) for name, own in found.items()}
        rows.append({"task": title, **cells})
    return _present(rows)


def differences(runs: pd.DataFrame, choices: Choices, baseline: str = "adamw") -> pd.DataFrame:
    """Return differences to a baseline with their 95% intervals, where both have several seeds."""
    rows = []
    for title, _, found in compared(runs, choices):
        several = {name: each for name, each in found.items() if each.value.count() > 1}
        base = several.pop(baseline, runs[:0])
        if len(base) and several:
            rows.append({"task": title, **{name: interval(each, base)[0] for name, each in several.items()}})
    return _present(rows)


def interval(runs: pd.DataFrame, baseline: pd.DataFrame) -> tuple[str, float, float]:
    """Return the difference of two means with its 95% interval (Welch), and the ends: ``+0.10 [-0.31, +0.51]``."""
    digits, values, others = frames.metric_of(runs).digits, runs.value.dropna(), baseline.value.dropna()
    text = f"{values.mean() - others.mean():+.{digits}f}"
    if min(len(values), len(others)) < 2:
        return text, math.nan, math.nan
    low, high = ttest_ind(values, others, equal_var=False).confidence_interval()
    return f"{text} [{low:+.{digits}f}, {high:+.{digits}f}]", low, high


def verdict(runs: pd.DataFrame, baseline: pd.DataFrame) -> str:
    """Return :func:`interval` and what it says: ``+0.10 [-0.31, +0.51], no significant difference``."""
    text, low, high = interval(runs, baseline)
    better, worse = ("better", "worse") if frames.metric_of(runs).higher_is_better else ("worse", "better")
    said = better if low > 0 else worse if high < 0 else "no significant difference"
    return f"{text}, {'too few runs' if math.isnan(low) else said}"


def race_table(runs: pd.DataFrame, baseline: str = "adamw") -> pd.DataFrame:
    """Return a row per family of one task: its results by length, and the shortest as good as the baseline."""
    points, sign = frames.race_points(runs), 1 if frames.metric_of(runs).higher_is_better else -1
    table = _grid(runs[runs.label.isin(points.label)], "family", "steps", "{:,} steps")
    if len(base := points[points.family == baseline]):
        reached = points[sign * points["mean"] >= sign * base["mean"].iloc[-1]].groupby("family").budget.min()
        budgets = reached.reindex(points.family.unique()) / base.budget.iloc[-1]
        title = f"budget for the result of {frames.title(baseline)}"
        table[title] = [number(budget, 2) or "not reached" for budget in budgets]
    return table


def lr_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per recipe of one task with several learning rates, a column per multiple of the preset's."""
    sweeps, preset = frames.shown_in("lr", runs), find_preset(runs.task.iloc[0])
    default = sweeps.optimizer.map({name: preset.config(name).optimizer.lr for name in sweeps.optimizer.unique()})
    factor = (sweeps.lr / default).map(lambda factor: float(f"{factor:.2g}"))
    return _grid(sweeps.assign(factor=factor), "recipe", "factor", "x {:g}")


def _grid(runs: pd.DataFrame, rows: str, columns: str, title: str) -> pd.DataFrame:
    """Return the results by two columns of the runs: settings, and numbers with their title."""
    cells = pd.Series({place: result(own) for place, own in runs.groupby([rows, columns])}).unstack(fill_value="")
    return cells.rename(index=frames.title, columns=title.format).rename_axis("setting").reset_index()


def variants(runs: pd.DataFrame, labels: Mapping[str, str], lengths: Mapping[str, str]) -> pd.DataFrame:
    """Return a row per label of one task: its result by length (title: options), and its first training loss."""
    rows = []
    for title, label in labels.items():
        found = {name: runs[runs.label == f"{label} {options}".strip()] for name, options in lengths.items()}
        loss = number(next(iter(found.values())).train_loss.mean(), 3)
        rows.append({"setting": title, **{name: result(each) for name, each in found.items()}, "training loss": loss})
    return _present(rows)


def paper_numbers() -> pd.DataFrame:
    """Return every number of the paper, one row each. ``seeds`` is 0 where no run of ours can reproduce it."""
    numbers = pd.read_csv(Path(__file__).with_name("paper_numbers.csv")).fillna({"override": ""})
    return numbers.assign(label=(numbers.optimizer + " " + numbers.override).str.strip())


def beside_paper(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's numbers with ours. ``best`` is what the authors' script reports: the best evaluation."""
    numbers = paper_numbers()
    return numbers.join(pd.DataFrame([_ours(row, runs) for row in numbers.to_dict("records")]))


def missing(runs: pd.DataFrame) -> Iterator[str]:
    """Yield a line for ``adahessian queue`` for each setting of the paper that lacks seeds, below a comment."""
    wanted = paper_numbers()
    wanted = wanted[(wanted.seeds > 0) & ~wanted.metric.str.startswith(_STEP_TIME)]
    for (task, label), numbers in wanted.groupby(["task", "label"], sort=False):
        have, most = set(runs[(runs.task == task) & (runs.label == label)].seed), int(numbers.seeds.max())
        if seeds := [seed for seed in range(1, most + len(have) + 1) if seed not in have][: max(0, most - len(have))]:
            optimizer, *options = str(label).split()
            words = [optimizer, *(f"--{option.replace('=', ' ').replace('+', ' ')}" for option in options)]
            yield f"# {', '.join(numbers.table.unique())}: {find_preset(str(task)).title}"
            yield f"{task} {' '.join(words)} --seeds {' '.join(map(str, seeds))}"


def _ours(row: dict[Any, Any], runs: pd.DataFrame) -> dict[str, Any]:
    nothing = {"ours": math.nan, "ours_std": math.nan, "n": 0, "diverged": 0, "best": math.nan}
    runs = runs[runs.task == row["task"]]
    own = runs[runs.label == row["label"]]
    if row["seeds"] == 0 or own.empty:
        return nothing
    if row["metric"].startswith(_STEP_TIME):
        base = runs[runs.label == row["metric"].removeprefix(_STEP_TIME)]
        return {**nothing, "ours": own.step_ms.median() / base.step_ms.median(), "n": int(own.step_ms.count())}
    group = frames.summarize(frames.most_seeds(own), row["metric"]).iloc[0]
    best = group["best"] if own.watched.iloc[0] == row["metric"] else math.nan
    return {**group[["n", "diverged"]], "ours": group["mean"], "ours_std": group["std"], "best": best}


def paper_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's numbers that runs of ours can be compared with."""
    both, rows = beside_paper(runs), []
    for row in both[both.n + both.diverged > 0].to_dict("records"):
        digits = frames.task_config(row["task"]).metric.digits
        ours = f"{spread(row['ours'], row['ours_std'], digits)} ({row['n']})" if row["n"] else "diverged"
        cells = {name: row[name].replace("_", " ") for name in ("table", "task", "metric")}
        cells |= {"setting": frames.title(row["label"]), "paper": spread(row["mean"], row["std"], digits)}
        rows.append({**cells, "ours": ours, "best evaluation": number(row["best"], digits)})
    return _present(rows)


def benches(bench: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield title and table of each benchmark: time per step, memory and state of every optimizer in each workload."""
    if bench.empty:
        return
    costs = {"step_ms": ("ms", 2), "ratio": ("ratio", 2), "peak_mib": ("MiB", 0)}
    costs["state_bytes_per_parameter"] = ("state", 1)
    bench = bench[(bench.label != "baseline") & bench.step_ms.notna()]
    for (file, mode, hardware), own in bench.groupby(["file", "mode", "hardware"], sort=False):
        rows: dict[str, dict[str, str]] = {}
        for row in own.to_dict("records"):
            step = row.get("step", mode)
            name = row["label"] if step == mode or not isinstance(step, str) else f"{row['label']} ({step})"
            cells = {
                f"{row['workload']}: {unit}": number(row.get(key), digits) for key, (unit, digits) in costs.items()
            }
            rows.setdefault(name, {"setting": name}).update(cells)
        yield f"{mode}, {hardware} ({file})", _present(list(rows.values()))


def _place(label: str) -> float:
    optimizer = label.split()[0]
    return (frames.ORDER.index(optimizer) if optimizer in frames.ORDER else len(frames.ORDER)) + len(label) / 1e4


def _present(rows: Any) -> pd.DataFrame:
    """Return rows without the columns that are empty in all of them, with the titles of optimizers."""
    table = pd.DataFrame(rows).fillna("").rename(columns={name: known.title for name, known in OPTIMIZERS.items()})
    return table.loc[:, (table != "").any()]
