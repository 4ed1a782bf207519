"""DistributedDataParallel: N ranks on N slices are one process on the whole batch."""

import copy
import pickle

import pytest
import torch
from ranks import RanksFailedError, loss_fn, part_of
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adahessian import AdaHessian, Curvature, CurvatureError, attach, diagnose

OPTIONS = {"lr": 0.05, "eps": 1e-2, "block_size": 4}


def mlp():
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))


def with_batch_norm():
    # A bias before a norm has no curvature. Its rounding errors depend on the number of threads.
    return nn.Sequential(nn.Linear(5, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))


def made(make_model):
    torch.manual_seed(0)
    return make_model().double()


def batch(number, size=24):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (size,), generator=generator)


def parts(number, count):
    return [part_of(batch(number), rank, count) for rank in range(count)]


def train(model, curvature, optimizer, batches):
    for each in batches:
        curvature.measure(each)
        optimizer.zero_grad()
        loss_fn(model, each).backward()
        optimizer.step()
    return flat(model.parameters())


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def hessian_rms(model, optimizer):
    """The curvature of the first measurement, once a step has used it."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return flat(optimizer.state[param]["hessian_rms"] for param in model.parameters())


def measured_alone(*batches, make_model=mlp):
    """The same in one process, from batches with their weights."""
    model = made(make_model)
    optimizer = AdaHessian(model.parameters(), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer)
    for each, weight in batches:
        curvature.measure(each, weight=weight)
    return hessian_rms(model, optimizer)


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


# On the ranks ---------------------------------------------------------------------------------------------------------


def train_on_ranks(rank, size, make_model, steps, options, dtype=torch.float64):
    model = DistributedDataParallel(made(make_model).to(dtype))
    optimizer = AdaHessian(model.parameters(), **OPTIONS, **options, curvature_every=2)
    curvature = Curvature(model, loss_fn, optimizer)
    slices = (part_of((x.to(dtype), y), rank, size) for x, y in map(batch, range(steps)))
    return train(model, curvature, optimizer, slices), copy.deepcopy(optimizer.state_dict()["state"])


def accumulate_on_ranks(rank, size, way):
    """Two micro-batches per step, with one Curvature for all steps, a temporary one, or inside of a closure."""
    model = DistributedDataParallel(made(mlp))
    optimizer = AdaHessian(model.parameters(), **OPTIONS, curvature_every=2)
    kept = Curvature(model, loss_fn, optimizer)
    for number in range(4):
        halves = parts(number, 2 * size)[2 * rank : 2 * rank + 2]

        def closure(halves=halves):
            curvature = Curvature(model, loss_fn, optimizer) if way == "temporary" else kept
            for half in halves:
                curvature.measure(half)
            optimizer.zero_grad()
            with model.no_sync():
                (loss_fn(model, halves[0]) / 2).backward()
            loss = loss_fn(model, halves[1]) / 2
            loss.backward()
            return loss

        if way == "closure":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return flat(model.parameters())


def weights_on_ranks(rank, size, case):
    """Rank 0 has more examples than the others, or nothing that counts."""
    model = DistributedDataParallel(made(mlp))
    optimizer = AdaHessian(model.parameters(), **OPTIONS)
    x, y = batch(0)
    own = slice(0, 10) if rank == 0 else slice(10 + rank - 1, None, size - 1)
    x, y = x[own], y[own]
    is_nothing = case == "nothing" and rank == 0
    curvature = Curvature(model, loss_fn, optimizer)
    assert curvature.measure((x * torch.nan if is_nothing else x, y), weight=0 if is_nothing else len(x))
    return hessian_rms(model, optimizer)


def not_a_number_on_ranks(rank, size):
    model = DistributedDataParallel(made(mlp))
    optimizer = AdaHessian(model.parameters(), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer)
    for number in range(3):
        x, y = part_of(batch(number), rank, size)
        curvature.measure((x * torch.nan if rank == 1 and number == 1 else x, y))
        optimizer.zero_grad()
        loss_fn(model, (x, y)).backward()
        optimizer.step()
    with pytest.warns(UserWarning, match="dropped"):
        dropped = diagnose(optimizer)["dropped_measurements"]
    return flat(model.parameters()), dropped


class Branches(nn.Module):
    """The data decide which branch is taken."""

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
    optimizer = AdaHessian(model.parameters(), **OPTIONS)

    def loss_of(model, batch):
        return nn.functional.cross_entropy(model(batch[0], rank == 0), batch[1])

    curvature = Curvature(model, loss_of, optimizer)
    for number in range(3):
        each = part_of(batch(number), rank, size)
        curvature.measure(each)
        optimizer.zero_grad()
        loss_of(model, each).backward()
        optimizer.step()
    return flat(model.parameters()), flat(model.module.never.parameters())


def first_and_last(batch):
    """Two examples that no slice has."""
    return tuple(part[[0, -1]] for part in batch)


def chosen_on_ranks(rank, size):
    model = DistributedDataParallel(made(mlp))
    optimizer = AdaHessian(model.parameters(), **OPTIONS)
    Curvature(model, loss_fn, optimizer, batch_fraction=first_and_last).measure(part_of(batch(0), rank, size))
    return hessian_rms(model, optimizer)


class WithLoss(nn.Module):
    """Computes its own loss."""

    def __init__(self):
        super().__init__()
        self.layers = made(mlp)

    def forward(self, batch):
        return loss_fn(self.layers, batch)


def attached_on_ranks(rank, size):
    """The loop measures by calling the model."""
    model = DistributedDataParallel(WithLoss())
    optimizer = AdaHessian(model.parameters(), **OPTIONS, curvature_every=2)
    with pytest.raises(ValueError, match="loss_of_output"):
        attach(model, optimizer)
    attach(model, optimizer, loss_of_output=lambda loss: loss)
    for number in range(10):
        optimizer.zero_grad()
        model(part_of(batch(number), rank, size)).backward()
        optimizer.step()
    return flat(model.parameters())


def gradients_on_ranks(rank, size, measured):
    """All that DDP does to gradients: buckets, hooks, no_sync."""
    model = DistributedDataParallel(made(with_batch_norm), bucket_cap_mb=1e-4)
    seen = []

    def hook(state, bucket):
        seen.append(bucket.index())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    optimizer = AdaHessian(model.parameters(), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer)
    gradients = []
    for number in range(3):
        each = part_of(batch(number), rank, size)
        optimizer.zero_grad()
        with model.no_sync():
            loss_fn(model, each).backward()
        if measured:
            assert curvature.measure(each)
        loss_fn(model, each).backward()
        gradients.append([param.grad.clone() for param in model.parameters()])
    return gradients, seen


def sync_batch_norm_on_ranks(rank, size):
    """In the pass only, because torch's SyncBatchNorm takes no tensors of a CPU."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(made(with_batch_norm))
    optimizer = AdaHessian(model.parameters(), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer, process_group=dist.group.WORLD)
    curvature.measure(part_of(batch(0), rank, size), weight=rank + 1)
    return hessian_rms(model, optimizer)


