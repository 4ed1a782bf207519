"""Checkpoints: all that a run needs to go on as if it had never stopped."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adahessian.lab.files import written_whole


class CheckpointError(Exception):
    """A checkpoint that cannot be read, or does not belong to the run."""


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint, or weights, whole or not at all."""
    # Through memory: of a full disk torch would say that it has lost count of its bytes.
    written = io.BytesIO()
    torch.save(content, written)
    with written_whole(path) as file:
        file.write(written.getbuffer())


def load_checkpoint(path: Path, *, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint. Tensors and plain values are all it may hold: nothing in it can execute code.

    Raises:
        CheckpointError: If it cannot be read.
    """
    try:
        content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no checkpoint, or only a part of one"
        raise CheckpointError(f"{path} cannot be read: {reason}") from error
    return content


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's own random streams, on the host and on the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Bring the random streams to where they were."""
    torch.set_rng_state(states["cpu"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's parameters and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
