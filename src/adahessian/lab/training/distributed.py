"""One process, or several started by torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def process_group(device: torch.device) -> Iterator[torch.device]:
    """Join the processes of torchrun, if there are several, and yield this rank's device."""
    if world_size() == 1:
        yield device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        distributed.destroy_process_group()


def world_size() -> int:
    """Return the number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the rank of this process. Only rank 0 writes files and prints."""
    return int(os.environ.get("RANK", "0"))


def replicate(model: nn.Module) -> nn.Module:
    """Return a model whose gradients are averaged over all ranks."""
    if world_size() == 1:
        return model
    if all(param.is_cuda for param in model.parameters()):  # SyncBatchNorm needs a GPU
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return DistributedDataParallel(model)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Return whether the flag is set on any rank."""
    return flag if world_size() == 1 else bool(all_reduce_sum(torch.tensor(float(flag), device=device)).item())


def all_reduce_sum(value: Tensor) -> Tensor:
    """Return the sum over all ranks."""
    if world_size() > 1:
        value = value.clone()
        distributed.all_reduce(value)
    return value


def broadcast_metrics(metrics: dict[str, float], device: torch.device) -> dict[str, float]:
    """Return the metrics of rank 0, so that all ranks decide alike."""
    if world_size() == 1:
        return metrics
    values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=device)
    distributed.broadcast(values, 0)
    return dict(zip(metrics, values.tolist(), strict=True))


def all_gather(tensors: Mapping[str, Tensor], device: torch.device) -> list[dict[str, Tensor]]:
    """Return the tensors of all ranks. They have the same shapes everywhere."""
    if world_size() == 1:
        return [dict(tensors)]
    gathered: list[dict[str, Tensor]] = [{} for _ in range(world_size())]
    for name, tensor in tensors.items():
        parts = [torch.empty_like(tensor, device=device) for _ in gathered]
        distributed.all_gather(parts, tensor.to(device))
        for of_rank, part in zip(gathered, parts, strict=True):
            of_rank[name] = part.cpu()
    return gathered
