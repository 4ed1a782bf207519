"""One process, or several started by torchrun."""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    if not distributed.is_initialized():  # the runs of a process share a group, because joining again would hang
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(distributed.destroy_process_group)
    yield device


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


def all_reduce_sum(value: Tensor) -> Tensor:
    """Return the sum over all ranks."""
    if world_size() > 1:
        value = value.clone()
        distributed.all_reduce(value)
    return value


def all_gather(value: Any) -> list[Any]:
    """Return the values of all ranks. Tensors in them are on the CPU."""
    values = [value] * world_size()
    if world_size() > 1:
        distributed.all_gather_object(values, value)
    return values
