"""AdaHessianKron on N ranks, or on micro-batches, is AdaHessianKron on the whole batch."""

import copy
import logging
import math

import pytest
import test_fsdp as fsdp
import torch
from ranks import loss_fn, part_of
from test_checkpoint import load, save
from test_ddp import batch, flat, made, mlp, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from adahessian import AdaHessianKron, Curvature, diagnose, param_groups
from adahessian.base.log import warn_once
from adahessian.base.shards import gather, is_sharded, local

OPTIONS = {"lr": 0.02, "block_size": 4, "curvature_every": 2, "curvature_warmup": 1, "num_probes": 2}


def train_on_ranks(rank, size):
    model = DistributedDataParallel(made(mlp))
    optimizer = AdaHessianKron(model.parameters(), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer, batch_fraction=1)
    end = train(model, curvature, optimizer, (part_of(batch(number), rank, size) for number in range(8)))
    return end, copy.deepcopy(optimizer.state_dict()["state"])


def checkpointed_on_ranks(rank, size, folder, saves):
    """Save in the middle of an interval, or load, and go on."""
    model = DistributedDataParallel(made(mlp))
    optimizer = AdaHessianKron(model.parameters(), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer, batch_fraction=1)
    batches = [part_of(batch(number), rank, size) for number in range(6)]
    if saves:
        train(model, curvature, optimizer, batches[:3])
        save(model, optimizer, folder)
    else:
        load(model, optimizer, folder)
    assert not optimizer.curvature_due
    return train(model, curvature, optimizer, batches[3:])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_distributed_checkpoint_continues_on_any_number_of_ranks(two_ranks, ranks, tmp_path):
    straight = two_ranks(checkpointed_on_ranks, tmp_path, True)[0]
    for continued in ranks(checkpointed_on_ranks, tmp_path, False):
        torch.testing.assert_close(continued, straight, rtol=1e-7, atol=1e-9)


def test_ranks_on_slices_are_one_process_on_the_whole_batch(ranks):
    model = made(mlp)
    optimizer = AdaHessianKron(model.parameters(), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer, batch_fraction=1)
    alone = train(model, curvature, optimizer, map(batch, range(8)))
    first, *others = ranks(train_on_ranks)
    torch.testing.assert_close(first[0], alone, rtol=1e-7, atol=1e-9)
    for other in others:
        torch.testing.assert_close(first, other, rtol=0, atol=0)


def test_micro_batches_are_the_whole_batch():
    ends = []
    for parts in (1, 2):
        model = made(mlp)
        optimizer = AdaHessianKron(model.parameters(), **OPTIONS)
        curvature = Curvature(model, loss_fn, optimizer, batch_fraction=1)
        for number in range(6):
            for part in range(parts):
                curvature.measure(part_of(batch(number), part, parts))
            optimizer.zero_grad()
            loss_fn(model, batch(number)).backward()
            optimizer.step()
        ends.append(flat(model.parameters()))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)


# Sharded --------------------------------------------------------------------------------------------------------------


