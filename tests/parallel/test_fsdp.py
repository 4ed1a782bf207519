"""FSDP2: sharded parameters, state and curvature are those of one process."""

import pytest
import torch
from ranks import loss_fn, part_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from adahessian import AdaHessian, Curvature, attach, diagnose, param_groups

# A steady start needs a mean over all shards.
OPTIONS = {"lr": 0.05, "eps": 1e-2, "block_size": 4, "curvature_every": 2, "steady_start": True}


class Net(nn.Module):
    """Rows that the number of ranks does not divide, a kernel, equal layers, and fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(2, 5, 3)
        self.first = nn.Linear(15, 7)
        self.second = nn.Linear(7, 7)
        self.last = nn.Linear(7, 3)

    def forward(self, x):
        x = self.convolution(x).tanh().flatten(1)
        x = self.second(self.first(x).tanh()).tanh()
        return self.last(self.second(x).tanh())


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


def train(model, curvature, optimizer, batches):
    for each in batches:
        curvature.measure(each)
        optimizer.zero_grad()
        loss_fn(model, each).backward()
        optimizer.step()
    return whole(model.parameters())


def whole(tensors):
    tensors = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


# On the ranks ---------------------------------------------------------------------------------------------------------


def train_on_ranks(rank, size, options, mesh_shape=None, gathers=False):
    mesh = mesh_shape and init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    optimizer = AdaHessian(param_groups(model), **OPTIONS | options)
    curvature = Curvature(model, loss_fn, optimizer)
    if gathers:
        curvature._layerwise.works = False
    result = train(model, curvature, optimizer, (part_of(batch(number), rank, size) for number in range(6)))
    assert curvature._layerwise.works is not gathers
    for param, state in optimizer.state.items():
        assert state["exp_avg"].placements == param.placements
        for name in {"hessian_rms", "hessian_row"} & state.keys():
            assert state[name].placements == param.placements
            assert state[name].shape[0] == param.shape[0]
            assert state[name].to_local().shape[0] == param.to_local().shape[0]
            assert state[name].to_local().isfinite().all()
    return result


class WithLoss(nn.Module):
    """Computes its own loss."""

    def __init__(self):
        super().__init__()
        self.net = sharded()

    def forward(self, batch):
        return loss_fn(self.net, batch)


def attached_on_ranks(rank, size):
    model = fully_shard(WithLoss())
    optimizer = AdaHessian(param_groups(model), **OPTIONS)
    with pytest.raises(ValueError, match="loss_of_output"):
        attach(model, optimizer)
    attach(model, optimizer, loss_of_output=lambda loss: loss)
    for number in range(6):
        optimizer.zero_grad()
        model(part_of(batch(number), rank, size)).backward()
        optimizer.step()
    return whole(model.parameters())


def without_a_trace_on_ranks(rank, size):
    """Compare two SGD runs. One of them also measures a curvature and does not use it."""
    results = []
    for measures in (False, True):
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        curvature = Curvature(model, loss_fn, AdaHessian(model.parameters()))
        for number in range(3):
            each = part_of(batch(number), rank, size)
            if measures:
                assert curvature.measure(each)
            optimizer.zero_grad()
            loss_fn(model, each).backward()
            optimizer.step()
        results.append(whole(model.parameters()))
    return results


def not_a_number_on_ranks(rank, size):
    model = sharded()
    optimizer = AdaHessian(model.parameters(), **OPTIONS)
    diagonal = {param: param.detach() * 0 + 1 for param in model.parameters()}
    broken = next(iter(model.parameters()))
    if rank == 1:
        diagonal[broken].to_local()[0] = torch.nan
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.set_curvature(diagonal)
    optimizer.step()
    with pytest.warns(UserWarning, match="dropped"):
        assert diagnose(optimizer)["dropped_measurements"] == 1
    counts = [float(optimizer.state[param]["measurements"]) for param in model.parameters()]
    return whole(model.parameters()), counts


def diagnosed_on_ranks(rank, size):
    model = sharded()
    optimizer = AdaHessian(param_groups(model), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer)
    train(model, curvature, optimizer, (part_of(batch(number), rank, size) for number in range(3)))
    return diagnose(optimizer, model, per_parameter=True)


def rejected_on_ranks(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    cut = fully_shard(nn.Linear(8, 8), mesh=mesh, shard_placement_fn=lambda param: Shard(param.dim() - 1))
    with pytest.raises(ValueError, match="placements"):
        AdaHessian(cut.parameters())
    with pytest.raises(ValueError, match="complex"):
        AdaHessian(fully_shard(Rotation()).parameters())
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="FSDP2"):
        Curvature(model, loss_fn, AdaHessian(model.parameters()))
    model = sharded()
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(ValueError, match="process_group"):
        Curvature(model, loss_fn, optimizer, process_group=None)
    state = AdaHessian(made().parameters())
    for param in state.param_groups[0]["params"]:
        param.grad = torch.zeros_like(param)
    state.step()
    with pytest.raises(ValueError, match="set_optimizer_state_dict"):
        optimizer.load_state_dict(state.state_dict())


def after_evaluation_on_ranks(rank, size):
    """FSDP2 leaves the root gathered after a forward pass that no backward follows. Gradients are waiting."""
    model = sharded()
    optimizer = AdaHessian(param_groups(model), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer)
    each = part_of(batch(0), rank, size)
    loss_fn(model, each).backward()
    waiting = whole(param.grad for param in model.parameters())
    with torch.no_grad():
        model(each[0])
    curvature.measure(each)
    assert torch.equal(whole(param.grad for param in model.parameters()), waiting)
    return hessian_rms(model, optimizer)


def partly_sharded_on_ranks(rank, size):
    model = made()
    fully_shard(model.second)
    optimizer = AdaHessian(param_groups(model), **OPTIONS)
    Curvature(model, loss_fn, optimizer).measure(part_of(batch(0), rank, size))
    return hessian_rms(model, optimizer)


def hooked_on_ranks(rank, size):
    model = sharded()
    seen = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: seen.append(param.shape))
    Curvature(model, loss_fn, AdaHessian(model.parameters())).measure(part_of(batch(0), rank, size))
    assert not seen
    loss_fn(model, part_of(batch(0), rank, size)).backward()
    assert len(seen) == len(list(model.parameters()))


def mixed_precision_on_ranks(rank, size):
    model = made().float()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = AdaHessian(param_groups(model), **OPTIONS)
    x, y = part_of(batch(0), rank, size)
    assert Curvature(model, loss_fn, optimizer).measure((x.bfloat16(), y))
    loss_fn(model, (x.bfloat16(), y)).backward()
    optimizer.step()


def offloaded_on_ranks(rank, size):
    model = fully_shard(made(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = AdaHessian(param_groups(model), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer)
    return train(model, curvature, optimizer, (part_of(batch(number), rank, size) for number in range(6)))


def accumulated_on_ranks(rank, size):
    model = sharded()
    optimizer = AdaHessian(param_groups(model), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer)
    for number in range(4):
        halves = [part_of(part_of(batch(number), rank, size), half, 2) for half in range(2)]
        optimizer.zero_grad()
        for half in halves:
            curvature.measure(half)
        for half in halves:
            (loss_fn(model, half) / 2).backward()
        optimizer.step()
    return whole(model.parameters())


def compiled_on_ranks(rank, size):
    """Compiled, but for generating code, which takes minutes."""
    original = torch.compile
    torch.compile = lambda function, *, options=None, **rest: original(function, backend="aot_eager", **rest)
    try:
        model = sharded()
        optimizer = AdaHessian(param_groups(model), **OPTIONS)
        curvature = Curvature(model, loss_fn, optimizer, compile=True)
        result = train(model, curvature, optimizer, (part_of(batch(number), rank, size) for number in range(3)))
    finally:
        torch.compile = original
    return result, curvature.engine.description


# Here -----------------------------------------------------------------------------------------------------------------


def hessian_rms(model, optimizer):
    """The curvature of the first measurement, once a step has used it."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return whole(optimizer.state[param]["hessian_rms"] for param in model.parameters())


