"""The training loop: stopped anywhere, a run continues to the same bits."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from runs import assert_same, files_of, train, typed, write_data
from small_tasks import SMALL
from torch import nn

from adahessian.lab.commands.train import execute
from adahessian.lab.configs import find_preset
from adahessian.lab.configs.optimizers import OPTIMIZERS
from adahessian.lab.configs.run import Run, Session
from adahessian.lab.errors import CheckpointError, ConfigError, DataError, LabError, RunExistsError, StoppedError
from adahessian.lab.results.run_file import RunFiles, read_run
from adahessian.lab.tasks.digits import DigitsTask
from adahessian.lab.training import trainer
from adahessian.lab.training.checkpoint import FinalWeights, load_checkpoint, locked, save_checkpoint

FAMILIES = ("cifar10-resnet20", "image-folder-resnet18", "multi30k-de-en", "ptb-tensorized", "glue-sst2")
FAMILIES += ("criteo-dlrm",)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Two epochs of digits with AdaHessianKron, and their folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return train("digits", "adahessian-kron", folder, epochs=2), folder


def stop(*arguments, **options):
    with pytest.raises(StoppedError) as stopped:
        train(*arguments, **options)
    return stopped.value


@pytest.mark.parametrize(
    ("task", "optimizer", "options"),
    [
        *((task, "adahessian-kron", {"epochs": 2}) for task in FAMILIES),
        *(("digits", optimizer, {"epochs": 2}) for optimizer in ("adahessian", "sgd", "adamw", "muon", "soap")),
        *(("pinn-poisson-1d", optimizer, {"steps": 9, "eval_every": 4}) for optimizer in ("adahessian-kron", "lbfgs")),
        ("digits", "sgd", {"epochs": 2, "final_weights": "best", "holdout": 300}),
    ],
)
def test_every_family_and_optimizer_resumes_in_the_same_bits(task, optimizer, options, tmp_path):
    write_data(task, tmp_path)
    options = {**SMALL.get(task, {}), **options}
    whole = train(task, optimizer, tmp_path, name="whole", **options)
    middle = int(whole.curve["step"][0]) + 1  # within the second epoch
    stop(task, optimizer, tmp_path, name="stopped", stop_after_steps=middle, **options)
    resumed = train(task, optimizer, tmp_path, name="stopped", resume=True, **options)
    assert_same(whole, tmp_path, resumed, tmp_path)
    assert len(resumed.provenance) == 2


def start(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, *launcher, "-m", "adahessian", "train", "digits", "adahessian-kron"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *typed(folder, epochs=2), *words], **pipes, env=environment)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_at_any_step_loses_nothing(tmp_path, undisturbed, number):
    while True:
        run = start(tmp_path, "--checkpoint-minutes", "0.0001", "--overwrite")
        while not [*tmp_path.rglob("checkpoint.pt")] and run.poll() is None:
            time.sleep(0.005)
        run.send_signal(number)
        printed = run.communicate(timeout=300)[0]
        if not [*tmp_path.rglob("*_seed-*.json")]:
            break
        assert run.returncode == 0, printed  # it was faster than the signal
    if number != signal.SIGKILL:
        assert run.returncode == 130
        assert "--resume" in printed
    continued = start(tmp_path, "--resume")
    printed = continued.communicate(timeout=300)[0]
    assert continued.returncode == 0, printed
    whole, folder = undisturbed
    assert_same(read_run(files_of(whole, tmp_path).result), tmp_path, whole, folder)


def test_stopping_after_epochs(tmp_path, undisturbed):
    assert stop("digits", "adahessian-kron", tmp_path, epochs=2, stop_after_epochs=1).planned
    whole, folder = undisturbed
    files = files_of(whole, tmp_path)
    assert len(files.log.read_text().splitlines()) == 1
    resumed = train("digits", "adahessian-kron", tmp_path, epochs=2, resume=True)
    assert_same(resumed, tmp_path, whole, folder)
    assert [json.loads(line)["step"] for line in files.log.read_text().splitlines()] == [20, 40]
    assert not files.checkpoint.exists()


def test_two_processes(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

    def launch(folder, *words):
        run = start(folder, *words, launcher=launcher)
        printed = run.communicate(timeout=500)[0]
        assert run.returncode == 0, printed
        return printed

    one, other = tmp_path / "one", tmp_path / "other"
    printed = launch(one, "--seeds", "1", "2")
    assert printed.count("step 40/40") == printed.count(".json") == 2, "only rank 0 prints"
    assert "27" in launch(other, "--stop-after-steps", "27")
    launch(other, "--resume")
    first, second = (read_run(next(folder.rglob("*_seed-1.json"))) for folder in (one, other))
    assert_same(first, one, second, other)
    assert first.conditions["processes"] == 2
    alone = train("digits", "adahessian-kron", tmp_path, epochs=2)
    assert first.curve["train_loss"][0] == pytest.approx(alone.curve["train_loss"][0], rel=0.1)


def test_an_earlier_run_stays_unless_overwritten(undisturbed):
    result, folder = undisturbed
    before = files_of(result, folder).result.read_bytes()
    with pytest.raises(RunExistsError, match=r"--resume.*--overwrite.*--name"):
        train("digits", "adahessian-kron", folder, epochs=2)
    assert train("digits", "adahessian-kron", folder, epochs=2, resume=True).final == result.final
    with pytest.raises(RunExistsError, match="--lr"):
        train("digits", "adahessian-kron", folder, epochs=2, lr=0.1, resume=True, name=result.label)
    assert files_of(result, folder).result.read_bytes() == before


def test_overwriting_starts_over(tmp_path):
    stop("digits", "adamw", tmp_path, epochs=1, stop_after_steps=3)
    with pytest.raises(RunExistsError, match=r"checkpoint\.pt"):
        train("digits", "adamw", tmp_path, epochs=1)
    result = train("digits", "adamw", tmp_path, epochs=1, overwrite=True)
    assert len(result.provenance) == 1
    stop("digits", "adamw", tmp_path, epochs=1, overwrite=True, stop_after_steps=3)
    assert not files_of(result, tmp_path).result.exists()


def test_a_run_that_cannot_start_deletes_nothing(tmp_path):
    files = RunFiles(output=tmp_path / "runs", task="cifar10-resnet20", label="sgd", seed=1)
    files.folder.mkdir(parents=True)
    for path in (files.result, files.checkpoint):
        path.write_text("earlier")
    with pytest.raises(DataError, match="adahessian fetch cifar10-resnet20"):
        train("cifar10-resnet20", "sgd", tmp_path, overwrite=True)
    assert [path.read_text() for path in (files.result, files.checkpoint)] == ["earlier"] * 2


def test_a_run_that_cannot_start_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match="--batch-size 5000"):
        train("digits", "adamw", tmp_path, batch_size=5000)
    assert [*tmp_path.iterdir()] == [tmp_path / "runs"]
    (tmp_path / "runs").rmdir()
    (tmp_path / "runs").write_text("")
    with pytest.raises(LabError, match="--output"):
        train("digits", "adamw", tmp_path)


def test_a_checkpoint_of_another_run_is_rejected(tmp_path):
    stop("digits", "adamw", tmp_path, name="mine", stop_after_steps=3)
    with pytest.raises(CheckpointError, match="--lr"):
        train("digits", "adamw", tmp_path, name="mine", lr=0.1, resume=True)
    (path,) = tmp_path.rglob("checkpoint.pt")
    saved = load_checkpoint(path)
    save_checkpoint(path, saved | {"identity": saved["identity"] | {"--data-dir (steps per epoch)": 21}})
    with pytest.raises(CheckpointError, match="--data-dir"):
        train("digits", "adamw", tmp_path, name="mine", resume=True)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="--overwrite"):
        train("digits", "adamw", tmp_path, name="mine", resume=True)


def test_two_processes_cannot_write_one_run(tmp_path):
    folder = RunFiles(output=tmp_path / "runs", task="digits", label="sgd", seed=1).folder
    folder.mkdir(parents=True)
    with locked(folder):
        with pytest.raises(RunExistsError, match="sgd_seed-1"):
            train("digits", "sgd", tmp_path)
        assert folder.exists()


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, function):
    stop("digits", "adamw", tmp_path, epochs=2, stop_after_epochs=1)
    (checkpoint,) = tmp_path.rglob("checkpoint.pt")
    before = checkpoint.read_bytes()

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with pytest.raises(LabError, match="No space left on device"):
            train("digits", "adamw", tmp_path, epochs=2, resume=True)
    assert checkpoint.read_bytes() == before
    assert not [*tmp_path.rglob("*.part")]
    assert train("digits", "adamw", tmp_path, epochs=2, resume=True).status == "finished"


@pytest.mark.parametrize("optimizer", sorted({*OPTIMIZERS} - {"lbfgs"}))
def test_every_optimizer_trains(tmp_path, optimizer):
    if optimizer in ("soap", "sophia"):
        pytest.importorskip("pytorch_optimizer")
    result = train("digits", optimizer, tmp_path, epochs=2)
    first, second = result.curve["train_loss"]
    assert second < first
    assert result.curve["step"] == [20, 40]
    assert result.final["test_accuracy"] == result.curve["test_accuracy"][-1]
    assert result.cost["parameters"] == 5178
    assert (result.cost["step_ms"] > 0, result.cost["exclusive"], result.cost["peak_mib"]) == (True, False, None)
    computed = {"device": "cpu", "precision": "float32", "compiled": False, "mode": "eager", "processes": 1}
    assert result.conditions == computed
    assert {"commit", "command", "versions", "hardware"} <= result.provenance[0].keys()


def test_a_run_that_diverges_ends_early(tmp_path):
    result = train("digits", "sgd", tmp_path, epochs=3, lr=1e30)
    assert (result.status, result.final) == ("diverged", {})
    assert math.isnan(read_run(files_of(result, tmp_path).result).curve["train_loss"][0])
    assert not files_of(result, tmp_path).weights.exists()


def test_length_and_evaluations_in_steps(tmp_path):
    result = train("digits", "adamw", tmp_path, steps=25, eval_every=10, exclusive=True)
    assert result.curve["step"] == [10, 20, 25]
    assert result.curve["epoch"] == [0.5, 1.0, 1.25]
    assert result.curve["lr"][-1] == 0.0
    assert result.cost["exclusive"]
    once = train("digits", "adamw", tmp_path, steps=25, eval_every=25)
    assert once.cost["step_ms"] is None, "the only interval may have compiled"
    means = [steps * loss for steps, loss in zip((10, 10, 5), result.curve["train_loss"], strict=True)]
    assert once.curve["train_loss"][0] == pytest.approx(sum(means) / 25, rel=1e-6)


def test_losses_of_float64_tasks_are_summed_in_float64(tmp_path):
    result = train("pinn-poisson-1d", "adamw", tmp_path, steps=3, eval_every=1, **SMALL["pinn-poisson-1d"])
    assert all(loss != torch.tensor(loss, dtype=torch.float32).item() for loss in result.curve["train_loss"])


def test_bfloat16(tmp_path):
    result = train("digits", "adamw", tmp_path, epochs=1, precision="bfloat16")
    exact = train("digits", "adamw", tmp_path, epochs=1, name="exact")
    assert result.conditions["precision"] == "bfloat16"
    assert result.curve["train_loss"] != exact.curve["train_loss"]
    assert result.curve["train_loss"] == pytest.approx(exact.curve["train_loss"], rel=0.05)


def test_losses_are_read_once_per_second(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(trainer.Progress, "step", lambda self, step, loss, lr: seen.append(step))
    train("digits", "adamw", tmp_path, epochs=1)
    assert len(seen) <= 5
    monkeypatch.setattr(trainer, "_READ_LOSS_EVERY", -1.0)
    train("digits", "adamw", tmp_path, epochs=1, name="read")
    assert seen[-20:] == [*range(1, 21)]


def test_a_selection_is_recorded(tmp_path):
    run = Run(task="digits", optimizer="sgd", config=find_preset("digits").config("sgd"), seed=1, label="sgd")
    session = Session(output=tmp_path, device="cpu", stop_after_steps=1)
    with pytest.raises(StoppedError):
        execute(run, session, selection={"trials": 5})
    selection = {"trials": 5, "selected_on": "validation_accuracy"}
    result = execute(run, Session(output=tmp_path, device="cpu", resume=True), selection=selection)
    assert result.selection == selection


@pytest.mark.parametrize("count", [19, 21])
def test_a_task_that_yields_another_number_of_batches_is_rejected(tmp_path, monkeypatch, count):
    batches = DigitsTask.batches
    monkeypatch.setattr(DigitsTask, "batches", lambda task, epoch, skip: islice(cycle(batches(task, epoch)), count))
    with pytest.raises(ConfigError, match="steps_per_epoch is 20"):
        train("digits", "sgd", tmp_path, epochs=2)


def test_the_best_weights_are_kept():
    model = nn.BatchNorm1d(1)

    def best(*scores):
        kept = FinalWeights(model)
        for step, score in enumerate(scores, start=1):
            nn.init.constant_(model.weight, step)
            model.num_batches_tracked.fill_(step)
            kept.keep_if_best(model, score)
            state = kept.state_dict()
            kept = FinalWeights(model)
            kept.load_state_dict(state)
        return kept.module.weight.item(), int(kept.module.num_batches_tracked)

    assert best(1.0, math.nan, 9.0, 2.0, 9.0, 3.0) == (3, 3)
    assert best(math.nan, math.nan, -9.0, 2.0, -1.0) == (4, 4)
    assert best(math.nan, math.nan) == (1, 1)


@pytest.mark.parametrize(("average_epochs", "steps"), [(2, [30, 50]), (9, [10, 30, 50])])
def test_the_ends_of_the_last_epochs_are_averaged(tmp_path, monkeypatch, average_epochs, steps):
    seen = []

    def update(self, model):
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        original(self, model)

    original = FinalWeights.update_parameters
    monkeypatch.setattr(FinalWeights, "update_parameters", update)
    result = train("digits", "sgd", tmp_path, steps=50, final_weights="average", average_epochs=average_epochs)
    weights = torch.load(files_of(result, tmp_path).weights, weights_only=True)
    for name, value in weights.items():
        values = torch.stack([each[name] for each in seen])
        if name.endswith("num_batches_tracked"):
            assert (values.tolist(), value) == (steps, 50)
        else:
            torch.testing.assert_close(value, values.mean(0))
