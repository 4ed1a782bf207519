"""One process or several, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from adahessian.lab.tasks.task import Share


@contextmanager
def processes(device: torch.device) -> Iterator[tuple[Share, torch.device]]:
    """Join the other processes that torchrun has started, if it has.

    Args:
        device: The device that was asked for. Of several GPUs each process takes one.

    Yields:
        Which of the processes this is, and its device.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        yield Share(), device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Share(distributed.get_rank(), ranks), device
    finally:
        distributed.destroy_process_group()


def is_first() -> bool:
    """Whether this is the only process, or the first of those that torchrun has started: the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


def wrapped(model: nn.Module, share: Share) -> nn.Module:
    """The model as it is trained: its gradients are averaged over the processes."""
    if share.ranks == 1:
        return model
    if all(param.is_cuda for param in model.parameters()):  # torch has none for a CPU
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return DistributedDataParallel(model)


def any_of_us(said: bool, share: Share, device: torch.device) -> bool:
    """Whether any of the processes says so."""
    if share.ranks == 1:
        return said
    votes = torch.tensor(float(said), device=device)
    distributed.all_reduce(votes)
    return bool(votes.item())


def added_up(value: Tensor, share: Share) -> Tensor:
    """The sum of what all processes have."""
    if share.ranks == 1:
        return value
    total = value.clone()
    distributed.all_reduce(total)
    return total


def as_the_first_has_it(numbers: dict[str, float], share: Share, device: torch.device) -> dict[str, float]:
    """The numbers of the first process, of the same names everywhere: what follows from them, all do alike."""
    if share.ranks == 1:
        return numbers
    values = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    distributed.broadcast(values, 0)
    return dict(zip(numbers, values.tolist(), strict=True))


def from_all(states: dict[str, Tensor], share: Share, device: torch.device) -> list[dict[str, Tensor]]:
    """What each of the processes has: tensors, of the same size everywhere."""
    if share.ranks == 1:
        return [states]
    gathered: list[dict[str, Any]] = [{} for _ in range(share.ranks)]
    for name, state in states.items():
        parts = [torch.empty_like(state, device=device) for _ in range(share.ranks)]
        distributed.all_gather(parts, state.to(device))
        for of_rank, part in zip(gathered, parts, strict=True):
            of_rank[name] = part.cpu()
    return gathered
