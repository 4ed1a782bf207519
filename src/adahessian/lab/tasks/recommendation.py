"""Prediction of clicks with DLRM, on Criteo's logs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from adahessian.lab.configs.recommendation import ClickConfig
from adahessian.lab.data.criteo import read_log
from adahessian.lab.data.files import find_file
from adahessian.lab.errors import ConfigError
from adahessian.lab.models.dlrm import DLRM
from adahessian.lab.tasks.task import Env, ExampleTask, Tensors, to_device

# Rows that are copied to the device together.
_ROWS_AT_ONCE = 16384


class ClickTask(ExampleTask[Tensors]):
    """Criteo's log in its order: six days to train on, and the last one to test on.

    A batch is (numbers, categories, labels).
    """

    def __init__(self, config: ClickConfig, env: Env) -> None:
        self.log = read_log(find_file(env.data_dir, "criteo", config.file))
        rows = self.log.training_rows
        if config.holdout >= rows:
            raise ConfigError(f"--holdout {config.holdout} is invalid. Pass fewer than {rows}.")
        super().__init__(config, env, rows - config.holdout)
        self.parts = {"validation": range(self.count, rows), "test": range(rows, len(self.log.rows))}

    def build_model(self) -> nn.Module:
        """Return a new DLRM."""
        config = self.config
        sizes = {"categories": config.hash_size + 1, "width": config.embedding_width}
        return DLRM(**sizes, bottom=config.bottom_layers, top=config.top_layers).train().to(self.env.device)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Tensors]:
        """Yield the rows of the first six days, in every epoch in the order of the log."""
        size = self.config.batch_size
        end = min(self.steps_per_epoch * size, self.count)
        for examples in self._examples(range(skip * size, end), max(1, _ROWS_AT_ONCE // size) * size):
            for batch in zip(*(tensor.split(size) for tensor in examples), strict=True):
                yield tuple(map(self.env.my_share, batch))

    def loss(self, model: nn.Module, batch: Tensors) -> Tensor:
        """Return the mean binary cross entropy."""
        numbers, categories, labels = batch
        return F.binary_cross_entropy_with_logits(model(numbers, categories), labels)

    def scores(self, model: nn.Module, examples: range) -> dict[str, float]:
        """Return accuracy, AUC and log loss of some rows."""
        batches = self._examples(examples, _ROWS_AT_ONCE)
        found = [(model(numbers, categories).float().cpu(), labels.cpu()) for numbers, categories, labels in batches]
        logits, labels = map(torch.cat, zip(*found, strict=True))
        return click_scores(logits, labels)

    def _examples(self, rows: range, count: int) -> Iterator[Tensors]:
        """Yield ``count`` rows at a time, and the rest."""
        for first in range(rows.start, rows.stop, count):
            examples = self.log.examples(first, min(first + count, rows.stop), self.config.hash_size)
            yield to_device(examples, self.env.device)


def click_scores(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy in percent, area under the ROC curve (NaN if undefined), and log loss in nats."""
    from sklearn.metrics import roc_auc_score

    can_rank = bool((labels != labels[0]).any() and logits.isfinite().all())
    return {
        "accuracy": 100 * ((logits > 0) == labels.bool()).double().mean().item(),
        "auc": float(roc_auc_score(labels, logits)) if can_rank else math.nan,
        "log_loss": F.binary_cross_entropy_with_logits(logits.double(), labels.double()).item(),
    }
