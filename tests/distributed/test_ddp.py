"""DistributedDataParallel: N ranks on N slices are one process on the whole batch."""

import copy

import pytest
import torch
from ranks import RanksFailedError, loss_fn, part_of
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adahessian import AdaHessian, CapturedStep, Curvature, CurvatureError, GaussNewton
from adahessian.curvature.sync_batch_norm import sync_batch_norm

SETTINGS = {"lr": 0.05, "eps": 1e-2, "block_size": 4}


class SyncNorm(nn.BatchNorm1d):
    """Torch's own SyncBatchNorm takes no tensors of a CPU."""

    def forward(self, x):
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(x)
        return sync_batch_norm(x, self.weight, self.bias, self.eps, dist.group.WORLD)


def mlp():
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))


def with_batch_norm():
    return nn.Sequential(nn.Linear(5, 12), SyncNorm(12), nn.Tanh(), nn.Linear(12, 3))


def made(make_model):
    torch.manual_seed(0)
    return make_model().double()


def batch(number, size=24):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (size,), generator=generator)


def train(model, curvature, optimizer, batches):
    for each in batches:
        curvature.measure(each)
        optimizer.zero_grad()
        loss_fn(model, each).backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def everything(model, optimizer):
    return copy.deepcopy((list(model.parameters()), list(optimizer.state_dict()["state"].values())))


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


# On the ranks --------------------------------------------------------------------------------------------------------


def train_on_ranks(rank, size, make_model, steps, averaging, dtype=torch.float64):
    model = DistributedDataParallel(made(make_model).to(dtype))
    optimizer = AdaHessian(model.parameters(), **SETTINGS, averaging=averaging, update_every=2)
    curvature = Curvature(model, loss_fn, optimizer)
    parts = (part_of((x.to(dtype), y), rank, size) for x, y in map(batch, range(steps)))
    train(model, curvature, optimizer, parts)
    return everything(model, optimizer)


def gauss_newton_on_ranks(rank, size):
    model = DistributedDataParallel(made(mlp))
    optimizer = AdaHessian(model.parameters(), **SETTINGS, num_probes=2)
    curvature = GaussNewton(model, lambda model, batch: model(batch[0]), optimizer)
    return train(model, curvature, optimizer, (part_of(batch(number), rank, size) for number in range(4)))


def uneven_on_ranks(rank, size):
    """Rank 0 has more examples than the others, and says so."""
    model = DistributedDataParallel(made(mlp))
    optimizer = AdaHessian(model.parameters(), **SETTINGS)
    caught = caught_by(optimizer)
    x, y = batch(0)
    own = slice(0, 10) if rank == 0 else slice(10 + rank - 1, None, size - 1)
    Curvature(model, loss_fn, optimizer).measure((x[own], y[own]), weight=len(x[own]))
    return caught


def not_a_number_on_ranks(rank, size):
    model = DistributedDataParallel(made(mlp))
    optimizer = AdaHessian(model.parameters(), **SETTINGS)
    curvature = Curvature(model, loss_fn, optimizer)
    for number in range(3):
        x, y = part_of(batch(number), rank, size)
        curvature.measure((x * torch.nan if rank == 1 and number == 1 else x, y))
        optimizer.zero_grad()
        loss_fn(model, (x, y)).backward()
        optimizer.step()
    with pytest.warns(UserWarning, match="dropped"):
        dropped = optimizer.dropped_measurements
    return flat(model.parameters()).detach(), dropped


class Branches(nn.Module):
    """Which branch a batch takes is in its data."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)
        self.never = nn.Linear(4, 3)

    def forward(self, x, left):
        return (self.left if left else self.right)(self.stem(x).tanh())


def branches_on_ranks(rank, size):
    model = DistributedDataParallel(made(Branches), find_unused_parameters=True)
    optimizer = AdaHessian(model.parameters(), **SETTINGS)

    def loss_of(model, batch):
        return nn.functional.cross_entropy(model(batch[0], rank == 0), batch[1])

    curvature = Curvature(model, loss_of, optimizer)
    for number in range(3):
        each = part_of(batch(number), rank, size)
        curvature.measure(each)
        optimizer.zero_grad()
        loss_of(model, each).backward()
        optimizer.step()
    return flat(model.parameters()).detach(), flat(model.module.never.parameters()).detach()


def gradients_on_ranks(rank, size, measured):
    """All that DDP does to gradients: buckets, hooks, no_sync."""
    model = DistributedDataParallel(made(with_batch_norm), bucket_cap_mb=1e-4)
    seen = []

    def hook(state, bucket):
        seen.append(bucket.index())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    optimizer = AdaHessian(model.parameters(), **SETTINGS)
    curvature = Curvature(model, loss_fn, optimizer)
    gradients = []
    for number in range(3):
        each = part_of(batch(number), rank, size)
        optimizer.zero_grad()
        with model.no_sync():
            loss_fn(model, each).backward()
        if measured:
            assert curvature.measure(each)
            optimizer.feed_curvature({})
            optimizer._measurement = None
        loss_fn(model, each).backward()
        gradients.append([param.grad.clone() for param in model.parameters()])
    return gradients, seen


def sync_batch_norm_on_ranks(rank, size):
    """Torch's own, in the curvature pass only: its gradient needs a GPU."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(made(with_plain_batch_norm))
    optimizer = AdaHessian(model.parameters(), **SETTINGS)
    caught = caught_by(optimizer)
    curvature = Curvature(model, loss_fn, optimizer, process_group=dist.group.WORLD, compile=True)
    curvature.measure(part_of(batch(0), rank, size))
    return caught


