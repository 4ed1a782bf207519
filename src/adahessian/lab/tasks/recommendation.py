"""Predicting clicks with DLRM on Criteo's logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from adahessian.lab.data.transfer import sent
from adahessian.lab.models.dlrm import DLRM
from adahessian.lab.settings import OptimizerName, Settings
from adahessian.lab.tasks.task import Experiment, Metric, PaperNumber, Place, Task

ClickBatch = tuple[Tensor, Tensor, Tensor]

# Rows that go to the device together.
_ROWS_AT_ONCE = 16384


@dataclass(frozen=True, kw_only=True)
class RecommendationSettings(Settings):
    """What DLRM has besides."""

    file: str = "train.txt"
    """The log, in the data folder or in its folder criteo."""

    embedding_width: int = 16
    """Size of an embedding."""

    hash_size: int = 1_000_000
    """Buckets of a column of categories; empty categories have one more."""

    embedding_lr: float = 0.01
    """Learning rate of Adagrad, which trains the embeddings beside AdaHessian."""

    bottom_layers: tuple[int, ...] = (512, 256, 64)
    """Hidden layers of the network that embeds the numbers."""

    top_layers: tuple[int, ...] = (512, 256)
    """Hidden layers of the network that predicts."""


class ClickTask(Task[ClickBatch]):
    """Criteo's log, in its order: six days to train on, and one to test on.

    Args:
        settings: All that decides the run.
        place: Where it runs.

    Raises:
        DataError: If the log is missing, or not as it should be.
    """

    def __init__(self, settings: RecommendationSettings, place: Place) -> None:
        from adahessian.lab.data.criteo import find_log, read_log

        self._settings = settings
        self._place = place
        self._log = read_log(find_log(settings.file, place.data_dir))
        whole, rest = divmod(self._log.training_rows, settings.batch_size)
        # Every process needs a part of the last batch.
        self.steps_per_epoch = whole + (rest >= place.share.ranks)

    def make_model(self) -> nn.Module:
        """A new DLRM."""
        settings = self._settings
        model = DLRM(
            categories=settings.hash_size + 1,
            width=settings.embedding_width,
            bottom=settings.bottom_layers,
            top=settings.top_layers,
        )
        return model.train().to(self._place.device)

    def batches(self, epoch: int, start: int = 0) -> Iterator[ClickBatch]:
        """The rows of the first six days, in every epoch in the order of the log."""
        size, rows = self._settings.batch_size, self._log.training_rows
        steps_at_once = max(1, _ROWS_AT_ONCE // size)
        for first in range(start, self.steps_per_epoch, steps_at_once):
            last = min(first + steps_at_once, self.steps_per_epoch)
            examples = self._examples(first * size, min(last * size, rows))
            for batch in zip(*(tensor.split(size) for tensor in examples), strict=True):
                numbers, categories, labels = map(self._place.share.of, batch)
                yield numbers, categories, labels

    def loss(self, model: nn.Module, batch: ClickBatch) -> Tensor:
        """Mean binary cross entropy."""
        numbers, categories, labels = batch
        return F.binary_cross_entropy_with_logits(model(numbers, categories), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Scores on the last day."""
        from adahessian.lab.click_metrics import click_scores

        logits, labels = [], []
        end = len(self._log.rows)
        for begin in range(self._log.training_rows, end, _ROWS_AT_ONCE):
            numbers, categories, clicked = self._examples(begin, min(begin + _ROWS_AT_ONCE, end))
            logits.append(model(numbers, categories).float().cpu())
            labels.append(clicked.cpu())
        scores = click_scores(torch.cat(logits), torch.cat(labels))
        return {f"test_{name}": value for name, value in scores.items()}

    def _examples(self, begin: int, end: int) -> ClickBatch:
        numbers, categories, labels = self._log.examples(begin, end, self._settings.hash_size)
        device = self._place.device
        return sent(numbers, device), sent(categories, device), sent(labels, device)


_ADAGRAD = RecommendationSettings(epochs=1, batch_size=128, lr=0.01, eps=1e-10)

_DEFAULTS: Mapping[OptimizerName, RecommendationSettings] = {
    "adahessian": replace(_ADAGRAD, lr=0.043, betas=(0.9, 0.98), eps=1e-4, hessian_power=0.5),
    "adagrad": _ADAGRAD,
    "sgd": replace(_ADAGRAD, lr=0.1),
}

_ACCURACY = Metric(name="test_accuracy", title="test accuracy, %", digits=3)

EXPERIMENTS: tuple[Experiment[RecommendationSettings], ...] = (
    Experiment(
        name="criteo-dlrm",
        title="DLRM on Criteo's click logs",
        data="train.txt of Criteo's Kaggle challenge, or criteo/train.txt",
        curve=_ACCURACY,
        metric=_ACCURACY,
        others=(
            Metric(name="test_auc", title="AUC", digits=4),
            Metric(name="test_log_loss", title="log loss", higher_is_better=False, digits=4),
        ),
        defaults=_DEFAULTS,
        notes=(
            "AdaHessian trains the layers, Adagrad the embeddings, as in the paper.",
            "Categories are hashed, a million buckets a column. DLRM's own tables have a row for each category, ten "
            "million in the largest column.",
            "Rows are read in the order of the log; whether the paper shuffled them it does not say.",
            "SGD is not in the paper: its learning rate is the one of DLRM's own scripts. Adam, AdamW and RMSprop take "
            "no sparse gradients.",
        ),
        paper={"adagrad": PaperNumber(mean=79.135), "adahessian": PaperNumber(mean=79.167)},
        load=ClickTask,
    ),
)
"""The paper's recommendation task."""