def rejected_on_ranks(rank, size):
    model = made(mlp)
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(ValueError, match="process_group"):
        Curvature(model, loss_fn, optimizer)
    assert Curvature(model, loss_fn, optimizer, process_group=None).measure(batch(rank))
    loss_fn(model, batch(rank)).backward(create_graph=True)
    with pytest.raises(CurvatureError, match=r"create_graph.*curvature\.measure"):
        AdaHessian(model.parameters()).step()


class Inside(nn.Module):
    """A model that DDP wraps a part of."""

    def __init__(self):
        super().__init__()
        self.net = DistributedDataParallel(made(mlp), static_graph=True)

    def forward(self, x):
        return self.net(x)


def inside_on_ranks(rank, size, compiled):
    model = torch.compile(DistributedDataParallel(made(mlp)), backend="eager") if compiled else Inside()
    optimizer = AdaHessian(model.parameters(), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer)
    return train(model, curvature, optimizer, (part_of(batch(number), rank, size) for number in range(4)))


def copies_on_ranks(rank, size):
    """A run that goes on, with copies of it that were made between a measurement and its step."""
    model = made(mlp)
    optimizer = AdaHessian(model.parameters(), **OPTIONS, curvature_every=2)
    curvature = Curvature(model, loss_fn, optimizer, process_group=dist.group.WORLD)
    slices = [part_of(batch(number), rank, size) for number in range(6)]
    train(model, curvature, optimizer, slices[:2])
    curvature.measure(slices[2])
    copies = [copy.deepcopy((model, curvature)), pickle.loads(pickle.dumps((model, curvature)))]
    return [
        train(model, curvature, curvature.optimizer, slices[2:]) for model, curvature in [(model, curvature), *copies]
    ]


def uncopied_on_ranks(rank, size):
    model = made(mlp)
    group = dist.new_group(list(range(size)))
    curvature = Curvature(model, loss_fn, AdaHessian(model.parameters()), process_group=group)
    with pytest.raises(pickle.PicklingError, match="process_group"):
        pickle.dumps(curvature)


def communication_on_ranks(rank, size):
    """The numbers of elements that are sent, measurement by measurement."""
    model = DistributedDataParallel(made(mlp))
    optimizer = AdaHessian(model.parameters(), **OPTIONS, curvature_every=3, num_probes=2)
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


def fail_on_one(rank, size):
    if rank:
        raise KeyError("on purpose")


# Here -----------------------------------------------------------------------------------------------------------------


