"""Memory that a training takes: at its peak, and for its optimizer's state."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


class Held(NamedTuple):
    """Memory that is held on a GPU."""

    allocated: int
    reserved: int


def held(device: torch.device) -> Held | None:
    """What is held now, once everything that can be freed is; None on a CPU, where nobody counts."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return Held(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())


def peak_bytes(steps: Callable[[], object], before: Held | None, *, device: torch.device, captured: bool) -> int | None:
    """The most memory that a training takes while it runs some steps.

    Args:
        steps: Runs these steps.
        before: What others held before the training was set up.
        device: Where it runs.
        captured: Whether the steps are replays of a CUDA graph. These allocate nothing, so what the graph has reserved
            counts.
    """
    if before is None:
        return None
    torch.cuda.reset_peak_memory_stats()
    steps()
    torch.cuda.synchronize()
    if captured and (now := held(device)) is not None:
        return now.reserved - before.reserved
    return torch.cuda.max_memory_allocated() - before.allocated


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of state, scalars aside: a count is not a cost that grows with the model."""
    tensors = (tensor for state in optimizer.state.values() for tensor in _tensors(state.values()))
    return sum(tensor.nbytes for tensor in tensors if tensor.dim())


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def available_bytes(device: torch.device) -> int:
    """Memory that is free to take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
