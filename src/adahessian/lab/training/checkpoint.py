"""Checkpoints: everything that a run needs to continue as if it had never stopped."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from adahessian.lab.errors import CheckpointError, RunExistsError
from adahessian.lab.training.atomic_files import atomic_write


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint or weights atomically."""
    buffer = io.BytesIO()  # torch.save into a file reports a full disk as an internal error
    torch.save(content, buffer)
    with atomic_write(path) as file:
        file.write(buffer.getbuffer())


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint, which holds tensors and plain values only and cannot execute code."""
    try:
        content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged or not a checkpoint"
        raise CheckpointError(
            f"{path} cannot be read: {reason}. Restore it, or pass --overwrite to start over."
        ) from error
    return content


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder. The lock ends with the process, however it ends."""
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise RunExistsError(
            f"{folder} is in use by another process. Wait for it, or choose another --name."
        ) from error
