"""What people train with, on every device: float16, micro-batches, sparse tables, wrappers, diagnostics."""

from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from adahessian import AdaHessian, AdaHessianKron, Curvature, TrainingStep, diagnose, param_groups
from adahessian.base.shards import gather
from adahessian.parallel.layerwise import LayerwisePass
from adahessian.parallel.ranks import Ranks
from cases import ATTENTION, BATCH_NORM, CONVOLUTION, MLP, RECURRENT
from test_sparse import Ranker, make_batch
from test_sparse import loss_fn as ranker_loss

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
on_devices = pytest.mark.parametrize("device", DEVICES)
OPTIONS = {"lr": 0.05, "eps": 1e-2, "block_size": 2, "curvature_every": 2}


def on(device, case, dtype=torch.float64):
    model = case.model(dtype).to(device)
    return model, AdaHessian(model.parameters(), **OPTIONS)


def batch_on(device, case, seed=1, dtype=torch.float64):
    return tuple(part.to(device) for part in case.batch(dtype, seed))


def values(model):
    return torch.cat([param.detach().flatten().cpu().double() for param in model.parameters()])


def step(model, curvature, optimizer, batch, loss_fn):
    curvature.measure(batch)
    optimizer.zero_grad()
    loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.fixture
def alone(tmp_path, request):
    """A process group of one."""
    device = request.getfixturevalue("device")
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@on_devices
@pytest.mark.parametrize("case", [MLP, ATTENTION], ids=str)
def test_float16_with_a_scaler_learns_and_drops_nothing(device, case):
    model, optimizer = on(device, case, torch.float32)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**12, growth_interval=5)

    def loss_fn(model, batch):
        with torch.autocast(device, torch.float16):
            return case.loss(model, batch)

    curvature = Curvature(model, loss_fn, optimizer, scaler=scaler)
    batch = batch_on(device, case, dtype=torch.float32)
    losses = []
    for _ in range(40):
        curvature.measure(batch)
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert diagnose(optimizer)["dropped_measurements"] == 0


@on_devices
@pytest.mark.parametrize("case", [MLP, ATTENTION, RECURRENT], ids=str)
def test_micro_batches_are_the_whole_batch(device, case):
    results = []
    for parts in (1, 2):
        model, optimizer = on(device, case)
        curvature = Curvature(model, case.loss, optimizer)
        for number in range(4):
            x, y = batch_on(device, case, number)
            optimizer.zero_grad()
            for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
                curvature.measure(part)
                (case.loss(model, part) / parts).backward()
            optimizer.step()
        results.append(values(model))
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)


@on_devices
def test_sparse_tables_go_the_way_of_the_host(device):
    results = []
    for place in ("cpu", device):
        model = Ranker(torch.float64).to(place)
        optimizer = AdaHessian(param_groups(model, sparse_lr=0.05), **OPTIONS)
        curvature = Curvature(model, ranker_loss, optimizer)
        for number in range(4):
            batch = tuple(part.to(place) for part in make_batch(number, dtype=torch.float64))
            step(model, curvature, optimizer, batch, ranker_loss)
        results.append(values(model))
    torch.testing.assert_close(*results, rtol=1e-7, atol=1e-9)


# On a GPU, the process group has no backend for the CPU, so collectives must run on the GPU.
offloaded = partial(fully_shard, offload_policy=CPUOffloadPolicy(pin_memory=False))


@on_devices
@pytest.mark.parametrize(
    "kind", [partial(AdaHessian, **OPTIONS), partial(AdaHessianKron, lr=0.05)], ids=["diagonal", "kron"]
)
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard, offloaded], ids=["ddp", "fsdp2", "offloaded"])
def test_a_wrapped_model_of_one_process_is_the_plain_one(device, wrap, kind, alone):
    results = []
    for wrapped in (False, True):
        model, _ = on(device, MLP)
        model = wrap(model) if wrapped else model
        optimizer = kind(model.parameters())
        curvature = Curvature(model, MLP.loss, optimizer)
        for number in range(4):
            step(model, curvature, optimizer, batch_on(device, MLP, number), MLP.loss)
        assert {param.device.type for param in model.parameters()} == {
            "cpu" if wrap is offloaded and wrapped else device
        }
        assert len(diagnose(optimizer, model)) > 1
        results.append(torch.cat([gather(param).detach().flatten().cpu() for param in model.parameters()]))
        if wrapped and wrap is not DistributedDataParallel:
            with pytest.raises(ValueError, match="FSDP"):
                TrainingStep(model, MLP.loss, torch.optim.SGD(model.parameters(), 0.1))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


@on_devices
@pytest.mark.parametrize("shard", [fully_shard, offloaded], ids=["fsdp2", "offloaded"])
@pytest.mark.parametrize("case", [MLP, ATTENTION, CONVOLUTION, BATCH_NORM], ids=str)
def test_one_module_at_a_time_is_the_gathered_model(device, case, shard, alone):
    model = case.model(torch.float64).to(device)
    for child in model.children():
        shard(child)
    request = AdaHessian(shard(model).parameters())._begin_measurement()
    found = LayerwisePass(model, case.loss, Ranks(), needs_marks=True)
    assert found.choose(batch_on(device, case), request)
    products = found.measure(batch_on(device, case), request, 1.0).products[0]
    assert [each.device for each in products] == [param.device for param in request.params]


@on_devices
def test_diagnostics_are_those_of_the_host(device):
    reports = []
    for place in ("cpu", device):
        model, optimizer = on(place, MLP)
        curvature = Curvature(model, MLP.loss, optimizer)
        for number in range(3):
            step(model, curvature, optimizer, batch_on(place, MLP, number), MLP.loss)
        reports.append(diagnose(optimizer, per_parameter=True))
    assert reports[1] == pytest.approx(reports[0], rel=1e-5)
