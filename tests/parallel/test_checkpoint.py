"""torch.distributed.checkpoint: one number of ranks saves, another loads, and a run that lost a rank goes on."""

import os
import signal
from pathlib import Path

import pytest
import torch
from ranks import Ranks, RanksFailedError, loss_fn, part_of
from test_fsdp import OPTIONS, batch, sharded, trained_alone, whole
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from adahessian import AdaHessian, Curvature, param_groups

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def new():
    model = sharded()
    optimizer = AdaHessian(param_groups(model), **OPTIONS)
    return model, optimizer, Curvature(model, loss_fn, optimizer)


def train(model, optimizer, curvature, rank, size, numbers):
    for number in numbers:
        each = part_of(batch(number), rank, size)
        curvature.measure(each)
        optimizer.zero_grad()
        loss_fn(model, each).backward()
        optimizer.step()


def save(model, optimizer, folder):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    checkpoint.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)


def load(model, optimizer, folder):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


# On the ranks ---------------------------------------------------------------------------------------------------------


def save_on_ranks(rank, size, folder):
    """Saves in the middle of an interval and goes on."""
    model, optimizer, curvature = new()
    train(model, optimizer, curvature, rank, size, range(3))
    save(model, optimizer, folder)
    train(model, optimizer, curvature, rank, size, range(3, 6))
    return whole(model.parameters())


def load_on_ranks(rank, size, folder):
    torch.manual_seed(rank)
    model, optimizer, curvature = new()
    load(model, optimizer, folder)
    train(model, optimizer, curvature, rank, size, range(3, 6))
    return whole(model.parameters())


def fresh_on_ranks(rank, size, measures):
    model, optimizer, curvature = new()
    if measures:
        curvature.measure(part_of(batch(0), rank, size))
    before = whole(model.parameters())
    state = get_optimizer_state_dict(model, optimizer)
    assert torch.equal(whole(model.parameters()), before)
    assert all(group["steps"] == 0 for group in optimizer.param_groups)
    assert optimizer.curvature_due is not measures
    train(model, optimizer, curvature, rank, size, range(3))
    return whole(model.parameters()), sorted({name for of_param in state["state"].values() for name in of_param})


def plain(rank, size, folder, steps, dies_at=None):
    """A run that saves after every step, and continues from its last checkpoint."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(10, 3)).double())
    optimizer = AdaHessian(model.parameters(), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer)
    saved = Path(folder) / "state.pt"
    start = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["steps"]
    for number in range(start, steps):
        if number == dies_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, curvature, rank, size, [number])
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": number + 1}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
        dist.barrier()
    return start, [param.detach().clone() for param in model.parameters()]


# Here -----------------------------------------------------------------------------------------------------------------


def test_the_same_number_of_ranks_continues_bit_by_bit(two_ranks, tmp_path):
    for straight, continued in zip(two_ranks(save_on_ranks, tmp_path), two_ranks(load_on_ranks, tmp_path), strict=True):
        assert torch.equal(straight, continued)


def test_another_number_of_ranks_continues_too(two_ranks, four_ranks, tmp_path):
    straight = two_ranks(save_on_ranks, tmp_path)[0]
    for continued in four_ranks(load_on_ranks, tmp_path):
        torch.testing.assert_close(continued, straight, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("measures", [False, True])
def test_making_the_state_of_a_fresh_optimizer_moves_nothing(two_ranks, measures):
    """A measurement that no step has used yet outlasts it."""
    for found, names in two_ranks(fresh_on_ranks, measures):
        torch.testing.assert_close(found, trained_alone(3), rtol=1e-9, atol=1e-11)
        assert names == ["dropped", "exp_avg", "hessian_rms", "measurements", "step"]


def test_a_run_that_lost_a_rank_continues_bit_by_bit(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    ranks = Ranks(2)
    try:
        (_, straight), _ = ranks(plain, tmp_path / "whole", 8)
        with pytest.raises(RanksFailedError, match="the process died"):
            ranks(plain, tmp_path / "broken", 8, 5)
    finally:
        ranks.stop()
    ranks = Ranks(2)
    try:
        for start, continued in ranks(plain, tmp_path / "broken", 8):
            assert start == 5
            torch.testing.assert_close(continued, straight, rtol=0, atol=0)
    finally:
        ranks.stop()
