"""Batches on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, without waiting for what the device is doing."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    # From ordinary memory a copy would wait.
    return tensor.pin_memory().to(device, non_blocking=True)