def with_plain_batch_norm():
    return nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))


def caught_by(optimizer):
    """What an optimizer is fed, on its way in."""
    caught = []
    feed = optimizer.feed_curvature

    def catch(diagonal, gradients):
        caught.extend(diagonal[param].clone() for param in optimizer.measured_parameters())
        feed(diagonal, gradients)

    optimizer.feed_curvature = catch
    return caught


def refused_on_ranks(rank, size):
    model = made(mlp)
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(ValueError, match=r"process_group=torch\.distributed\.group\.WORLD"):
        Curvature(model, loss_fn, optimizer)
    with pytest.raises(ValueError, match="several processes"):
        CapturedStep(Curvature(DistributedDataParallel(model), loss_fn, optimizer))
    assert Curvature(model, loss_fn, optimizer, process_group=None).measure(batch(rank))


class Inside(nn.Module):
    """A model of which DDP wraps a part."""

    def __init__(self):
        super().__init__()
        self.net = DistributedDataParallel(made(mlp), static_graph=True)

    def forward(self, x):
        return self.net(x)


def inside_on_ranks(rank, size, compiled):
    model = torch.compile(DistributedDataParallel(made(mlp)), backend="eager") if compiled else Inside()
    optimizer = AdaHessian(model.parameters(), **SETTINGS)
    curvature = Curvature(model, loss_fn, optimizer)
    return train(model, curvature, optimizer, (part_of(batch(number), rank, size) for number in range(4)))


def no_rows_on_ranks(rank, size):
    """All of rank 1 is padding."""
    model = DistributedDataParallel(made(mlp))
    optimizer = AdaHessian(model.parameters(), **SETTINGS)
    caught = caught_by(optimizer)
    x, _ = part_of(batch(0), rank, size)
    GaussNewton(model, lambda model, x: model(x)[: 0 if rank == 1 else None], optimizer).measure(x)
    return caught


def convolved_on_ranks(rank, size):
    """Of what rank 1 has in its first batch nothing is convolved by formulas: it is empty."""

    def energy(model, x):
        return model(x).square().sum() / 4 + sum(param.square().sum() for param in model.parameters())

    layers = nn.Conv1d(1, 2, 3), nn.SyncBatchNorm(2), nn.Flatten(), nn.Linear(4, 1)
    model = made(lambda: nn.Sequential(*layers))
    optimizer = AdaHessian(model.parameters(), **SETTINGS)
    curvature = Curvature(model, energy, optimizer, process_group=dist.group.WORLD)
    for number in range(2):
        rows = 0 if rank == 1 and number == 0 else 4
        assert curvature.measure(torch.randn(rows, 1, 4, dtype=torch.float64))
        optimizer._measurement = None
    return True


def classic_on_ranks(rank, size):
    model = made(mlp)
    optimizer = AdaHessian(model.parameters())
    loss_fn(model, batch(rank)).backward(create_graph=True)
    with pytest.raises(CurvatureError, match=r"several processes.*curvature\.measure"):
        optimizer.step()
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(made(with_plain_batch_norm))
    curvature = Curvature(synchronised, loss_fn, AdaHessian(synchronised.parameters()), process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="cannot be weighted apart"):
        curvature.measure(batch(0), weight=2.0)


def communication_on_ranks(rank, size):
    """The numbers of elements that are sent, measurement by measurement."""
    model = DistributedDataParallel(made(mlp))
    optimizer = AdaHessian(model.parameters(), **SETTINGS, update_every=3)
    curvature = Curvature(model, loss_fn, optimizer)
    sent = []
    original = dist.all_reduce

    def count(tensor, *args, **kwargs):
        sent.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = count
    try:
        train(model, curvature, optimizer, (part_of(batch(number), rank, size) for number in range(4)))
    finally:
        dist.all_reduce = original
    return sent


# Here ----------------------------------------------------------------------------------------------------------------


def test_ranks_run_the_same_passes_whatever_takes_part_on_each(ranks):
    assert all(ranks(convolved_on_ranks))


