"""accelerate: prepared loops take the steps of loops that are written out, and go on from its checkpoints."""

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
from accelerators import forget_accelerators, fresh_state  # noqa: F401 - a fixture
from ranks import Ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import adahessian
from adahessian.integrations.accelerate import prepare_curvature

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_digits.py"
SETTINGS = {"lr": 0.05, "eps": 1e-2, "block_size": 4, "update_every": 3, "warmup_steps": 2}


def made(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 3)).to(dtype)


def data(dtype=torch.float32, size=48):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 5, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(3, (size,), generator=generator))


def loss_fn(model, batch):
    x, y = batch
    return cross_entropy(model(x), y)


def decaying(optimizer, factor=0.5):
    return LambdaLR(optimizer, lambda step: factor**step)


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


class Loop:
    """A model, its optimizer and all else, as accelerate has prepared them."""

    def __init__(self, accelerator, batch_size=8, dtype=torch.float32, decay=0.5, max_norm=0.1, **settings):
        self.accelerator = accelerator
        self.max_norm = max_norm
        net = made(dtype)
        optimizer = adahessian.AdaHessian(adahessian.param_groups(net), **SETTINGS)
        self.model, self.optimizer, self.scheduler, self.loader = accelerator.prepare(
            net, optimizer, decaying(optimizer, decay), DataLoader(data(dtype), batch_size)
        )
        self.curvature = prepare_curvature(accelerator, self.model, loss_fn, self.optimizer, **settings)

    def train(self, batches):
        torch.manual_seed(2)
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                self.curvature.measure(batch)
                self.accelerator.backward(loss_fn(self.model, batch))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self

    def everything(self):
        state = self.optimizer.optimizer.state_dict()["state"]
        return copy.deepcopy([list(self.model.parameters()), list(state.values())])


def written_out(accumulate, autocast):
    """What the loop above does, without accelerate: steps of two micro-batches, clipping, a schedule."""
    net = made()
    optimizer = adahessian.AdaHessian(adahessian.param_groups(net), **SETTINGS)
    scheduler = decaying(optimizer)

    def loss_of(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(batch[0])
        return cross_entropy(output.float(), batch[1])

    curvature = adahessian.Curvature(net, loss_of, optimizer, accumulate=accumulate)
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
@pytest.mark.parametrize("accumulate", [True, False], ids=["all micro-batches", "the first"])
def test_is_the_loop_written_out(accumulate, precision):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    loop = Loop(accelerator, **({} if accumulate else {"accumulate": False}))
    assert_same(loop.train(loop.loader).everything(), written_out(accumulate, autocast=precision == "bf16"))


def test_micro_batches_are_the_whole_batch():
    def trained(steps, batch_size):
        forget_accelerators()
        loop = Loop(Accelerator(cpu=True, gradient_accumulation_steps=steps), batch_size, torch.float64)
        without_dropout(loop.model)
        return loop.train(loop.loader).everything()

    assert_same(trained(3, 4), trained(1, 12), rtol=1e-9, atol=1e-12)


def test_goes_on_from_save_state(tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loop = Loop(accelerator)
    batches = list(loop.loader) * 2
    loop.train(batches[:6])  # the fourth step, the next but one, is the one to measure
    assert loop.optimizer.optimizer.curvature_due is False
    accelerator.save_state(tmp_path)
    expected = loop.train(batches[6:]).everything()

    forget_accelerators()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    resumed = Loop(accelerator)
    accelerator.load_state(tmp_path)
    assert_same(resumed.train(batches[6:]).everything(), expected)


def test_scaled_losses_have_the_same_curvature():
    def trained(scaler):
        forget_accelerators()
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = scaler  # accelerate makes one on GPUs only
        loop = Loop(accelerator, max_norm=1e9)  # nor does it divide by the scale before it clips, elsewhere
        assert loop.curvature.scaler is scaler
        return loop.train(loop.loader).everything()

    # A power of two takes no bit of anything.
    assert_same(trained(torch.amp.GradScaler("cpu", init_scale=2.0**10)), trained(None))


def test_a_compiled_model_trains_as_the_plain_one():
    loop = Loop(Accelerator(cpu=True, dynamo_backend="eager"))
    assert type(loop.model) is not nn.Sequential
    trained = loop.train(loop.loader).everything()
    forget_accelerators()
    plain = Loop(Accelerator(cpu=True))
    assert_same(trained, plain.train(plain.loader).everything())


def test_needs_an_adahessian():
    net = made()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters()))
    with pytest.raises(TypeError, match="AdaHessian, but got Sequential, function, SGD"):
        prepare_curvature(accelerator, model, loss_fn, optimizer)


# Several processes ---------------------------------------------------------------------------------------------------


def train_on_ranks(rank, size, shard):
    forget_accelerators()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if shard:
        # accelerate asks for FSDP on GPUs only; what it does then works on a CPU as well.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=False)
    # No schedule: accelerate's makes as many steps of it as there are processes.
    loop = Loop(accelerator, 4, torch.float64, decay=1.0)
    without_dropout(loop.model)
    loop.train(loop.loader)
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
    loop = Loop(Accelerator(cpu=True), 16, torch.float64, decay=1.0)
    without_dropout(loop.model)
    assert_same(here, loop.train(loop.loader).everything()[0], rtol=1e-9, atol=1e-12)


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
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}  # what `accelerate launch --cpu` sets
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout.split()[-1]) > 0.5, run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["digits_checkpoint"]
