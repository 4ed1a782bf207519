"""Optimizers from their configs, schedules, signals, and where a result comes from."""

import os
import signal
import subprocess
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from adahessian.lab.configs import optimizers as configs
from adahessian.lab.configs.run import Metric, ScheduleConfig
from adahessian.lab.errors import ConfigError
from adahessian.lab.training import provenance
from adahessian.lab.training.interrupts import Interrupts
from adahessian.lab.training.optimizers import build_optimizer
from adahessian.lab.training.schedules import Schedule
from adahessian.lab.training.steps import make_step

OPTIONS = {"weight_decay": 0.01, "betas": (0.8, 0.9), "eps": 0.1, "momentum": 0.7, "alpha": 0.8, "damping": 0.1}
OPTIONS |= {"block_size": 4, "num_probes": 2, "hessian_power": 0.5, "signed": True, "steady_start": True}
CONFIGS = {
    name: kind(lr=0.5, **{option: value for option, value in OPTIONS.items() if hasattr(kind, option)})
    for name, kind in configs.OPTIMIZERS.items()
    if name != "lbfgs"
}


def build(config, model):
    if isinstance(config, (configs.SOAP, configs.Sophia)):
        pytest.importorskip("pytorch_optimizer")
    return build_optimizer(config, model, seed=3)


@pytest.mark.parametrize("name", CONFIGS)
def test_options_arrive(name):
    config = CONFIGS[name]
    group = build(config, nn.Linear(2, 2)).param_groups[0]
    arrived = {option: getattr(config, option) for option in ("lr", *OPTIONS) if hasattr(config, option)}
    assert {option: group[option] for option in arrived} == arrived


@pytest.mark.parametrize("kind", [configs.AdaHessian, configs.AdaHessianKron])
def test_options_of_probes_arrive(kind):
    group = build(kind(lr=0.5, curvature_every=5, curvature_warmup=15), nn.Linear(2, 2)).param_groups[0]
    assert (group["curvature_every"], group["curvature_warmup"], group["seed"]) == (5, 15, 3)


@pytest.mark.parametrize("name", CONFIGS)
def test_biases_and_norms_decay_unless_they_are_not_to(name):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))

    def decaying(config):
        groups = build(config, model).param_groups
        assert {param for group in groups for param in group["params"]} == {*model.parameters()}
        return {param for group in groups if group["weight_decay"] for param in group["params"]}

    assert decaying(CONFIGS[name]) == {*model.parameters()}
    assert decaying(replace(CONFIGS[name], decay_bias_and_norm=False)) == {model[0].weight, model[3].weight}


def test_sparse_embeddings():
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    dense, embeddings = build_optimizer(configs.AdaHessian(lr=0.5), model, seed=1, embedding_lr=0.02).param_groups
    assert (dense["lr"], embeddings["lr"], embeddings["sparse"]) == (0.5, 0.02, True)
    build(configs.SGD(lr=0.5), model)
    for config in (configs.AdamW(lr=0.5), CONFIGS["sgd"]):
        with pytest.raises(ConfigError, match="adagrad"):
            build(config, model)


def test_gradients_are_clipped():
    model = nn.Linear(2, 1)
    before = [param.detach().clone() for param in model.parameters()]
    config = configs.SGD(lr=1.0, clip_norm=0.5)
    step, _ = make_step(model, lambda model, x: model(x).sum() * 1e3, build(config, model), config, compiled=False)
    step(torch.ones(3, 2))
    moved = torch.cat([(new - old).flatten() for new, old in zip(model.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-4)
    with pytest.raises(ConfigError, match="--clip-norm"):
        build(configs.LBFGS(lr=1.0, clip_norm=0.5), model)


def make_schedule(*, higher_is_better=True, **options):
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    metric = Metric(name="x", title="x", higher_is_better=higher_is_better)
    return optimizer, Schedule(optimizer, ScheduleConfig(**options), 40, 4, metric)


def rates(steps, **options):
    optimizer, schedule = make_schedule(**options)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_schedules():
    assert rates(6, lr_warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert rates(14, schedule="steps", decay_epochs=(2, 3)) == pytest.approx([1] * 8 + [0.1] * 4 + [0.01] * 2)
    found = rates(17, schedule="inverse-sqrt", lr_warmup_steps=4)
    assert (found[3], found[15]) == (1, pytest.approx(0.5))
    for schedule in ("cosine", "linear"):
        found = rates(41, schedule=schedule)
        assert [found[0], found[20], found[40]] == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize("mode", ["max", "min"])
def test_plateau_as_torch_has_it(mode):
    metrics = [1.0, 2.0, 2.0005, 2.0, 2.0, 2.0, 2.0, *9 * [3.0]]
    metrics = metrics if mode == "max" else [10 - metric for metric in metrics]
    options = {"higher_is_better": mode == "max", "schedule": "plateau", "decay_factor": 0.5, "plateau_patience": 3}
    optimizer, schedule = make_schedule(**options)
    other = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = ReduceLROnPlateau(other, mode, factor=0.5, patience=3, threshold=1e-3)
    for metric in metrics:
        for _ in range(3):
            assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
            optimizer.step()
            schedule.step()
        other.step()
        schedule.evaluated(metric)
        theirs.step(metric)
        resumed = make_schedule(**options)
        resumed[0].load_state_dict(optimizer.state_dict())
        resumed[1].load_state_dict(schedule.state_dict())
        optimizer, schedule = resumed
    assert optimizer.param_groups[0]["lr"] < 0.5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_noted_once(number):
    calls = []
    before = signal.getsignal(number)
    with Interrupts(lambda: calls.append(True)) as interrupts:
        assert not interrupts.requested
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.requested
    assert calls == [True]
    assert signal.getsignal(number) is before


def test_a_signal_in_the_middle_of_a_write_is_noted_and_a_second_ctrl_c_stops_at_once():
    def fail():
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    with Interrupts(fail) as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_commit_is_that_of_the_code(tmp_path, monkeypatch):
    monkeypatch.delenv("ADAHESSIAN_COMMIT", raising=False)
    package, installed = tmp_path / "src" / "package", tmp_path / "installed"
    for folder in (package, installed):
        folder.mkdir(parents=True)
    monkeypatch.setattr(provenance, "_PACKAGE", package)

    def git(*arguments):
        settings = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", *settings, *arguments], cwd=tmp_path, text=True).strip()

    (package / "__init__.py").write_text("")
    (tmp_path / "results.json").write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "All")
    newest = git("rev-parse", "HEAD")
    (tmp_path / "results.json").write_text("2")
    assert provenance.commit() == newest, "results do not change what is computed"
    (package / "__init__.py").write_text("changed = True")
    assert provenance.commit() == f"{newest}-dirty"
    (installed / "__init__.py").write_text("")
    monkeypatch.setattr(provenance, "_PACKAGE", installed)
    assert provenance.commit() is None, "git does not track it"
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() is None, "there is no git"
    monkeypatch.setenv("ADAHESSIAN_COMMIT", "abc")
    assert provenance.commit() == "abc"
