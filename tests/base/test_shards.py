"""Parameters that are sharded over ranks."""

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch import nn

from adahessian.base.shards import (
    agree,
    check_placement,
    gather,
    gather_over,
    is_sharded,
    local,
    local_part,
    mesh_of,
    rows_cut_by,
    rows_here,
    shard_like,
    sum_over_shards,
)


def test_ordinary_tensors_are_whole():
    param = nn.Parameter(torch.ones(3))
    assert not is_sharded(param)
    assert local(param) is gather(param) is param
    assert local_part(param, param) is param
    assert torch.equal(sum_over_shards(param, torch.ones(3)), torch.ones(3))
    (flag,) = agree([torch.tensor(True)], [param])
    assert flag.item() is True
    check_placement(param)
    assert mesh_of(nn.Linear(2, 2)) is None
    assert rows_cut_by(param) is None
    assert rows_here(param) == (0, 3)


def on_a_rank(rank, meeting):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2))
    shard = rank % 2
    whole = torch.arange(10.0).view(5, 2)
    part = whole[3 * shard : 3 + 3 * shard]
    param = nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), Shard(0)]))
    ordinary = nn.Parameter(torch.ones(2))

    assert is_sharded(param)
    assert torch.equal(local(param), part)
    assert not local(param).requires_grad
    assert torch.equal(gather(param), whole)
    assert torch.equal(local_part(whole, param), part)
    assert torch.equal(local_part(param.detach(), param), part)
    made = shard_like(param, part[:, :1].clone(), (5, 1))
    assert made.placements == param.placements
    assert torch.equal(gather(made), whole[:, :1])
    assert rows_cut_by(param) == (mesh, 1)
    assert rows_here(param) == (3 * shard, len(part))
    assert gather_over(mesh, 1, torch.tensor([rank])).tolist() == ([[0], [1]] if rank < 2 else [[2], [3]])
    # Replicas count once.
    assert torch.equal(sum_over_shards(param, part.sum(0)), whole.sum(0))
    flags = agree([torch.tensor(rank == 3), torch.tensor(rank == 3), torch.tensor(False)], [param, ordinary, param])
    assert [flag.item() for flag in flags] == [True, rank == 3, False]

    model = nn.Linear(2, 5)
    model.weight = param
    assert mesh_of(model) == mesh
    check_placement(param)
    for placements in ([Replicate(), Shard(1)], [Shard(0), Shard(0)], [Shard(0), Shard(1)]):
        with pytest.raises(ValueError, match="params"):
            check_placement(distribute_tensor(torch.zeros(4, 4), mesh, placements))
    with pytest.raises(ValueError, match="complex"):
        check_placement(distribute_tensor(torch.zeros(4, dtype=torch.complex64), mesh, [Replicate(), Shard(0)]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.xdist_group("ranks")
def test_sharded_parameters_on_two_shards_of_two_replicas(tmp_path):
    mp.spawn(on_a_rank, (tmp_path / "meeting",), nprocs=4)
