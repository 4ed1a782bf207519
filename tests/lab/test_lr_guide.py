import json
import math

import pytest
import torch

from adahessian.lab import lr_guide, lr_tasks
from adahessian.lab.lr_guide import Row, StudyLr, lr_factor, sweep, train
from adahessian.lab.lr_settings import OPTIMIZERS, VARIATIONS, Setting
from adahessian.lab.lr_tasks import TASK_NAMES, task_named

SGD, ADAMW, ADAHESSIAN = OPTIMIZERS


@pytest.fixture
def data_dir(tmp_path):
    """A text in the Penn Treebank's format, much shorter."""
    folder = tmp_path / "data" / "ptb"
    folder.mkdir(parents=True)
    for part in ("train", "valid"):
        (folder / f"ptb.{part}.txt").write_text(" the cat sat on the <unk> mat \n a dog slept N days \n" * 200)
    return tmp_path / "data"


def row(losses, untrained=2.0):
    return Row("any", untrained, losses, suggestions=[], suggestion_losses=[], seconds=0.0)


def test_best_and_usable_learning_rates():
    found = row({0.01: [0.9, 1.1], 0.1: [0.2, 0.2], 1.0: [0.21, 0.23], 10.0: [math.inf, 0.1]})
    assert found.best_lr == 0.1
    assert found.usable_lrs == [0.1, 1.0]  # 0.22 is within 2% of the fall from 2.0 to 0.2


@pytest.mark.parametrize("name", TASK_NAMES)
def test_every_task_can_be_learned(name, data_dir):
    task = task_named(name, data_dir)
    untrained = task.held_out_loss(task.model(0))
    assert train(task, ADAMW, 0.01, seed=0, steps=20) < 0.95 * untrained


def test_text_is_predicted_one_character_ahead(data_dir):
    inputs, targets = next(task_named("text", data_dir).batches(torch.Generator().manual_seed(0)))
    assert inputs.shape == targets.shape == (lr_tasks.TEXT_BATCH, lr_tasks.TEXT_LENGTH)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_one_seed_is_one_start_and_one_order():
    task = task_named("digits-mlp", None)
    first, second = (next(task.batches(torch.Generator().manual_seed(1))) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(task.model(1).parameters(), task.model(1).parameters(), strict=True))
    assert not torch.equal(next(task.model(1).parameters()), next(task.model(2).parameters()))


def test_a_run_that_diverges_is_infinite():
    task = task_named("digits-mlp", None)
    assert train(task, SGD, 1e30, seed=0, steps=20) == math.inf


def test_the_scale_of_the_loss_is_not_in_what_is_reported():
    """AdamW does not see a factor: what is reported must not either."""
    task = task_named("digits-mlp", None)
    losses = [
        train(task, Setting(name="", build=ADAMW.build, loss_scale=scale), 0.003, seed=0, steps=10)
        for scale in (1.0, 1024.0)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_the_schedule():
    assert [lr_factor(step, 4, 0) for step in range(5)] == pytest.approx([1, 0.854, 0.5, 0.146, 0], abs=1e-3)
    assert [lr_factor(step, 6, 2) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1, 0.854], abs=1e-3)


@pytest.mark.parametrize("setting", [*OPTIMIZERS, *VARIATIONS], ids=lambda setting: setting.name)
def test_every_setting_runs(setting):
    name = "digits-conv" if setting.only_on == ("digits-conv",) else "digits-mlp"
    assert math.isfinite(train(task_named(name, None), setting, setting.lrs[1], seed=0, steps=3))


def test_a_sweep_has_every_learning_rate_and_seed(monkeypatch):
    monkeypatch.setattr(lr_guide, "suggested_lr", lambda *_, **__: 0.1)
    found = sweep(task_named("digits-mlp", None), SGD, seeds=2, steps=2)
    assert tuple(found.losses) == SGD.lrs
    assert all(len(losses) == 2 for losses in found.losses.values())
    assert found.suggestions == [0.1, 0.1]


def test_the_file_says_where_it_comes_from(tmp_path, capsys):
    StudyLr(tasks=("digits-mlp",), settings=("SGD", "AdamW"), seeds=1, steps=5, output=tmp_path).run()
    results = json.loads((tmp_path / "lr-digits-mlp.json").read_text())
    assert [each["setting"] for each in results["rows"]] == ["SGD", "AdamW"]
    assert results["provenance"]["seed"] == [0]
    assert results["settings"]["steps"] == 5
    assert "AdamW" in capsys.readouterr().out


def test_what_cannot_be_studied():
    with pytest.raises(SystemExit, match="--data-dir"):
        StudyLr(tasks=("text",)).run()
    with pytest.raises(SystemExit, match="--seeds"):
        StudyLr(seeds=0).run()
    with pytest.raises(SystemExit, match="knows no 'Adam'"):
        StudyLr(settings=("Adam",)).run()
