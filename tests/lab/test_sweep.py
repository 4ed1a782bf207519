"""Sweeps: equally many trials for each optimizer, and the selection of their settings."""

import math
import shlex
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

from adahessian.lab.commands import sweep
from adahessian.lab.commands.train import execute, parse_runs
from adahessian.lab.configs.digits import DigitsConfig
from adahessian.lab.errors import ConfigError, StoppedError
from adahessian.lab.results.run_file import RunFiles, read_run

SELECTION = {"trials": 2, "selected_on": "validation_accuracy", "budget": 1.0}
LINE = ["--epochs", "1", "--device", "cpu"]


class Runs(list):
    """Stands for training. Runs are collected, and their validation accuracy is ``score(run)``."""

    def __init__(self):
        self.score = lambda run: 50.0
        self.selections = []

    def __call__(self, run, session, *, console=None, selection=None):
        self.append(run)
        self.selections.append(selection)
        score, metric = self.score(run), run.config.task.validation_metric.name
        status, final = "finished" if math.isfinite(score) else "diverged", {metric: score, "test_accuracy": 12.34}
        return SimpleNamespace(label=run.label, status=status, final=final, selection=selection)


@pytest.fixture
def runs(monkeypatch):
    found = Runs()
    monkeypatch.setattr(sweep, "execute", found)
    return found


def test_every_optimizer_has_as_many_trials_in_the_same_range(runs, capsys):
    sweep.main(["digits", "sgd", "adamw", "--trials", "9", "--seeds", "1", "2"])
    assert [run.optimizer for run in runs] == ["sgd"] * 18 + ["adamw"] * 18
    assert [run.seed for run in runs] == [1, 2] * 18
    assert {run.config.task.holdout for run in runs} == {DigitsConfig.default_holdout}
    assert len({run.label for run in runs}) == 18
    for own, name in product((runs[:18], runs[18:]), ("lr", "weight_decay")):
        assert own[0].label.endswith(" holdout=300")
        first, *values = (getattr(run.config.optimizer, name) for run in own[::2])
        assert 0.09 < min(values) / first < 0.3
        assert 3 < max(values) / first < 11
    first = [*runs]
    sweep.main(["digits", "sgd", "adamw", "--trials", "9", "--seeds", "1", "2"])
    assert runs == first * 2
    sweep.main(["digits-mlp", "adamw", "--trials", "3"])
    assert {run.config.optimizer.weight_decay for run in runs[-3:]} == {0}  # options that are 0 are not searched


