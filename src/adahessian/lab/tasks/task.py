"""The interface between the trainer and a task, and the common part of tasks with separate examples."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adahessian.base.batches import map_tensors
from adahessian.lab.configs.run import RunConfig
from adahessian.lab.errors import ConfigError
from adahessian.lab.training.random_streams import random_stream

Batch = TypeVar("Batch")
Tensors: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Env:
    """Where a task runs. The seed decides order and augmentation, through :mod:`..training.random_streams`."""

    data_dir: Path
    device: torch.device
    seed: int
    rank: int = 0
    world_size: int = 1

    def my_share(self, examples: Tensor) -> Tensor:
        """Return this rank's part of a batch's examples. All parts have the same size, so a few may be left out."""
        count = len(examples) // self.world_size
        return examples[self.rank * count : (self.rank + 1) * count]


class Task(ABC, Generic[Batch]):
    """Data, model, loss and evaluation of one run."""

    steps_per_epoch: int  # batches per epoch, the same in every epoch and on every rank

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


def load_task(config: RunConfig, env: Env) -> Task[Any]:
    """Read the data of a run and return its task. Only the module of its family is imported.

    The task of ``configs.digits.DigitsConfig`` is ``tasks.digits.DigitsTask``. A config from outside the laboratory has
    its task in its own module.
    """
    config_class = type(config.task)
    module = import_module(config_class.__module__.replace("adahessian.lab.configs", "adahessian.lab.tasks"))
    name = f"{config_class.__name__.removesuffix('Config')}Task"
    if not hasattr(module, name):
        raise ConfigError(f"{config_class.__name__} has no task in {module.__name__}. Call the task's class {name}.")
    return cast(Task[Any], getattr(module, name)(config.task, env))


class ExampleTask(Task[Batch]):
    """A task with ``count`` training examples, without those that the config's ``holdout`` keeps for validation."""

    parts: dict[str, Any]  # examples for `scores`, under "validation" and `test_parts`, and those to train on
    test_parts: tuple[str, ...] = ("test",)

    def __init__(self, config: Any, env: Env, count: int) -> None:
        self.config, self.env, self.count = config, env, count
        full_batches, rest = divmod(count, config.batch_size)
        # The last, smaller batch counts if each rank gets a part of it.
        self.steps_per_epoch = full_batches + (rest >= env.world_size)

    def shares(self, epoch: int, skip: int) -> list[Tensor]:
        """Return this rank's examples of each batch of an epoch, as indices in the order of that epoch."""
        order = torch.randperm(self.count, generator=random_stream("order", self.env.seed, epoch))
        batches = order.split(self.config.batch_size)[skip : self.steps_per_epoch]
        return [self.env.my_share(batch) for batch in batches]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the cross-entropy, where a batch is (inputs, labels)."""
        inputs, labels = batch
        return cross_entropy(model(inputs), labels)

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return the scores on the examples that are held out, or on the test parts, or on both after training."""
        names = ["validation"] if self.config.holdout else []
        if final or not names:
            names += self.test_parts
        scores = {name: self.scores(model, self.parts[name]) for name in names}
        return {f"{name}_{metric}": value for name, found in scores.items() for metric, value in found.items()}

    @abstractmethod
    def scores(self, model: nn.Module, examples: Any) -> dict[str, float]:
        """Return metrics on one of :attr:`parts`, such as ``{"accuracy": 91.2}``."""


class TensorTask(ExampleTask[Tensors]):
    """Classification of examples that fit on the device: inputs and labels, as two tensors with one row per example.

    Subclasses may override :meth:`loss` and :meth:`scores`, and then use any number of tensors. The incomplete last
    batch of an epoch is left out.
    """

    def __init__(self, config: Any, env: Env, training: Tensors, test: Tensors) -> None:
        training, test = (tuple(each.to(env.device) for each in tensors) for tensors in (training, test))
        kept, held_out = split_holdout(len(training[0]), config.holdout)
        super().__init__(config, env, len(kept))
        self.steps_per_epoch = len(kept) // config.batch_size
        validation = tuple(each[held_out] for each in training)
        self.parts = {"training": tuple(each[kept] for each in training), "validation": validation, "test": test}

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Tensors]:
        for share in self.shares(epoch, skip):
            indices = share.to(self.env.device)
            yield tuple(each[indices] for each in self.parts["training"])

    def scores(self, model: nn.Module, examples: Tensors) -> dict[str, float]:
        """Return accuracy in % and mean loss."""
        inputs, labels = examples
        logits = model(inputs)
        hits, loss = (logits.argmax(1) == labels).sum(), cross_entropy(logits, labels)
        return {"accuracy": 100 * hits.item() / len(labels), "loss": loss.item()}


def split_holdout(count: int, holdout: int) -> tuple[Tensor, Tensor]:
    """Return the indices of training and of validation examples: the last ``holdout`` of a fixed permutation.

    The split does not depend on the seed of the run. Without holdout, the training examples stay in order.
    """
    if holdout == 0:
        return torch.arange(count), torch.arange(0)
    if holdout >= count:
        raise ConfigError(f"--holdout {holdout} is invalid. Pass fewer than the {count} training examples.")
    order = torch.randperm(count, generator=random_stream("holdout"))
    return order[:-holdout], order[-holdout:]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch from the CPU to a device without waiting for the work that the device has queued."""
    on_cuda = device.type == "cuda"
    # A copy from pageable memory would wait.
    copied = map_tensors(lambda each: (each.pin_memory() if on_cuda else each).to(device, non_blocking=on_cuda), batch)
    return cast(Batch, copied)
