"""The paper's numbers and ours, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from adahessian.lab.configs import PRESETS
from adahessian.lab.results.frames import most_seeds, summarize

_STEP_TIME = "step_ms / "


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
            yield f"# {', '.join(numbers.table.unique())}: {PRESETS[str(task)].title}"
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
    group = summarize(most_seeds(own), row["metric"]).iloc[0]
    best = group["best"] if own.watched.iloc[0] == row["metric"] else math.nan
    return {**group[["n", "diverged"]], "ours": group["mean"], "ours_std": group["std"], "best": best}
