"""A pass through a model that leaves no trace."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Keep a model's buffers and modes, and the user's random streams, as they are.

    Buffers are exchanged for copies rather than restored afterwards: a graph that waits for its backward may have saved
    the originals, and would notice being written to.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers = [(module, dict(module._buffers)) for module in modules if module._buffers]
    copies: dict[Tensor, Tensor] = {}
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    with random_streams_untouched(devices):
        try:
            for module, originals in buffers:
                for name, buffer in originals.items():
                    if buffer is not None:
                        # Once for each tensor: what modules share, they go on sharing.
                        module._buffers[name] = copies.setdefault(buffer, buffer.clone())
            yield
        finally:
            for module, originals in buffers:
                module._buffers.clear()
                module._buffers.update(originals)
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode


@contextmanager
def random_streams_untouched(devices: Iterable[torch.device]) -> Iterator[None]:
    """Put back what a pass draws: from torch, on the host and on these devices, from Python, from NumPy if loaded."""
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = numpy_random.get_state() if numpy_random else None
    python_state = random.getstate()
    accelerators: dict[str, list[int]] = {}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            accelerators.setdefault(device.type, []).append(device.index or 0)
    device_type, indices = next(iter(accelerators.items()), ("cuda", []))
    with torch.random.fork_rng(devices=indices, device_type=device_type):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy_random:
                numpy_random.set_state(numpy_state)
