"""Memory of a training step and of an optimizer's state."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

MIB = 2**20


class Held(NamedTuple):
    """Bytes that are in use on a GPU."""

    allocated: int
    reserved: int


def held(device: torch.device) -> Held | None:
    """Free what can be freed and return what stays, or None on a CPU."""
    gc.collect()
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return Held(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())


def peak_mib(run: Callable[[], object], before: Held | None, device: torch.device, *, captured: bool) -> float | None:
    """Run some steps and return their peak memory beyond ``before``, or None on a CPU.

    The replay of a CUDA graph allocates nothing, so the memory that its graph has reserved counts for captured steps.
    """
    if before is None:
        return None
    held(device)
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    if captured:
        return (torch.cuda.max_memory_reserved() - before.reserved) / MIB
    return (torch.cuda.max_memory_allocated() - before.allocated) / MIB


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the optimizer's state, except for scalars such as step counts."""
    return sum(tensor.nbytes for state in optimizer.state.values() for tensor in _tensors(state.values()))


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor) and value.dim():
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