@pytest.mark.parametrize("higher", [True, False])
def test_the_best_mean_on_validation_data_is_selected(runs, capsys, monkeypatch, higher):
    sign = 1 if higher else -1
    monkeypatch.setattr(DigitsConfig, "score", replace(DigitsConfig.score, higher_is_better=higher))
    # The third trial has the best single run, the fourth the best mean, and one run of the fifth diverges.
    scores = {1: (50, 50), 2: (40, 45), 3: (90, 10), 4: (60, 62), 5: (99, math.nan)}
    runs.score = lambda run: sign * scores[(len(runs) + 1) // 2][run.seed - 1]
    sweep.main(["digits", "sgd", "--trials", "5", "--seeds", "1", "2", "--epochs", "3"])
    *_, verdict, line = capsys.readouterr().out.splitlines()
    assert f"{61 * sign:.2f}" in verdict
    assert "5 trials" in verdict
    (again,), _ = parse_runs(shlex.split(line)[2:], "adahessian train")
    selected = runs[6].config
    assert selected.task.holdout == DigitsConfig.default_holdout
    assert again.config == replace(selected, task=replace(selected.task, holdout=0))


def test_an_optimizer_that_always_diverges_selects_nothing(runs, capsys):
    runs.score = lambda run: math.nan if run.optimizer == "sgd" else 1.0
    sweep.main(["digits", "sgd", "adamw", "--trials", "2", "--final-seeds", "3"])
    assert "sgd: every trial diverged" in capsys.readouterr().out
    assert [run.optimizer for run in runs[4:]] == ["adamw"]


def test_final_runs_use_all_data_and_record_their_selection(runs, capsys):
    runs.score = lambda run: run.config.optimizer.lr
    sweep.main(["digits", "sgd", "adamw", "--trials", "4", "--final-seeds", "5", "6", "--holdout", "200"])
    tuned, final = runs[:8], runs[8:]
    assert {run.config.task.holdout for run in tuned} == {200}
    assert [(run.optimizer, run.seed, run.config.task.holdout) for run in final] == [
        (name, seed, 0) for name in ("sgd", "adamw") for seed in (5, 6)
    ]
    for own, best in ((tuned[:4], final[0]), (tuned[4:], final[2])):
        assert best.config.optimizer.lr == max(run.config.optimizer.lr for run in own)
    assert runs.selections == [None] * 8 + [SELECTION | {"trials": 4}] * 4
    assert "12.34 ± 0.00" in capsys.readouterr().out


def test_final_runs_have_several_lengths(runs):
    options = ["--schedule", "steps", "--decay-epochs", "4", "6", "--final-seeds", "3", "4", "--epochs", "8"]
    sweep.main(["digits", "sgd", "--trials", "2", "--final-budgets", "0.25", "1", "2", *options])
    lengths = [(run.config.epochs, run.config.schedule.decay_epochs, run.seed) for run in runs[2:]]
    assert lengths == [(*each, seed) for each in ((2, (1, 2)), (8, (4, 6)), (16, (8, 12))) for seed in (3, 4)]
    assert [selection["budget"] for selection in runs.selections[2:]] == [0.25, 0.25, 1, 1, 2, 2]
    assert len({run.label for run in runs[2:]}) == 3
    runs.clear()
    sweep.main(["pinn-poisson-1d", "adamw", "--trials", "1", "--final-seeds", "1", "--final-budgets", "0.5"])
    assert runs[1].config.steps == 1000


def test_options_vary(runs, capsys):
    sweep.main(["digits", "sgd", "adamw", "--lr-factors", "0.5", "1", "3", "--lr", "0.1"])
    assert [run.config.optimizer.lr for run in runs] == [0.05, 0.1, 0.3] * 2
    assert {run.config.task.holdout for run in runs} == {0}
    runs.clear()
    sweep.main(["digits", "adahessian-kron", "adahessian", "--vary", "block-size", "2", "4"])
    assert [run.label for run in runs] == [
        f"{run.optimizer} block-size={size}" for run, size in zip(runs, [2, 4] * 2, strict=True)
    ]
    assert capsys.readouterr().out.count("12.34") == 10


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["digits"], "optimizer"),
        (["digits", "sgd", "--trials", "0"], "--trials"),
        (["digits", "sgd", "--final-budgets", "0"], "--final-budgets"),
        (["digits", "sgd", "--lr-factors", "0"], "--lr-factors"),
        (["digits", "sgd", "--vary", "lr"], "--vary"),
        (["digits", "sgd", "--vary", "lr", "1", "--lr-factors", "2"], "--vary"),
        (["digits", "sgd", "--name", "mine"], "--name"),
        (["digits", "sgdd"], "sgd"),
        (["digits", "sgd"], "--holdout"),  # nothing is selected on test data
    ],
)
def test_invalid_options_are_named(runs, argv, name, monkeypatch, capsys):
    monkeypatch.setattr(DigitsConfig, "default_holdout", 0)
    with pytest.raises((ConfigError, SystemExit)) as error:
        sweep.main(argv)
    assert name in f"{error.value}{capsys.readouterr().err}"
    assert runs == []


def test_an_interrupted_sweep_continues_where_it_stopped(tmp_path, monkeypatch, capsys):
    done = []

    def interrupted(run, *args, **kwargs):
        if len(done) == 3:
            raise StoppedError("", planned=False)
        done.append(execute(run, *args, **kwargs))
        return done[-1]

    argv = ["digits", "sgd", "--trials", "2", "--final-seeds", "1", "2", *LINE, "--output", str(tmp_path)]
    monkeypatch.setattr(sweep, "execute", interrupted)
    with pytest.raises(StoppedError):
        sweep.main(argv)
    monkeypatch.setattr(sweep, "execute", execute)
    sweep.main(argv)
    assert capsys.readouterr().out.count("Skipped") == 3
    assert len(list(tmp_path.rglob("*.json"))) == 4
    run = done[-1]
    assert run.selection == SELECTION
    # A run that was finished before it was selected says so, too.
    files = RunFiles(output=tmp_path, task=run.task, label=run.label, seed=run.seed)
    files.result.write_text(files.result.read_text().replace('"trials": 2', '"trials": 1'))
    sweep.main(argv)
    assert read_run(files.result).selection == SELECTION
