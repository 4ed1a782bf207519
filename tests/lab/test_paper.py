import math

import pytest
from made_up_runs import make_run, rows_of

from adahessian.lab.commands.train import parse_runs
from adahessian.lab.configs import PRESETS
from adahessian.lab.configs.run import difference
from adahessian.lab.results import frames, tables

NUMBERS = tables.paper_numbers()


def ours(runs, table, **columns):
    rows = tables.beside_paper(runs).to_dict("records")
    (row,) = (row for row in rows if {"table": table, **columns}.items() <= row.items())
    return row


def test_ours_is_beside_the_papers_number(tmp_path):
    runs = rows_of(tmp_path, make_run(value=92.0), make_run(seed=2, value=93.0), make_run(value=10.0, lr=0.7))
    row = ours(runs, "Table 2", task="cifar10-resnet20", optimizer="sgd")
    assert (row["mean"], row["ours"], row["n"]) == (92.08, 92.5, 2)
    assert row["ours_std"] == pytest.approx(math.sqrt(0.5))
    assert row["best"] == 92.5
    assert ours(runs, "Table 2", task="cifar10-resnet32", optimizer="sgd")["n"] == 0
    both = tables.beside_paper(runs)
    assert (both[both.seeds == 0].n == 0).all()  # no run reproduces these


def test_the_conditions_with_the_most_seeds_count(tmp_path):
    runs = rows_of(tmp_path, *(make_run(seed=seed, device="cpu" if seed == 2 else "cuda") for seed in (1, 2, 3)))
    assert ours(runs, "Table 2", task="cifar10-resnet20", optimizer="sgd")["n"] == 2


def test_step_times_are_relative_to_another_optimizer(tmp_path):
    delayed = make_run("adahessian", curvature_every=2, curvature_warmup=980, step_ms=8.0)
    runs = rows_of(tmp_path, delayed, make_run(step_ms=4.0))
    row = ours(runs, "Table 8", label=delayed.label, metric="step_ms / sgd", task="cifar10-resnet20")
    assert (row["mean"], row["ours"]) == (1.71, 2.0)


def test_the_best_evaluation_is_of_the_same_metric(tmp_path):
    curve = {"valid_perplexity": [200.0, 130.0, 140.0]}
    runs = rows_of(tmp_path, make_run(task="ptb-tensorized", final={"test_perplexity": 120.0}, curve=curve))
    row = ours(runs, "Table 4", task="ptb-tensorized", optimizer="sgd")
    assert row["ours"] == 120.0
    assert math.isnan(row["best"])


def test_metrics_are_those_of_the_tasks():
    runnable = NUMBERS[(NUMBERS.seeds > 0) & ~NUMBERS.metric.str.startswith(("step_ms", "train", "dev_mismatched"))]
    for row in runnable.to_dict("records"):
        assert row["metric"] == frames.task_config(row["task"]).metric.name


def test_overrides_are_options_with_other_values_than_the_presets():
    for line in tables.missing(frames.runs([])):
        if not line.startswith("#"):
            (run, *_), _ = parse_runs(line.split(), "test")
            assert run.label in set(NUMBERS.label)
            changed = difference(run.config, PRESETS[run.task].config(run.optimizer))
            assert len(changed) == run.label.count("=")


def test_missing_lists_the_seeds_that_lack(tmp_path):
    runs = rows_of(tmp_path, *(make_run(seed=seed) for seed in (1, 3, 7)))
    lines = list(tables.missing(runs))
    assert "cifar10-resnet20 sgd --seeds 2 4" in lines
    assert "cifar10-resnet20 adam --seeds 1 2 3 4 5" in lines
    delayed = "cifar10-resnet20 adahessian --curvature-every 2 --curvature-warmup 980 --seeds 1 2 3 4 5"
    assert lines[lines.index(delayed) - 1].startswith("# Table 8")
