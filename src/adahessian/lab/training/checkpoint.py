"""Checkpoints, from which a run continues as if it had never stopped, and the weights to test."""

import io
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from adahessian.lab.configs.run import NOT_IDENTITY, Run, Session
from adahessian.lab.errors import CheckpointError, RunExistsError
from adahessian.lab.results.run_file import RunResult
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
        return cast(dict[str, Any], torch.load(path, map_location=device, weights_only=True))
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged or not a checkpoint"
        raise CheckpointError(
            f"{path} cannot be read: {reason}. Restore it, or pass --overwrite to start over."
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder against other processes. The lock ends with the process, however it ends."""
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise RunExistsError(
            f"{folder} is in use by another process. Wait for it, or choose another --name."
        ) from error


def effective_precision(session: Session, device: torch.device) -> str:
    """Return the precision of matrix products on a device. Only GPUs have tf32."""
    return "float32" if session.precision == "tf32" and device.type != "cuda" else session.precision


def identity(run: Run | RunResult, precision: str, processes: int) -> dict[str, Any]:
    """Return what distinguishes a run from others, as it comes out of a file."""
    config = json.loads(json.dumps(asdict(run)["config"]))
    options = {**config.pop("task"), **config.pop("optimizer"), **config.pop("schedule"), **config}
    named = {f"--{name.replace('_', '-')}": value for name, value in options.items() if name not in NOT_IDENTITY}
    own = {"task": run.task, "optimizer": run.optimizer, "seed": run.seed}
    return {**own, "precision": precision, "processes": processes, **named}


def changed(identity: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the names of the values that differ. Options that only one of the two has are ignored."""
    return ", ".join(name for name, value in identity.items() if name in other and other[name] != value)


class FinalWeights(AveragedModel):
    """The mean of the weights after each of the last epochs, or the weights of the best evaluation."""

    best: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, avg_fn=_mean, use_buffers=True)
        self.register_buffer("best", torch.tensor(-math.inf, dtype=torch.float64))

    def keep_if_best(self, model: nn.Module, score: float) -> None:
        """Keep the weights if their score is the highest so far."""
        if score > self.best or self.n_averaged == 0:
            self.n_averaged.zero_()
            self.update_parameters(model)
        self.best.fill_(max(self.best.item(), score))  # in this order, NaN is never the maximum


def _mean(mean: Tensor, value: Tensor, count: Tensor | int) -> Tensor:
    return mean + (value - mean) / (count + 1) if value.is_floating_point() else value  # the last value of counters