def trained_alone(steps, options, dtype=torch.float64):
    model = made(mlp).to(dtype)
    optimizer = AdaHessian(model.parameters(), **OPTIONS, **options, curvature_every=2)
    batches = ((x.to(dtype), y) for x, y in map(batch, range(steps)))
    return train(model, Curvature(model, loss_fn, optimizer), optimizer, batches)


@pytest.mark.parametrize("options", [{}, {"signed": True, "num_probes": 2}, {"averaging": "factored"}], ids=str)
def test_ranks_on_slices_are_one_process_on_the_whole_batch(ranks, options):
    alone = trained_alone(10, options)
    for found, _ in ranks(train_on_ranks, mlp, 10, options):
        assert_same(found, alone)


def test_an_attached_model_is_measured_on_all_ranks(two_ranks):
    for found in two_ranks(attached_on_ranks):
        assert_same(found, trained_alone(10, {}))


def test_float32_too(two_ranks):
    alone = trained_alone(10, {}, torch.float32)
    for found, _ in two_ranks(train_on_ranks, mlp, 10, {}, torch.float32):
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


def test_ranks_stay_equal_bit_by_bit_for_100_steps(ranks):
    (first, state), *others = ranks(train_on_ranks, with_batch_norm, 100, {}, torch.float32)
    assert not torch.equal(first, flat(made(with_batch_norm).float().parameters()))
    for other in others:
        torch.testing.assert_close(other, (first, state), rtol=0, atol=0)


@pytest.mark.parametrize("way", ["one object", "temporary", "closure"])
def test_micro_batches_are_averaged_with_those_of_other_ranks(two_ranks, way):
    alone = trained_alone(4, {})
    for found in two_ranks(accumulate_on_ranks, way):
        assert_same(found, alone)


def test_uneven_batches_count_by_their_weights(ranks):
    for found in ranks(weights_on_ranks, "uneven"):
        assert_same(found, measured_alone((batch(0), 1)))


def test_a_rank_of_weight_0_does_not_count(two_ranks):
    x, y = batch(0)
    for found in two_ranks(weights_on_ranks, "nothing"):
        assert_same(found, measured_alone(((x[10:], y[10:]), 1)))


def test_each_rank_chooses_a_part_of_its_own_batch(two_ranks):
    expected = measured_alone(*((first_and_last(part), 1) for part in parts(0, 2)))
    for found in two_ranks(chosen_on_ranks):
        assert_same(found, expected)


def test_a_measurement_that_is_nan_on_one_rank_is_dropped_by_all(two_ranks):
    (first, dropped), (second, also_dropped) = two_ranks(not_a_number_on_ranks)
    assert dropped == also_dropped == 4
    assert first.isfinite().all()
    assert torch.equal(first, second)


def test_a_parameter_that_only_some_ranks_use_is_measured_by_all(two_ranks):
    (first, never), (second, _) = two_ranks(branches_on_ranks)
    assert torch.equal(first, second)
    assert torch.equal(never, flat(made(Branches).never.parameters()))


def test_ddp_treats_gradients_as_without_the_pass(two_ranks):
    with_it, without_it = two_ranks(gradients_on_ranks, True), two_ranks(gradients_on_ranks, False)
    torch.testing.assert_close(with_it, without_it, rtol=0, atol=0)


def test_sync_batch_norm_uses_the_statistics_of_its_own_process(two_ranks):
    first, second = parts(0, 2)
    expected = measured_alone((first, 1), (second, 2), make_model=with_batch_norm)
    for found in two_ranks(sync_batch_norm_on_ranks):
        assert_same(found, expected)


def test_what_would_let_ranks_drift_apart_is_rejected(two_ranks):
    two_ranks(rejected_on_ranks)


def test_one_reduction_per_measurement_and_none_otherwise(two_ranks):
    sizes = [param.numel() for param in mlp().parameters()]
    blocks = [12 * 2, 12, 3 * 3, 3]
    for sent in two_ranks(communication_on_ranks):
        assert sent == [2 * sum(sizes) + sum(blocks) + len(sizes) + 1] * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_a_wrapper_inside_of_the_model_does_not_reduce_either(two_ranks, compiled):
    model = made(mlp)
    optimizer = AdaHessian(model.parameters(), **OPTIONS)
    alone = train(model, Curvature(model, loss_fn, optimizer), optimizer, map(batch, range(4)))
    for found in two_ranks(inside_on_ranks, compiled):
        assert_same(found, alone)


def test_copies_train_on_to_the_same_bits(two_ranks):
    for original, *copies in two_ranks(copies_on_ranks):
        for each in copies:
            assert torch.equal(each, original)


def test_only_the_default_group_is_copied(two_ranks):
    two_ranks(uncopied_on_ranks)


def test_a_failure_on_a_rank_is_a_failure_of_the_test(two_ranks):
    with pytest.raises(RanksFailedError, match="on purpose"):
        two_ranks(fail_on_one)
