"""Tensor parallelism is rejected before anything changes, alone and on two-dimensional device meshes."""

import pytest
import torch
from ranks import loss_fn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from adahessian import AdaHessian, AdaHessianKron, Curvature, attach, param_groups
from adahessian.base.shards import local

COLUMNS = {"0": ColwiseParallel(output_layouts=Replicate())}
BOTH = {"0": ColwiseParallel(), "2": RowwiseParallel()}
NORM = {"1": SequenceParallel(sequence_dim=0, use_local_output=True)}


def parallel(mesh, plan, shards=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh() if plan is BOTH else nn.LayerNorm(16), nn.Linear(16, 4))
    model = parallelize_module(net, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"]) if shards else model


def rejected_on_ranks(rank, size, optimizer_class):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for plan, shards in ((BOTH, False), (BOTH, True), (COLUMNS, True)):
        model = parallel(mesh, plan, shards)
        with pytest.raises(ValueError, match=r"params .* tensor parallelism"):
            optimizer_class(param_groups(model))
    x, y = torch.randn(6, 8), torch.zeros(6, dtype=torch.int64)
    for plan in (COLUMNS, NORM):  # fully_shard could have placed their parameters
        model = parallel(mesh, plan)
        optimizer = optimizer_class(param_groups(model))
        before = [local(param).clone() for param in model.parameters()]
        for connect in (
            lambda model, optimizer: Curvature(model, loss_fn, optimizer),
            lambda model, optimizer: Curvature(torch.compile(model), loss_fn, optimizer, process_group=None),
            attach,
        ):
            with pytest.raises(ValueError, match=r"model has the tensor-parallel module .* fully_shard"):
                connect(model, optimizer)
        assert all(map(torch.equal, before, map(local, model.parameters())))
        assert not optimizer.state
        assert not optimizer._optimizer_step_pre_hooks
        loss_fn(model, (x, y)).backward()  # the model can still be trained with another optimizer


@pytest.mark.parametrize("optimizer_class", [AdaHessian, AdaHessianKron])
def test_tensor_parallel_models_are_rejected(four_ranks, optimizer_class):
    four_ranks(rejected_on_ranks, optimizer_class)