class Even(nn.Module):
    """Shards of two or four ranks have whole blocks, rows of a table or matrices of a stack. The last may be empty."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 16)
        self.experts = nn.Parameter(torch.randn(3, 16, 5) / 4)
        self.positions = nn.Parameter(torch.randn(1, 2, 5) / 4)  # a stack of one matrix

    def forward(self, x):
        x = self.second(self.first(self.table(x[:, 0].gt(0).sum(-1) % 5)).tanh()).tanh()
        return torch.einsum("bc,kcd->bkd", x, self.experts).add(self.positions.mean(1)).tanh().sum(1)


def new(net, shards=True, mesh=None):
    torch.manual_seed(0)
    model = net().double()
    for module in (model.first, model.second, model) if shards else ():
        fully_shard(module, mesh=mesh)
    optimizer = AdaHessianKron(param_groups(model), **OPTIONS)
    return model, optimizer, Curvature(model, loss_fn, optimizer, batch_fraction=1)


def train_sharded(model, optimizer, curvature, numbers, rank=0, size=1):
    return fsdp.train(model, curvature, optimizer, (part_of(fsdp.batch(number), rank, size) for number in numbers))


def whole_states(model, optimizer):
    """The state of one process, by name."""
    return {
        name: {key: gather(value).clone() for key, value in optimizer.state[param].items()}
        for name, param in model.named_parameters()
    }


def sharded_on_ranks(rank, size, net, steps, folder=None, mesh_shape=None):
    mesh = mesh_shape and init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    model, optimizer, curvature = new(net, mesh=mesh)
    end = train_sharded(model, optimizer, curvature, range(steps), rank, size)
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        of_rows = {"left_factor", "left_root", "exp_avg", *(["grad_square"] if param.dim() > 1 else [])} & state.keys()
        if name in ("experts", "positions"):
            of_rows = state.keys() - {"step", "measurements", "dropped"}
        assert {key for key, value in state.items() if is_sharded(value)} == of_rows
        for key in of_rows:
            assert (state[key].placements, len(state[key])) == (param.placements, len(param))
            assert len(local(state[key])) == len(local(param))
    if folder is not None:
        save(model, optimizer, folder)
    return end, whole_states(model, optimizer), diagnose(optimizer, model, per_parameter=True)


def loaded_on_ranks(rank, size, net, folder, shards=True):
    """Continue a run of two ranks."""
    warn_once.cache_clear()
    model, optimizer, curvature = new(net, shards)
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("adahessian").addHandler(handler)
    load(model, optimizer, folder)
    logging.getLogger("adahessian").removeHandler(handler)
    is_due, states = optimizer.curvature_due, whole_states(model, optimizer)
    end = train_sharded(model, optimizer, curvature, range(3, 6), rank, size)
    return end, whole_states(model, optimizer), is_due, states, messages


def rejected_on_ranks(rank, size):
    for module in (nn.Conv1d(4, 8, 3, groups=2), nn.ConvTranspose1d(4, 8, 3)):
        with pytest.raises(ValueError, match=r"params .* convolution"):
            AdaHessianKron(param_groups(fully_shard(module)))


@pytest.mark.parametrize("mesh_shape", [None, (2, 2)])
def test_shards_of_whole_blocks_are_one_process(ranks, mesh_shape):
    if mesh_shape and ranks.size == 2:
        pytest.skip("replicas of shards need four ranks")
    model, optimizer, curvature = new(Even, shards=False)
    alone = train_sharded(model, optimizer, curvature, range(5))
    states, numbers = whole_states(model, optimizer), diagnose(optimizer, model, per_parameter=True)
    for end, found, found_numbers in ranks(sharded_on_ranks, Even, 5, None, mesh_shape):
        torch.testing.assert_close(end, alone, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(found, states, rtol=1e-7, atol=1e-9)
        assert found_numbers == pytest.approx(numbers, rel=1e-6)


def test_shards_cut_blocks_and_nothing_else(ranks):
    """After one measurement, only the entries between rows of different ranks are missing."""
    model, optimizer, curvature = new(fsdp.Net, shards=False)
    train_sharded(model, optimizer, curvature, range(1))
    expected = whole_states(model, optimizer)
    for name, param in model.named_parameters():
        if param.dim() > 1:
            state, rows = expected[name], torch.arange(len(param))
            size = state["left_factor"].shape[1]
            columns = rows[:, None] // size * size + torch.arange(size)
            chunk = math.ceil(len(param) / ranks.size)
            state["left_factor"][rows[:, None] // chunk != columns // chunk] = 0
            whole, is_row = torch.zeros(2 * [len(param) + size]).double(), columns < len(param)
            whole[rows[:, None].expand_as(columns), columns] = state["left_factor"]
            whole = whole[: len(param), : len(param)]
            damped = whole + torch.eye(len(param)) * whole.trace() / len(param)
            values, vectors = torch.linalg.eigh(damped)
            root = vectors @ torch.diag((whole.trace() / len(param) / values).sqrt()) @ vectors.T
            state["left_root"] = root[rows[:, None], columns.clamp(max=len(param) - 1)] * is_row
    for _, found, _ in ranks(sharded_on_ranks, fsdp.Net, 1):
        for name, state in expected.items():
            torch.testing.assert_close(
                found[name], state, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: name + text
            )


def test_shards_of_any_length_train_alike_on_all_ranks(ranks):
    first, *others = ranks(sharded_on_ranks, fsdp.Net, 8)
    assert first[0].isfinite().all()
    assert all(map(math.isfinite, first[2].values()))
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("net", [Even, fsdp.Net])
def test_a_checkpoint_of_shards_loads_on_any_number_of_ranks(two_ranks, four_ranks, tmp_path, net):
    saved, of_all, _ = two_ranks(sharded_on_ranks, net, 3, tmp_path)[0]
    straight = two_ranks(sharded_on_ranks, net, 6)[0][0]
    cut_elsewhere = {4: {"convolution.weight", "first.weight", "second.weight", "last.weight"}, 1: {"last.weight"}}
    for found in (
        two_ranks(loaded_on_ranks, net, tmp_path),
        four_ranks(loaded_on_ranks, net, tmp_path),
        [loaded_on_ranks(0, 1, net, tmp_path, shards=False)],
    ):
        expected = cut_elsewhere.get(len(found), set()) if net is fsdp.Net else set()
        for end, after, is_due, before, messages in found:
            assert is_due == (len(messages) == 1) == bool(expected)
            assert {name: set(state) for name, state in after.items()} == {n: set(s) for n, s in of_all.items()}
            assert {name for name, state in before.items() if state["measurements"] == 0} == expected
            for name in before.keys() - expected:
                torch.testing.assert_close(before[name], of_all[name], rtol=0, atol=0)
            for name in expected:
                assert before[name]["left_factor"].count_nonzero() == 0
                assert after[name]["measurements"] == 2
            if not expected:
                torch.testing.assert_close(end, straight, rtol=1e-7, atol=1e-9)
            assert end.isfinite().all()
            assert not torch.equal(end, saved)


def test_sharded_convolutions_of_several_matrices_are_rejected(two_ranks):
    two_ranks(rejected_on_ranks)
