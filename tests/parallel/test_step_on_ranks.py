"""With TrainingStep and DistributedDataParallel, N ranks on N slices match one process on the whole batch."""

from contextlib import nullcontext

import pytest
import torch
from ranks import loss_fn, part_of
from test_ddp import Branches, assert_same, batch, flat, made, mlp, with_batch_norm
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from adahessian import AdaHessian, AdaHessianKron, Curvature, TrainingStep, training_step
from test_training_step import PretendedGraph, PretendedMemory, plain_loop

STEPS = 6


def first_half_of_halves(batch):
    """Choose the same examples from a whole batch as two ranks choose from their halves."""
    return tuple(torch.cat([half[: len(half) // 2] for half in part.chunk(2)]) for part in batch)


def adahessian(params):
    return AdaHessian(params, lr=0.05, eps=1e-2, block_size=4, curvature_every=2, num_probes=2)


def kron(params):
    return AdaHessianKron(params, lr=0.02, block_size=4, curvature_every=2, curvature_warmup=1)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.02)


CASES = [(adahessian, 1.0), (kron, 1.0), (kron, 0.5), (adamw, None)]


def step_for(model, loss_fn, optimizer, fraction):
    if isinstance(optimizer, AdaHessian):
        return TrainingStep(Curvature(model, loss_fn, optimizer, batch_fraction=fraction))
    return TrainingStep(model, loss_fn, optimizer)


def pretend_to_capture(patch):
    PretendedGraph.captured = []
    patch.setattr(training_step, "CapturedFunction", PretendedGraph)
    patch.setattr(training_step, "Memory", PretendedMemory)
    patch.setattr(training_step, "cuda_device_of", lambda model: torch.device("cpu"))
    patch.setattr(torch.cuda, "device", lambda device: nullcontext())


# On the ranks ---------------------------------------------------------------------------------------------------------


def train_on_ranks(rank, size, make, fraction, captured):
    model = DistributedDataParallel(made(mlp))
    step = step_for(model, loss_fn, make(model.parameters()), fraction)
    with pytest.MonkeyPatch.context() as patch:
        if captured:
            pretend_to_capture(patch)
        losses = [step(part_of(batch(number), rank, size)).item() for number in range(STEPS)]
        assert not captured or PretendedGraph.captured
    return flat(model.parameters()), torch.tensor(losses)


def branches_on_ranks(rank, size, make_step):
    model = DistributedDataParallel(made(Branches), find_unused_parameters=True)

    def loss_of(model, batch):
        return nn.functional.cross_entropy(model(batch[0], rank == 0), batch[1])

    step = make_step(model, loss_of, adamw(model.parameters()))
    for number in range(STEPS):
        step(part_of(batch(number), rank, size))
    assert model.module.never.weight.grad is None
    return flat(model.parameters())


def buffers_on_ranks(rank, size, make_step, broadcasts):
    model = DistributedDataParallel(made(with_batch_norm), broadcast_buffers=broadcasts)
    step = make_step(model, loss_fn, adamw(model.parameters()))
    for number in range(STEPS):
        step(part_of(batch(number), rank, size))
    return flat(model.parameters()), list(model.module.buffers())


def communication_on_ranks(rank, size):
    """Return the number of reductions in each of four steps. The first and the third step measure."""
    model = DistributedDataParallel(made(mlp))
    step = step_for(model, loss_fn, adahessian(model.parameters()), 1.0)
    counts, original = [0] * 4, dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        for number in range(4):

            def count(*args, number=number, **kwargs):
                counts[number] += 1
                return original(*args, **kwargs)

            patch.setattr(dist, "all_reduce", count)
            step(part_of(batch(number), rank, size))
    return counts


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = DistributedDataParallel(made(mlp))


def rejected_on_ranks(rank, size):
    sharded = made(mlp)
    fully_shard(sharded)
    sync = DistributedDataParallel(made(with_batch_norm))
    sync.module[1] = nn.SyncBatchNorm(12)
    table = DistributedDataParallel(nn.EmbeddingBag(4, 2, sparse=True))
    for model, what in [(sharded, "FSDP"), (Inside(), "inside"), (sync, "SyncBatchNorm"), (table, "sparse")]:
        with pytest.raises(ValueError, match=what):
            TrainingStep(model, loss_fn, adamw(model.parameters()))
        if model is not table:
            with pytest.raises(ValueError, match=what):
                TrainingStep(Curvature(model, loss_fn, adahessian(model.parameters())))
    TrainingStep(made(mlp), loss_fn, adamw(made(mlp).parameters()))  # a model that this process trains alone


# Here -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("make", "fraction"), CASES)
def test_ranks_on_slices_are_one_process_on_the_whole_batch(two_ranks, make, fraction, captured):
    model = made(mlp)
    step = step_for(model, loss_fn, make(model.parameters()), first_half_of_halves if fraction == 0.5 else fraction)
    alone = torch.tensor([step(batch(number)).item() for number in range(STEPS)])
    (first, losses), (second, others) = two_ranks(train_on_ranks, make, fraction, captured)
    assert torch.equal(first, second)
    assert_same(first, flat(model.parameters()))
    torch.testing.assert_close((losses + others) / 2, alone)


def test_a_parameter_that_only_some_ranks_use_has_the_gradient_of_ddp(two_ranks):
    (found, other), (expected, _) = (two_ranks(branches_on_ranks, make) for make in (TrainingStep, plain_loop))
    assert torch.equal(found, other)
    assert_same(found, expected)


@pytest.mark.parametrize("broadcasts", [True, False])
def test_buffers_are_those_of_ddp(two_ranks, broadcasts):
    found, expected = (two_ranks(buffers_on_ranks, make, broadcasts) for make in (TrainingStep, plain_loop))
    torch.testing.assert_close(found, expected)
    (_, (mean, *_)), (_, (other, *_)) = found
    assert not torch.equal(mean, other), "the last batches differ"


def test_one_reduction_of_gradients_and_one_of_products(two_ranks):
    for counts in two_ranks(communication_on_ranks):
        assert counts == [3, 2, 3, 2], "gradients of two dtypes"


def test_models_that_it_cannot_train_are_rejected(two_ranks):
    two_ranks(rejected_on_ranks)
