"""Parameters that are sharded over ranks as DTensors: local shards and whole tensors.

Only the first dimension may be sharded. AdaHessian's blocks lie within a row, so sharding never splits them.

With ``CPUOffloadPolicy``, shards are on the CPU, but their process group may support only the device of the mesh.
Collectives therefore run on copies on that device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Return whether a tensor is a DTensor, without importing DTensor's module, which takes a second."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, without autograd. Return an ordinary tensor unchanged."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def gather(tensor: Tensor) -> Tensor:
    """Return the whole tensor, on the device of its shard. All ranks of a sharded tensor must call this function."""
    return gather_on_mesh(tensor).to(tensor.device) if is_sharded(tensor) else tensor


def gather_on_mesh(tensor: DTensor) -> Tensor:
    """Return the whole tensor, on the device of its mesh. All ranks must call this function."""
    return cast("DTensor", _on_device_of(tensor.device_mesh, tensor.detach())).full_tensor()


def computing_device(tensor: Tensor) -> torch.device:
    """Return the device on which a model uses a tensor. ``CPUOffloadPolicy`` keeps its shards on the CPU."""
    if not is_sharded(tensor) or tensor.device.type in ("meta", tensor.device_mesh.device_type):
        return tensor.device
    return _current_device(tensor.device_mesh.device_type)


def local_part(whole: Tensor, param: Tensor) -> Tensor:
    """Return the part of a whole tensor that belongs to this rank's shard of a parameter."""
    if is_sharded(whole) or not is_sharded(param):
        return local(whole)
    from torch.distributed.tensor import distribute_tensor

    there = _on_device_of(param.device_mesh, whole)
    part = distribute_tensor(there, param.device_mesh, param.placements, src_data_rank=None).to_local()
    return part.to(whole.device)


def shard_like(param: Tensor, part: Tensor, shape: Sequence[int]) -> Tensor:
    """Create a DTensor of this shape, placed like a sharded parameter, from this rank's shard."""
    assert is_sharded(param)
    strides = torch.empty(shape, device="meta").stride()
    mesh, size = param.device_mesh, torch.Size(shape)
    there = _on_device_of(mesh, part)  # from_local moves it there anyway
    whole = type(param).from_local(there, mesh, param.placements, run_check=False, shape=size, stride=strides)
    return whole.to(part.device)


def rows_cut_by(param: Tensor) -> tuple[DeviceMesh, int] | None:
    """Return the device mesh and its dimension over which a parameter's rows are cut, or None if they are all here."""
    if is_sharded(param):
        for dim, placement in enumerate(param.placements):
            if not placement.is_replicate() and param.device_mesh.size(dim) > 1:
                return param.device_mesh, dim
    return None


def rows_here(param: Tensor) -> tuple[int, int]:
    """Return the first row of this rank's shard and the number of its rows."""
    if (cut_by := rows_cut_by(param)) is None:
        return 0, len(param)
    mesh, dim = cut_by
    return min(mesh.get_local_rank(dim) * math.ceil(len(param) / mesh.size(dim)), len(param)), len(local(param))


def gather_over(mesh: DeviceMesh, dim: int, tensor: Tensor) -> Tensor:
    """Stack the tensors of all ranks along a dimension of a device mesh."""
    here = _on_device_of(mesh, tensor.contiguous())
    stacked = here.new_empty(mesh.size(dim), *tensor.shape)
    dist.all_gather(list(stacked.unbind()), here, group=mesh.get_group(dim))
    return stacked.to(tensor.device)


def sum_to_shard(whole: Tensor, param: Tensor) -> Tensor:
    """Sum a whole tensor over the ranks of a sharded parameter, and return this rank's shard of the sum."""
    from torch.distributed.tensor import DTensor, Partial

    assert is_sharded(param)
    mesh = param.device_mesh
    parts = DTensor.from_local(_on_device_of(mesh, whole), mesh, [Partial()] * mesh.ndim, run_check=False)
    return local(parts.redistribute(placements=param.placements)).to(param.device)


def reduce_on(device_type: str, tensor: Tensor, op: dist.ReduceOp.RedOpType, groups: Iterable[object]) -> Tensor:
    """Reduce a tensor over process groups, in place. The collectives run on a device of this type."""
    there = tensor if tensor.device.type == device_type else tensor.to(_current_device(device_type))
    for group in groups:
        dist.all_reduce(there, op, group=group)
    return tensor if there is tensor else tensor.copy_(there)


def _on_device_of(mesh: DeviceMesh, tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == mesh.device_type else tensor.to(_current_device(mesh.device_type))


def _current_device(device_type: str) -> torch.device:
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def sum_over_shards(param: Tensor, tensor: Tensor) -> Tensor:
    """Sum a tensor over the shards of a parameter, in place. Replicas of the parameter are not counted twice."""
    if (cut_by := rows_cut_by(param)) is not None:
        mesh, dim = cut_by
        reduce_on(mesh.device_type, tensor, dist.ReduceOp.SUM, [mesh.get_group(dim)])
    return tensor


def agree(flags: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """Return the flags, with the maximum over ranks for sharded parameters, because each rank sees only its shard."""
    agreed = list(flags)
    if meshes := {i: param.device_mesh for i, param in enumerate(params) if is_sharded(param)}:
        common = torch.stack([flags[i] for i in meshes]).to(torch.int32)
        mesh = next(iter(meshes.values()))
        reduce_on(mesh.device_type, common, dist.ReduceOp.MAX, map(mesh.get_group, range(mesh.ndim)))
        for i, flag in zip(meshes, common.unbind(), strict=True):
            agreed[i] = flag.to(flags[i].dtype)
    return agreed


def check_placement(param: Tensor) -> None:
    """Raise a ValueError unless a parameter is whole, or is real and sharded only along its first dimension."""
    if not is_sharded(param):
        return
    if param.is_complex():
        raise ValueError(
            f"params contains a complex parameter of shape {tuple(param.shape)} that is sharded over ranks. Store its "
            "real and imaginary parts as real parameters, or do not shard it."
        )
    shards = [placement for placement in param.placements if not placement.is_replicate()]
    if len(shards) > 1 or any(getattr(placement, "dim", None) != 0 for placement in shards):
        raise ValueError(
            f"params contains a parameter of shape {tuple(param.shape)} with placements {param.placements}, which "
            "split its blocks. Shard it once, along its first dimension, as fully_shard does by default, and without "
            "tensor parallelism."
        )


def check_not_tensor_parallel(model: nn.Module) -> None:
    """Raise a ValueError if modules work on DTensors, which the curvature pass replaces with ordinary tensors."""
    for name, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor"):
                raise ValueError(
                    f"model has the tensor-parallel module {name or type(module).__name__!r}, which the curvature pass "
                    "does not support. Shard the model with fully_shard instead of parallelize_module."
                )


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the device mesh of a model's sharded parameters, or None if it has none."""
    return next((param.device_mesh for param in model.parameters() if is_sharded(param)), None)
