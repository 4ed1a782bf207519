"""Gauss-Newton products of N ranks are those of one process."""

import torch
from ranks import part_of
from test_fsdp import OPTIONS, assert_same, batch, made, sharded, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adahessian import AdaHessian, Curvature, GaussNewton

LOSS = GaussNewton(lambda model, batch: model(batch[0]), lambda y, batch: nn.functional.cross_entropy(y, batch[1]))


def trained(model, batches, loss_fn=LOSS):
    optimizer = AdaHessian(model.parameters(), **OPTIONS)
    return train(model, Curvature(model, loss_fn, optimizer), optimizer, batches)


def train_on_ranks(rank, size, is_sharded):
    model = sharded() if is_sharded else DistributedDataParallel(made())
    return trained(model, (part_of(batch(number), rank, size) for number in range(3)))


def test_ranks_are_one_process(two_ranks):
    expected = trained(made(), map(batch, range(3)))
    assert not torch.equal(expected, trained(made(), map(batch, range(3)), lambda model, batch: LOSS(model, batch)))
    for is_sharded in (False, True):
        for found in two_ranks(train_on_ranks, is_sharded):
            assert_same(found, expected)
