"""AdaHessianKron on N ranks, or on micro-batches, is AdaHessianKron on the whole batch."""

import copy

import torch
from ranks import loss_fn, part_of
from test_ddp import batch, flat, made, mlp, train
from torch.nn.parallel import DistributedDataParallel

from adahessian import AdaHessianKron, Curvature

OPTIONS = {"lr": 0.02, "block_size": 4, "curvature_every": 2, "curvature_warmup": 1, "num_probes": 2}


def train_on_ranks(rank, size):
    model = DistributedDataParallel(made(mlp))
    optimizer = AdaHessianKron(model.parameters(), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer, batch_fraction=1)
    end = train(model, curvature, optimizer, (part_of(batch(number), rank, size) for number in range(8)))
    return end, copy.deepcopy(optimizer.state_dict()["state"])


def test_ranks_on_slices_are_one_process_on_the_whole_batch(two_ranks):
    model = made(mlp)
    optimizer = AdaHessianKron(model.parameters(), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer, batch_fraction=1)
    alone = train(model, curvature, optimizer, map(batch, range(8)))
    first, second = two_ranks(train_on_ranks)
    torch.testing.assert_close(first[0], alone, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


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
