import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from adahessian.lab.tasks.images import EXPERIMENTS
from adahessian.lab.tasks.task import Metric
from adahessian.lab.watching import LiveWatcher
from adahessian.lab.watching import shown as in_words


@pytest.fixture
def plan(tmp_path):
    experiment = next(experiment for experiment in EXPERIMENTS if experiment.name == "cifar10-resnet20")
    return SimpleNamespace(
        experiment=experiment,
        settings=experiment.defaults["adahessian"],
        optimizer="adahessian",
        seed=1,
        device="cpu",
        precision="float32",
        compiled=False,
        files=SimpleNamespace(name="adahessian", tensorboard=tmp_path),
    )


RECORD = {"epoch": 160, "step": 320, "train_loss": 0.25, "lr": 0.15, "test_accuracy": 73.8}
BOTH = RECORD | {"test_accuracy_recomputed": 79.64, "test_loss": 0.7}


def shown(plan, records, steps=(160, 320), **console):
    """The lines that a watcher prints for these epochs, after these steps."""
    text = io.StringIO()
    with LiveWatcher(Console(file=text, **console)) as watcher:
        watcher.start(plan, steps_per_epoch=2, steps_done=0, parameters=5)
        for step in steps:
            watcher.step(step=step, loss=0.5, lr=0.15)
        for record in records:
            watcher.epoch(record)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue()).splitlines()


def test_an_epoch_in_a_log_has_the_metric_and_what_stands_beside_it(plan):
    lacking = {name: value for name, value in RECORD.items() if name != "test_accuracy"}
    _, with_both, with_one, diverged = shown(plan, [BOTH, RECORD, lacking], width=200)
    assert "epoch 160/160  loss 0.2500  test accuracy 73.80%  recomputed 79.64%  lr 0.15" in with_both
    assert "loss 0.2500  test accuracy 73.80%  lr 0.15" in with_one
    assert "loss 0.2500  lr 0.15" in diverged


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_narrow_terminal_folds_the_line_between_its_parts(plan, width):
    lines = shown(plan, [BOTH], width=width, force_terminal=True, color_system=None, legacy_windows=False)
    last = [line for line in lines if "epoch 160/160" in line][-1]
    drawn = lines[len(lines) - 1 - lines[::-1].index(last) :]
    assert all(len(line) <= width for line in drawn)
    parts = (
        "epoch 160/160",
        "loss 0.2500",
        "test accuracy 73.80%",
        "recomputed 79.64%",
        "lr 0.15",
        "/step",
        "0:00 left",
    )
    assert all(any(part in line for line in drawn) for part in parts)
    assert ("0:00 left" in last) == (width == 200)


def test_long_steps_are_told_in_seconds_and_the_first_which_may_compile_not_at_all(plan, monkeypatch):
    times = iter(range(0, 20_000, 640))
    monkeypatch.setattr("adahessian.lab.watching.time.perf_counter", lambda: float(next(times)))
    _, first, second, _ = shown(plan, [BOTH], width=200)
    assert first.endswith("loss 0.5000  lr 0.15")
    assert second.endswith("loss 0.5000  lr 0.15  8.0 s/step  0:00 left")


def test_before_the_first_step_a_terminal_says_what_is_waited_for(plan):
    for compiled, expected in ((False, "the first step"), (True, "the first step, which compiles")):
        plan.compiled = compiled
        lines = shown(plan, [], steps=(), width=120, force_terminal=True, color_system=None)
        assert [line for line in lines if line.strip()][-1].rstrip().endswith(expected)


def test_units_are_shown_where_there_are_some():
    percent = Metric(name="a", title="validation accuracy, top 1, %")
    assert in_words(percent, {"a": 70.0}) == "validation accuracy 70.00%"
    assert in_words(Metric(name="a", title="test perplexity"), {"a": 70.0}) == "test perplexity 70.00"


def test_on_a_terminal_what_is_trained_breaks_between_words(plan):
    lines = shown(plan, [], steps=(), width=40, force_terminal=True, color_system=None)
    assert "".join(lines[:3]).replace(" ", "").startswith("ResNet20onCIFAR-10:adahessian,seed1.")
    assert all(len(line) <= 40 for line in lines)
    plan.compiled = True
    assert "160 epochs of 2 steps on cpu in float32, compiled" in shown(plan, [], steps=(), width=40)[0]
