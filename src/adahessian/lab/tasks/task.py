"""What the trainer asks of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from adahessian.lab.runs import label
from adahessian.lab.settings import OptimizerName, SettingsT, economized

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that says how good a model is."""

    name: str
    """Its key in what a task reports, such as ``"test_accuracy"``."""

    title: str
    """What tables and plots call it, with its unit: ``"test accuracy, %"``."""

    higher_is_better: bool = True

    digits: int = 2
    """Digits behind the point."""

    short: str = ""
    """What it is called while a run trains, if not by its title."""


@dataclass(frozen=True)
class Share:
    """Which part of each batch this process takes, of how many."""

    rank: int = 0
    ranks: int = 1

    def of(self, examples: Tensor) -> Tensor:
        """This process's part of a batch's examples (along the first dimension), as large as every other's.

        Where the batch does not divide evenly, the last examples are left out.

        Example:
            >>> Share(1, 2).of(torch.arange(5))
            tensor([2, 3])
        """
        count = len(examples) // self.ranks
        return examples[self.rank * count : (self.rank + 1) * count]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a task runs."""

    data_dir: Path
    """The folder with the data, in its owner's format."""

    device: torch.device
    """Where batches are to be, and the model."""

    seed: int
    """Decides order and augmentation, by :func:`adahessian.lab.randomness.generator_for`."""

    share: Share = Share()


class Task(ABC, Generic[Batch]):
    """A task with its data at hand. Made by :attr:`Experiment.load`, for one run."""

    steps_per_epoch: int
    """Batches in an epoch. The same in every epoch, and on every rank."""

    final_weights: Literal["last", "best", "average"] = "last"
    """Which weights are tested in the end: the last ones, those of the epoch that was best by the experiment's curve,
    or the mean of those of the last epochs (``settings.average_epochs`` of them)."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """A new network on the device, in train mode. Its weights come from torch's random stream, or from a file."""

    @abstractmethod
    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, on the device, from the one with the number ``start`` on.

        Order and augmentation are functions of (seed, epoch, number of the batch) alone, and draw nothing from torch's
        own random streams: a run that is resumed in the middle of an epoch sees what it would have seen. Skipping
        costs nothing to speak of.

        Args:
            epoch: Number of the epoch, from 0.
            start: Batches to skip.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The scalar mean training loss. Twice differentiable; reads nothing but the model and the batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """What is known of a model after an epoch, such as ``{"test_accuracy": 91.2, "test_loss": 0.41}``.

        The trainer has put the model into eval mode, and turned gradients off.
        """

    def test(self, model: nn.Module) -> dict[str, float]:
        """What is reported of the final weights, where that is dearer than :meth:`evaluate`."""
        return self.evaluate(model)


@dataclass(frozen=True, kw_only=True)
class PaperNumber:
    """A result in the paper, with its standard deviation over five runs where that is given."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True, kw_only=True)
class Experiment(Generic[SettingsT]):
    """A task before its data is loaded: what it is, how the paper set it, what came out."""

    name: str
    """As ``adahessian train`` takes it: ``"cifar10-resnet20"``."""

    title: str
    """In words: ``"ResNet20 on CIFAR-10"``."""

    data: str
    """What ``--data-dir`` has to hold, in a sentence."""

    curve: Metric
    """Drawn epoch by epoch, one of those that :meth:`Task.evaluate` gives. It also says which epoch was best."""

    metric: Metric
    """In the tables, one of those that :meth:`Task.test` gives."""

    beside: tuple[Metric, ...] = ()
    """More of what :meth:`Task.evaluate` and :meth:`Task.test` give: shown while a run trains, in tables and plots."""

    others: tuple[Metric, ...] = ()
    """More of what :meth:`Task.test` gives, for the tables of reports."""

    defaults: Mapping[OptimizerName, SettingsT]
    """The paper's settings for each optimizer, or ours where the paper gives none."""

    slice_noise: float = 1.0
    """How many times as large AdaHessian's curvature comes out on the quarter of a batch that it is economical with; 1
    where this was not measured."""

    notes: tuple[str, ...] = ()
    """Where settings come from that are not the paper's, and what else to know."""

    paper: Mapping[OptimizerName, PaperNumber] = field(default_factory=dict)
    """The paper's results."""

    paper_is_best_epoch: bool = False
    """Whether these are of the epoch that was best on the test set, rather than of the final weights."""

    needs_no_data: bool = False
    """Whether the data comes with a package."""

    load: Callable[[SettingsT, Place], Task[Any]]
    """Reads the data and gives the task. Raises :class:`adahessian.lab.data.errors.DataError`."""

    @property
    def economical(self) -> SettingsT:
        """AdaHessian's settings for little curvature."""
        return economized(self.defaults["adahessian"], noise=self.slice_noise)

    @property
    def economies(self) -> dict[str, Any]:
        """Those of them that are not AdaHessian's own."""
        own, cheaper = asdict(self.defaults["adahessian"]), asdict(self.economical)
        return {name: value for name, value in cheaper.items() if value != own[name]}

    def label(self, optimizer: OptimizerName, settings: SettingsT) -> str:
        """What a run is called."""
        return label(optimizer, settings, self.defaults[optimizer], self.economies)