def trained_alone(steps, options=None):
    model = made()
    optimizer = AdaHessian(param_groups(model), **OPTIONS | (options or {}))
    return train(model, Curvature(model, loss_fn, optimizer), optimizer, map(batch, range(steps)))


def measured_alone():
    model = made()
    optimizer = AdaHessian(param_groups(model), **OPTIONS)
    Curvature(model, loss_fn, optimizer).measure(batch(0))
    return hessian_rms(model, optimizer)


@pytest.mark.parametrize("gathers", [False, True], ids=["layerwise", "gathered"])
@pytest.mark.parametrize("options", [{}, {"num_probes": 2, "signed": True}, {"averaging": "factored"}], ids=str)
def test_sharded_ranks_are_one_process(ranks, options, gathers):
    alone = trained_alone(6, options)
    for found in ranks(train_on_ranks, options, None, gathers):
        assert_same(found, alone)


def test_shards_within_replicas_too(four_ranks):
    for found in four_ranks(train_on_ranks, {}, (2, 2)):
        assert_same(found, trained_alone(6))


def test_an_attached_model_is_measured_on_all_ranks(two_ranks):
    for found in two_ranks(attached_on_ranks):
        assert_same(found, trained_alone(6))


def test_weights_are_bit_by_bit_those_of_a_run_without_the_pass(two_ranks):
    for without, with_it in two_ranks(without_a_trace_on_ranks):
        assert torch.equal(without, with_it)


def test_a_pass_after_an_evaluation_finds_the_whole_model(two_ranks):
    for found in two_ranks(after_evaluation_on_ranks):
        assert_same(found, measured_alone())


def test_a_model_that_is_sharded_in_part(two_ranks):
    for found in two_ranks(partly_sharded_on_ranks):
        assert_same(found, measured_alone())


def test_hooks_on_parameters_see_gradients_only(two_ranks):
    two_ranks(hooked_on_ranks)


def test_mixed_precision_takes_the_batches_that_it_takes_in_training(two_ranks):
    two_ranks(mixed_precision_on_ranks)


def test_offloaded_ranks_are_one_process(two_ranks):
    for found in two_ranks(offloaded_on_ranks):
        assert_same(found, trained_alone(6))


def test_micro_batches_are_averaged(two_ranks):
    for found in two_ranks(accumulated_on_ranks):
        assert_same(found, trained_alone(4))


def test_the_compiled_pass_takes_whole_parameters_too(two_ranks):
    for found, description in two_ranks(compiled_on_ranks):
        assert description.startswith("compiled")
        assert_same(found, trained_alone(3))


def test_a_measurement_that_is_nan_in_one_shard_is_dropped_by_all(two_ranks):
    (first, counts), (second, other_counts) = two_ranks(not_a_number_on_ranks)
    assert torch.equal(first, second)
    assert counts == other_counts == [0.0, *[1.0] * (len(counts) - 1)]


def test_diagnostics_are_those_of_the_whole(two_ranks):
    model = made()
    optimizer = AdaHessian(param_groups(model), **OPTIONS)
    train(model, Curvature(model, loss_fn, optimizer), optimizer, map(batch, range(3)))
    expected = diagnose(optimizer, model, per_parameter=True)
    for found in two_ranks(diagnosed_on_ranks):
        assert found == pytest.approx(expected)


def test_what_cannot_be_done_is_rejected(two_ranks):
    two_ranks(rejected_on_ranks)
