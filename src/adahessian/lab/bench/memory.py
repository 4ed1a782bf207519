"""Memory of a training step and of an optimizer's state."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from adahessian.base.batches import tensors_in


def held(device: torch.device, *, captured: bool) -> int:
    """Free what can be freed and return the bytes that stay in use. 0 on a CPU.

    The replay of a CUDA graph allocates nothing, so the memory that its graph has reserved counts for captured steps.
    """
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() if captured else torch.cuda.memory_allocated()


def peak_mib(run: Callable[[], object], before: int, device: torch.device, *, captured: bool) -> float | None:
    """Run some steps and return their peak memory beyond ``before``, or None on a CPU."""
    if device.type != "cuda":
        return None
    held(device, captured=captured)
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return ((torch.cuda.max_memory_reserved() if captured else torch.cuda.max_memory_allocated()) - before) / 2**20


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the optimizer's state, except for scalars such as step counts."""
    return sum(tensor.nbytes for tensor in tensors_in([*optimizer.state.values()]) if tensor.dim())
