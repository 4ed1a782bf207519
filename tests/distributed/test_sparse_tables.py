"""Sparse embeddings under DistributedDataParallel: the gradients of tables are averaged, and the curvature too."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from adahessian import Curvature, DenseAndSparse
from test_sparse import OPTIMIZERS, SETTINGS, Ranker, loss_fn, make_batch, values


def train(model, part_of, sparse):
    optimizer = DenseAndSparse(model, sparse=sparse, **SETTINGS)
    curvature = Curvature(model, loss_fn, optimizer)
    for number in range(6):
        batch = part_of(make_batch(number))
        curvature.measure(batch)
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return values(model)


def train_on_ranks(rank, size, sparse):
    model = DistributedDataParallel(Ranker())
    return train(model, lambda batch: [part.chunk(size)[rank] for part in batch], sparse)


@pytest.mark.parametrize("sparse", list(OPTIMIZERS))
def test_two_processes_go_the_way_of_one(two_ranks, sparse):
    first, second = two_ranks(train_on_ranks, sparse)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, train(Ranker(), lambda batch: batch, sparse), rtol=1e-4, atol=1e-5)
