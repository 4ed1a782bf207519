"""A network with trained weights, and a batch of its task, from a file that ``adahessian train`` has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adahessian.lab.checkpoints import CheckpointError, load_checkpoint
from adahessian.lab.runs import NotARunError, read_result
from adahessian.lab.settings import OptimizerName, Settings
from adahessian.lab.tasks.registry import experiment_named
from adahessian.lab.tasks.task import Experiment, Place


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A network as its task evaluates it."""

    experiment: Experiment[Any]
    model: nn.Module
    loss: Callable[[], Tensor]
    """The loss of the first training batch, a function of the weights alone."""


def load_trained(path: Path, *, task: str | None, data_dir: Path, device: torch.device, seed: int = 0) -> Trained:
    """Load weights, or a checkpoint of a run that is under way.

    Args:
        path: The file.
        task: The task; None if the run's own file is beside its folder, or this is a checkpoint, which say it.
        data_dir: The folder with the data.
        device: Where to compute.
        seed: Decides which training batch comes first.

    Raises:
        CheckpointError: If the file cannot be read, is another task's, or nothing says which task it is of.
        DataError: If the data is not as it should be.
        UnknownTaskError: If there is no such task.
    """
    content = load_checkpoint(path, device=device)
    told = _told(path, content)
    name = task or (told[0] if told is not None else None)
    if name is None:
        raise CheckpointError(f"nothing says what task {path} is of: give --task")
    experiment = experiment_named(name)
    if told is not None and told[0] != experiment.name:
        raise CheckpointError(f"{path} is of the task {told[0]}, not {experiment.name}")
    loaded = experiment.load(_settings(experiment, told), Place(data_dir=data_dir, device=device, seed=seed))
    model = loaded.make_model()
    try:
        model.load_state_dict(content["model"] if "identity" in content else content)
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(f"{path} holds no weights of {experiment.name}: {error}") from error
    # Dropout and the statistics of a batch would make the loss another function each time.
    model.eval()
    batch = next(iter(loaded.batches(0)))
    return Trained(experiment=experiment, model=model, loss=lambda: loaded.loss(model, batch))


def _told(path: Path, content: Mapping[str, Any]) -> tuple[str, OptimizerName, Mapping[str, Any]] | None:
    """Task, optimizer and settings, by the checkpoint itself or by the finished run beside its folder."""
    if "identity" in content:
        identity = content["identity"]
        settings = {key[2:].replace("-", "_"): value for key, value in identity.items() if key.startswith("--")}
        return identity["task"], identity["optimizer"], settings
    try:
        result = read_result(Path(f"{path.absolute().parent}.json"))
    except NotARunError:
        return None
    return result.task, result.optimizer, result.settings


def _settings(experiment: Experiment[Any], told: tuple[str, OptimizerName, Mapping[str, Any]] | None) -> Settings:
    if told is None:
        defaults: Settings = experiment.defaults["adahessian"]
        return defaults
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in told[2].items()}
    # What a checkpoint leaves out only says how to compute.
    settings: Settings = replace(experiment.defaults[told[1]], **values)
    return settings
