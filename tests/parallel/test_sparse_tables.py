"""Sparse embedding tables under DistributedDataParallel: their gradients are averaged, and the curvature too."""

import torch
from torch.nn.parallel import DistributedDataParallel

from adahessian import Curvature
from test_sparse import Ranker, loss_fn, make, make_batch, values


def train(model, part_of):
    optimizer = make(model)
    curvature = Curvature(model, loss_fn, optimizer)
    for number in range(6):
        batch = part_of(make_batch(number))
        curvature.measure(batch)
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return values(model)


def train_on_ranks(rank, size):
    return train(DistributedDataParallel(Ranker()), lambda batch: [part.chunk(size)[rank] for part in batch])


def test_two_processes_equal_one(two_ranks):
    first, second = two_ranks(train_on_ranks)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, train(Ranker(), lambda batch: batch), rtol=1e-4, atol=1e-5)
