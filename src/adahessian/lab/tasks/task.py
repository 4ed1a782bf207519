"""What the trainer asks of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from adahessian.lab.errors import ConfigError
from adahessian.lab.training.random_streams import random_stream

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class Env:
    """Where a task runs."""

    data_dir: Path
    """Folder with the data, in its owner's format."""

    device: torch.device
    """Device of the model and of batches."""

    seed: int
    """Decides order and augmentation, through :func:`adahessian.lab.training.random_streams.random_stream`."""

    rank: int = 0
    world_size: int = 1

    def my_share(self, examples: Tensor) -> Tensor:
        """Return this rank's part of a batch's examples (first dimension). All parts have the same size.

        Examples that do not divide evenly are left out.
        """
        count = len(examples) // self.world_size
        return examples[self.rank * count : (self.rank + 1) * count]


class Task(ABC, Generic[Batch]):
    """Data, model, loss and evaluation of one run."""

    steps_per_epoch: int
    """Batches per epoch, the same in every epoch and on every rank."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return a new model on the device, in train mode. Its weights come from torch's random state or a file."""

    @abstractmethod
    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, on the device, without the first ``skip``.

        Order and augmentation are functions of (seed, epoch, number of the batch) alone and draw nothing from torch's
        random state, so a run that resumes within an epoch sees the batches it would have seen. Skipping is cheap.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean training loss, a twice differentiable scalar that depends on model and batch alone."""

    @abstractmethod
    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return metrics such as ``{"test_accuracy": 91.2, "test_loss": 0.41}``.

        The model is in eval mode, and gradients are disabled. The result holds the config's ``validation_metric``. With
        ``final=True``, it also holds the ``metric`` of the test set and any metric that is too slow for every epoch.
        """


def split_holdout(count: int, holdout: int) -> tuple[Tensor, Tensor]:
    """Return the indices of training and of validation examples: the last ``holdout`` of a fixed permutation.

    The split does not depend on the seed of the run. Without holdout, the training examples stay in order.

    Raises:
        ConfigError: If no training example would be left.
    """
    if holdout == 0:
        return torch.arange(count), torch.arange(0)
    if holdout >= count:
        raise ConfigError(f"--holdout {holdout} is invalid. Pass fewer than the {count} training examples.")
    order = torch.randperm(count, generator=random_stream("holdout"))
    return order[:-holdout], order[-holdout:]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting for the work that the device has queued."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    # A copy from pageable memory would wait.
    return tensor.pin_memory().to(device, non_blocking=True)
