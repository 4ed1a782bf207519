"""FSDP2: parameters, state and curvature in shards are those of one process."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard

from adahessian import AdaHessian, Curvature, CurvatureError, GaussNewton, diagnose, param_groups

SETTINGS = {"lr": 0.05, "eps": 1e-2, "block_size": 4, "update_every": 2}


class Net(nn.Module):
    """Rows that do not divide by the number of ranks, a kernel, tied weights, and less rows than ranks."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(2, 5, 3)
        self.first = nn.Linear(15, 7)
        self.second = nn.Linear(7, 7)
        self.second.weight = nn.Parameter(self.second.weight.detach())
        self.last = nn.Linear(7, 3)

    def forward(self, x):
        x = self.convolution(x).tanh().flatten(1)
        x = self.second(self.first(x).tanh()).tanh()
        return self.last(x)


def made():
    torch.manual_seed(0)
    return Net().double()


def sharded(mesh=None):
    model = made()
    for module in (model.first, model.second):
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(number, size=24):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 2, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (size,), generator=generator)


def part_of(whole, rank, size):
    return tuple(tensor.chunk(size)[rank] for tensor in whole)


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def logits_fn(model, batch):
    return model(batch[0])


def train(model, curvature, optimizer, batches):
    for each in batches:
        curvature.measure(each)
        optimizer.zero_grad()
        loss_fn(model, each).backward()
        optimizer.step()
    return whole(model)


def whole(model):
    tensors = [param.full_tensor() if isinstance(param, DTensor) else param for param in model.parameters()]
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def curvature_by(kind, model, optimizer, **settings):
    if kind == "gauss_newton":
        return GaussNewton(model, logits_fn, optimizer, **settings)
    return Curvature(model, loss_fn, optimizer, product=kind, **settings)


KINDS = ["auto", "forward_over_reverse", "gauss_newton"]


# On the ranks --------------------------------------------------------------------------------------------------------


def train_on_ranks(rank, size, kind, probes, mesh_shape=None):
    mesh = mesh_shape and init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    optimizer = AdaHessian(param_groups(model), **SETTINGS, num_probes=probes)
    curvature = curvature_by(kind, model, optimizer)
    result = train(model, curvature, optimizer, (part_of(batch(number), rank, size) for number in range(6)))
    for param, state in optimizer.state.items():
        assert state["exp_avg"].placements == state["hessian_rms"].placements == param.placements
        assert state["hessian_rms"].shape[0] == param.shape[0]
        local = state["hessian_rms"].to_local()
        assert local.shape[0] == param.to_local().shape[0]
        assert local.isfinite().all()
    return result


def untouched_on_ranks(rank, size, kind):
    """Two runs by SGD, one of which measures the curvature, which nobody uses."""
    results = []
    for measures in (False, True):
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        curvature = curvature_by(kind, model, AdaHessian(model.parameters()))
        for number in range(3):
            each = part_of(batch(number), rank, size)
            if measures:
                curvature.optimizer._measurement = None
                assert curvature.measure(each)
            optimizer.zero_grad()
            loss_fn(model, each).backward()
            optimizer.step()
        results.append(whole(model))
    return results


def not_a_number_on_ranks(rank, size):
    model = sharded()
    optimizer = AdaHessian(model.parameters(), **SETTINGS)
    diagonal = {param: param.detach() * 0 + 1 for param in model.parameters()}
    broken = next(iter(model.parameters()))
    if rank == 1:
        diagonal[broken].to_local()[0] = torch.nan
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.feed_curvature(diagonal)
    optimizer.step()
    with pytest.warns(UserWarning, match="dropped"):
        assert optimizer.dropped_measurements == 1
    return whole(model), [float(optimizer.state[param]["hessian_age"]) for param in model.parameters()]


def diagnosed_on_ranks(rank, size):
    model = sharded()
    optimizer = AdaHessian(param_groups(model), **SETTINGS)
    curvature = Curvature(model, loss_fn, optimizer)
    train(model, curvature, optimizer, (part_of(batch(number), rank, size) for number in range(3)))
    return diagnose(curvature)


def refused_on_ranks(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    cut = fully_shard(nn.Linear(8, 8), mesh=mesh, shard_placement_fn=lambda param: Shard(param.dim() - 1))
    with pytest.raises(ValueError, match="cuts its blocks"):
        AdaHessian(cut.parameters())
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="FSDP2"):
        Curvature(model, loss_fn, AdaHessian(model.parameters()))
    model = sharded()
    curvature = GaussNewton(model, logits_fn, AdaHessian(model.parameters()))
    model.set_requires_gradient_sync(False)
    with pytest.raises(CurvatureError, match="keeps gradients back"):
        curvature.measure(part_of(batch(0), rank, size))


def accumulated_on_ranks(rank, size, kind):
    model = sharded()
    optimizer = AdaHessian(param_groups(model), **SETTINGS)
    curvature = curvature_by(kind, model, optimizer, accumulate=True)
    for number in range(4):
        each = part_of(batch(number), rank, size)
        optimizer.zero_grad()
        halves = [part_of(each, half, 2) for half in range(2)]
        for half in halves:
            curvature.measure(half)
        for half in halves:
            (loss_fn(model, half) / 2).backward()
        optimizer.step()
    return whole(model)


# Here ----------------------------------------------------------------------------------------------------------------


def trained_alone(kind, probes=1):
    model = made()
    optimizer = AdaHessian(param_groups(model), **SETTINGS, num_probes=probes)
    return train(model, curvature_by(kind, model, optimizer), optimizer, map(batch, range(6)))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_shards_are_one_process(ranks, kind):
    for found in ranks(train_on_ranks, kind, 2):
        torch.testing.assert_close(found, trained_alone(kind, 2), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["auto", "gauss_newton"])
def test_shards_within_replicas_too(four_ranks, kind):
    for found in four_ranks(train_on_ranks, kind, 1, (2, 2)):
        torch.testing.assert_close(found, trained_alone(kind), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_bit_by_bit_those_of_a_run_without_the_pass(two_ranks, kind):
    for without, with_it in two_ranks(untouched_on_ranks, kind):
        assert torch.equal(without, with_it)


def test_micro_batches_are_averaged(two_ranks):
    model = made()
    optimizer = AdaHessian(param_groups(model), **SETTINGS)
    alone = train(model, curvature_by("auto", model, optimizer), optimizer, map(batch, range(4)))
    for found in two_ranks(accumulated_on_ranks, "auto"):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-11)


def test_a_measurement_that_one_shard_makes_useless_is_dropped_by_all(two_ranks):
    (first, ages), (second, other_ages) = two_ranks(not_a_number_on_ranks)
    assert torch.equal(first, second)
    assert ages == other_ages == [0.0, *[1.0] * (len(ages) - 1)]


def test_diagnostics_are_those_of_the_whole(two_ranks):
    model = made()
    optimizer = AdaHessian(param_groups(model), **SETTINGS)
    curvature = Curvature(model, loss_fn, optimizer)
    train(model, curvature, optimizer, map(batch, range(3)))
    expected = diagnose(curvature)
    for found in two_ranks(diagnosed_on_ranks):
        assert found.pop("curvature_seconds") > 0
        assert found == pytest.approx({key: value for key, value in expected.items() if key != "curvature_seconds"})


def test_what_cannot_be_done_is_refused(two_ranks):
    two_ranks(refused_on_ranks)
