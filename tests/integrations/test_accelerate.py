"""accelerate: prepared loops take the steps of plain loops, and resume from accelerate's checkpoints."""

import copy
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerators import fresh_state, reset_accelerators  # noqa: F401 - a fixture
from ranks import Ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import adahessian
from adahessian.integrations.accelerate import prepare_curvature

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_digits.py"
OPTIONS = {"lr": 0.05, "eps": 1e-2, "block_size": 4, "curvature_every": 3, "curvature_warmup": 2}


def made(dtype=torch.float32, dropout=0.1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 3)).to(dtype)


def data(dtype=torch.float32, size=48):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 5, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(3, (size,), generator=generator))


def loss_fn(model, batch):
    x, y = batch
    return cross_entropy(model(x), y)


def decaying(optimizer, factor=0.5):
    return LambdaLR(optimizer, lambda step: factor**step)


class Loop:
    """A model and all that trains it, prepared by accelerate."""

    def __init__(
        self,
        batch_size=8,
        dtype=torch.float32,
        dropout=0.1,
        decay=0.5,
        max_norm=0.1,
        scaler=None,
        shard=False,
        **options,
    ):
        self.accelerator = Accelerator(cpu=True, **options)
        # accelerate creates a scaler and selects FSDP on GPUs only, but both work on a CPU too.
        if scaler is not None:
            self.accelerator.scaler = scaler
        if shard:
            self.accelerator.state.distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=False)
        self.max_norm = max_norm
        net = made(dtype, dropout)
        optimizer = adahessian.AdaHessian(adahessian.param_groups(net), **OPTIONS)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            net, optimizer, decaying(optimizer, decay), DataLoader(data(dtype), batch_size)
        )
        self.curvature = prepare_curvature(self.accelerator, self.model, loss_fn, self.optimizer)

    def train(self, batches=None):
        torch.manual_seed(2)
        for batch in self.loader if batches is None else batches:
            with self.accelerator.accumulate(self.model):
                self.curvature.measure(batch)
                self.accelerator.backward(loss_fn(self.model, batch))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        state = self.optimizer.optimizer.state_dict()["state"]
        return copy.deepcopy([list(self.model.parameters()), list(state.values())])


def trained(**kwargs):
    reset_accelerators()
    return Loop(**kwargs).train()


def plain_loop(autocast):
    """Do what the loop above does, without accelerate: steps of two micro-batches, clipping, a schedule."""
    net = made()
    optimizer = adahessian.AdaHessian(adahessian.param_groups(net), **OPTIONS)
    scheduler = decaying(optimizer)

    def loss_of(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(batch[0])
        return cross_entropy(output.float(), batch[1])

    curvature = adahessian.Curvature(net, loss_of, optimizer)
    torch.manual_seed(2)
    for number, batch in enumerate(DataLoader(data(), 8)):
        curvature.measure(batch)
        (loss_of(net, batch) / 2).backward()
        if number % 2 == 1:
            clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return [list(net.parameters()), list(optimizer.state_dict()["state"].values())]


def assert_same(one, other, **tolerance):
    torch.testing.assert_close(one, other, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_is_the_plain_loop(precision):
    prepared = trained(gradient_accumulation_steps=2, mixed_precision=precision)
    assert_same(prepared, plain_loop(autocast=precision == "bf16"))


def test_micro_batches_are_the_whole_batch():
    kwargs = {"dtype": torch.float64, "dropout": 0.0}
    parts = trained(batch_size=4, gradient_accumulation_steps=3, **kwargs)
    assert_same(parts, trained(batch_size=12, **kwargs), rtol=1e-9, atol=1e-12)


def test_resumes_from_save_state(tmp_path):
    loop = Loop(gradient_accumulation_steps=2)
    batches = list(loop.loader) * 2
    loop.train(batches[:6])
    assert loop.optimizer.optimizer.curvature_due is False  # the fourth step does not measure, the fifth does
    loop.accelerator.save_state(tmp_path)
    expected = loop.train(batches[6:])

    reset_accelerators()
    resumed = Loop(gradient_accumulation_steps=2)
    resumed.accelerator.load_state(tmp_path)
    assert_same(resumed.train(batches[6:]), expected)


def test_scaled_losses_have_the_same_curvature():
    # Without clipping, because accelerate unscales gradients for it on GPUs only. A power of two is exact.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert_same(trained(max_norm=1e9, scaler=scaler), trained(max_norm=1e9))


def test_a_compiled_model_trains_as_the_plain_one():
    loop = Loop(dynamo_backend="eager")
    assert type(loop.model) is not nn.Sequential
    assert_same(loop.train(), trained())


def test_needs_an_adahessian():
    net = made()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters()))
    with pytest.raises(TypeError, match="optimizer"):
        prepare_curvature(accelerator, model, loss_fn, optimizer)


# Several processes ---------------------------------------------------------------------------------------------------

# No schedule: accelerate takes as many steps of it as there are processes.
ON_RANKS = {"dtype": torch.float64, "dropout": 0.0, "decay": 1.0}


def train_on_ranks(rank, size, shard):
    reset_accelerators()
    loop = Loop(4, shard=shard, gradient_accumulation_steps=2, **ON_RANKS)
    loop.train()
    whole = [param.full_tensor() if shard else param for param in loop.model.parameters()]
    return type(loop.model).__name__, [param.detach() for param in whole]


@pytest.fixture(scope="module")
def two_ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("shard", "wrapper"), [(False, "DistributedDataParallel"), (True, "FSDPSequential")])
def test_ranks_are_one_process_on_all_their_data(two_ranks, shard, wrapper):
    (name, here), (_, there) = two_ranks(train_on_ranks, shard)
    assert name == wrapper
    assert_same(here, there)
    assert_same(here, trained(batch_size=16, **ON_RANKS)[0], rtol=1e-9, atol=1e-12)


# Installing and running ----------------------------------------------------------------------------------------------


def test_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "adahessian.integrations.accelerate")
    with pytest.raises(ImportError, match=r"adahessian\[accelerate\]"):
        importlib.import_module("adahessian.integrations.accelerate")


TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("launcher", [[], TWO_PROCESSES], ids=["one process", "two processes"])
def test_the_example_runs_from_anywhere(tmp_path, launcher):
    command = [sys.executable, *launcher, EXAMPLE, "--epochs", "1"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}  # set by `accelerate launch --cpu`
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout.split()[-1]) > 0.5, run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["digits_checkpoint"]