@pytest.mark.parametrize("averaging", ["magnitude", "signed"])
@pytest.mark.parametrize("make_model", [mlp, with_batch_norm])
def test_ranks_on_slices_are_one_process_on_the_whole_batch(ranks, make_model, averaging):
    model = made(make_model)
    optimizer = AdaHessian(model.parameters(), **SETTINGS, averaging=averaging, update_every=2)
    curvature = Curvature(model, loss_fn, optimizer)
    alone = train(model, curvature, optimizer, map(batch, range(10)))
    for params, _ in ranks(train_on_ranks, make_model, 10, averaging):
        torch.testing.assert_close(flat(params), flat(alone), rtol=1e-9, atol=1e-11)


def test_float32_too(two_ranks):
    model = made(mlp).float()
    optimizer = AdaHessian(model.parameters(), **SETTINGS, update_every=2)
    alone = train(
        model, Curvature(model, loss_fn, optimizer), optimizer, ((x.float(), y) for x, y in map(batch, range(10)))
    )
    for params, _ in two_ranks(train_on_ranks, mlp, 10, "magnitude", torch.float32):
        torch.testing.assert_close(flat(params), flat(alone), rtol=1e-4, atol=1e-5)


def test_ranks_stay_equal_bit_by_bit_for_100_steps(ranks):
    first, *others = ranks(train_on_ranks, with_batch_norm, 100, "magnitude", torch.float32)
    assert not torch.equal(flat(first[0]), flat(made(with_batch_norm).float().parameters()))
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_gauss_newton_is_that_of_one_process_too(ranks):
    model = made(mlp)
    optimizer = AdaHessian(model.parameters(), **SETTINGS, num_probes=2)
    curvature = GaussNewton(model, lambda model, batch: model(batch[0]), optimizer)
    alone = train(model, curvature, optimizer, map(batch, range(4)))
    for params in ranks(gauss_newton_on_ranks):
        torch.testing.assert_close(flat(params), flat(alone), rtol=1e-9, atol=1e-11)


def test_uneven_batches_count_by_their_weights(ranks):
    model = made(mlp)
    optimizer = AdaHessian(model.parameters(), **SETTINGS)
    expected = caught_by(optimizer)
    Curvature(model, loss_fn, optimizer).measure(batch(0))
    for found in ranks(uneven_on_ranks):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_what_is_not_a_number_on_one_rank_is_dropped_by_all(two_ranks):
    (first, dropped), (second, also_dropped) = two_ranks(not_a_number_on_ranks)
    assert dropped == also_dropped == 4
    assert first.isfinite().all()
    assert torch.equal(first, second)


def test_a_parameter_that_only_some_ranks_use_is_measured_by_all(two_ranks):
    (first, never), (second, _) = two_ranks(branches_on_ranks)
    assert torch.equal(first, second)
    assert torch.equal(never, flat(made(Branches).never.parameters()))


def test_what_ddp_does_to_gradients_goes_on_as_without_the_pass(two_ranks):
    with_it, without_it = two_ranks(gradients_on_ranks, True), two_ranks(gradients_on_ranks, False)
    torch.testing.assert_close(with_it, without_it, rtol=0, atol=0)


def test_sync_batch_norm_of_torch_is_differentiated_twice_over_all_ranks(ranks):
    model = made(with_plain_batch_norm)
    optimizer = AdaHessian(model.parameters(), **SETTINGS)
    expected = caught_by(optimizer)
    Curvature(model, loss_fn, optimizer).measure(batch(0))
    for found in ranks(sync_batch_norm_on_ranks):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_what_would_drift_apart_is_refused(two_ranks):
    two_ranks(refused_on_ranks)


def test_one_reduction_a_measurement_and_none_otherwise(two_ranks):
    sizes = [param.numel() for param in mlp().parameters()]
    blocks = [12 * 2, 12, 3 * 3, 3]
    for sent in two_ranks(communication_on_ranks):
        assert sent == [sum(sizes) + sum(blocks) + len(sizes) + 1] * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_a_wrapper_inside_of_the_model_is_gone_past_too(two_ranks, compiled):
    model = made(mlp)
    optimizer = AdaHessian(model.parameters(), **SETTINGS)
    alone = train(model, Curvature(model, loss_fn, optimizer), optimizer, map(batch, range(4)))
    for params in two_ranks(inside_on_ranks, compiled):
        torch.testing.assert_close(flat(params), flat(alone), rtol=1e-9, atol=1e-11)


def test_a_rank_without_rows_takes_part_with_nothing(two_ranks):
    model = made(mlp)
    optimizer = AdaHessian(model.parameters(), **SETTINGS)
    expected = caught_by(optimizer)
    GaussNewton(model, lambda model, x: model(x), optimizer).measure(part_of(batch(0), 0, 2)[0])
    for found in two_ranks(no_rows_on_ranks):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_what_knows_nothing_of_other_ranks_is_refused(two_ranks):
    two_ranks(classic_on_ranks)


def fail_on_one(rank, size):
    if rank:
        raise KeyError("on purpose")


def test_a_failure_on_a_rank_is_a_failure_of_the_test(two_ranks):
    with pytest.raises(RanksFailedError, match="on purpose"):
        two_ranks(fail_on_one)
