"""FSDP2: parameters, state and curvature in shards are those of one process."""

import pytest
import torch
from ranks import loss_fn, part_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from adahessian import AdaHessian, Curvature, CurvatureError, GaussNewton, diagnose, param_groups

# A steady start asks all shards for their part of a mean.
SETTINGS = {"lr": 0.05, "eps": 1e-2, "block_size": 4, "update_every": 2, "steady_start": True}


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


class Rotation(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))


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
    model.set_requires_gradient_sync(True)
    model.set_gradient_divide_factor(1.0)
    with pytest.raises(CurvatureError, match="factor of yours"):
        curvature.measure(part_of(batch(0), rank, size))
    with pytest.raises(ValueError, match="process_group=None"):
        GaussNewton(model, logits_fn, AdaHessian(model.parameters()), process_group=None)
    with pytest.raises(ValueError, match="complex"):
        AdaHessian(fully_shard(Rotation()).parameters())
    optimizer = AdaHessian(model.parameters())
    state = AdaHessian(made().parameters())
    for param in state.param_groups[0]["params"]:
        param.grad = torch.zeros_like(param)
    state.step()
    with pytest.raises(ValueError, match="set_optimizer_state_dict"):
        optimizer.load_state_dict(state.state_dict())


def caught_by(optimizer):
    """What an optimizer is fed, on its way in."""
    caught = []
    feed = optimizer.feed_curvature

    def catch(diagonal, gradients):
        caught.extend(diagonal.get(param) for param in optimizer.measured_parameters())
        feed(diagonal, gradients)

    optimizer.feed_curvature = catch
    return caught


def all_of(tensors):
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def after_evaluation_on_ranks(rank, size, kind):
    """FSDP2 leaves the root gathered after a forward pass that no backward follows; gradients are waiting."""
    model = sharded()
    optimizer = AdaHessian(param_groups(model), **SETTINGS)
    caught = caught_by(optimizer)
    each = part_of(batch(0), rank, size)
    loss_fn(model, each).backward()
    waiting = all_of(param.grad for param in optimizer.measured_parameters())
    with torch.no_grad():
        model(each[0])
    curvature_by(kind, model, optimizer).measure(each)
    after = all_of(param.grad for param in optimizer.measured_parameters())
    torch.testing.assert_close(after, waiting, rtol=0, atol=0)
    return all_of(caught)


def partly_sharded_on_ranks(rank, size):
    model = made()
    fully_shard(model.second)
    optimizer = AdaHessian(param_groups(model), **SETTINGS)
    caught = caught_by(optimizer)
    curvature_by("gauss_newton", model, optimizer).measure(part_of(batch(0), rank, size))
    return all_of(caught)


def hooked_on_ranks(rank, size):
    model = sharded()
    seen = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: seen.append(param.shape))
    curvature_by("gauss_newton", model, AdaHessian(model.parameters())).measure(part_of(batch(0), rank, size))
    assert not seen
    loss_fn(model, part_of(batch(0), rank, size)).backward()
    assert len(seen) == len(list(model.parameters()))


def mixed_precision_on_ranks(rank, size, kind):
    model = made().float()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = AdaHessian(param_groups(model), **SETTINGS)
    x, y = part_of(batch(0), rank, size)
    assert curvature_by(kind, model, optimizer).measure((x.bfloat16(), y))
    loss_fn(model, (x.bfloat16(), y)).backward()
    optimizer.step()


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


@pytest.mark.parametrize("kind", ["auto", "gauss_newton"])
def test_a_pass_after_an_evaluation_finds_all_of_the_model(two_ranks, kind):
    model = made()
    optimizer = AdaHessian(param_groups(model), **SETTINGS)
    expected = caught_by(optimizer)
    curvature_by(kind, model, optimizer).measure(batch(0))
    for found in two_ranks(after_evaluation_on_ranks, kind):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_gauss_newton_of_a_model_that_is_sharded_in_part(two_ranks):
    model = made()
    optimizer = AdaHessian(param_groups(model), **SETTINGS)
    expected = caught_by(optimizer)
    curvature_by("gauss_newton", model, optimizer).measure(batch(0))
    for found in two_ranks(partly_sharded_on_ranks):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_hooks_on_parameters_see_gradients_only(two_ranks):
    two_ranks(hooked_on_ranks)


@pytest.mark.parametrize("kind", ["auto", "gauss_newton"])
def test_a_policy_of_mixed_precision_takes_the_batches_that_it_takes_in_training(two_ranks, kind):
    two_ranks(mixed_precision_on_ranks, kind)


def test_micro_batches_of_gauss_newton_are_averaged(two_ranks):
    """Each draws labels of its own, so that no single process is the same: ranks agree, and blocks are measured."""
    first, second = two_ranks(accumulated_on_ranks, "gauss_newton")
    assert torch.equal(first, second)
    assert not torch.equal(first, whole(made()))


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
