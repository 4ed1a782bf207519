"""Prediction of clicks with DLRM, on Criteo's logs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from adahessian.lab.configs.recommendation import ClickConfig
from adahessian.lab.data.criteo import read_log
from adahessian.lab.data.files import find_file
from adahessian.lab.errors import ConfigError
from adahessian.lab.models.dlrm import DLRM
from adahessian.lab.tasks.metrics import click_scores
from adahessian.lab.tasks.task import Env, Task, to_device

ClickBatch = tuple[Tensor, Tensor, Tensor]

# Rows that are copied to the device together.
_ROWS_AT_ONCE = 16384


def load(config: ClickConfig, env: Env) -> ClickTask:
    """Return the task.

    Raises:
        ConfigError: If the holdout leaves nothing to train on.
        DataError: If the log is missing or damaged.
    """
    return ClickTask(config, env)


class ClickTask(Task[ClickBatch]):
    """Criteo's log in its order: six days to train on, and the last one to test on."""

    def __init__(self, config: ClickConfig, env: Env) -> None:
        self._config, self._env = config, env
        self._log = read_log(find_file(env.data_dir, "criteo", config.file))
        self._validation = range(self._log.training_rows - config.holdout, self._log.training_rows)
        self._training_rows = self._validation.start
        if self._training_rows < 1:
            raise ConfigError(f"--holdout {config.holdout} is invalid. Pass fewer than {self._log.training_rows}.")
        whole, rest = divmod(self._training_rows, config.batch_size)
        # Every rank needs a part of the last batch.
        self.steps_per_epoch = whole + (rest >= env.world_size)

    def build_model(self) -> nn.Module:
        """Return a new DLRM."""
        config = self._config
        model = DLRM(
            categories=config.hash_size + 1,
            width=config.embedding_width,
            bottom=config.bottom_layers,
            top=config.top_layers,
        )
        return model.train().to(self._env.device)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[ClickBatch]:
        """Yield the rows of the first six days, in every epoch in the order of the log."""
        size = self._config.batch_size
        steps_at_once = max(1, _ROWS_AT_ONCE // size)
        for first in range(skip, self.steps_per_epoch, steps_at_once):
            last = min(first + steps_at_once, self.steps_per_epoch)
            examples = self._examples(first * size, min(last * size, self._training_rows))
            for batch in zip(*(tensor.split(size) for tensor in examples), strict=True):
                numbers, categories, labels = map(self._env.my_share, batch)
                yield numbers, categories, labels

    def loss(self, model: nn.Module, batch: ClickBatch) -> Tensor:
        """Return the mean binary cross entropy."""
        numbers, categories, labels = batch
        return F.binary_cross_entropy_with_logits(model(numbers, categories), labels)

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return the scores on the held-out rows, or on the last day."""
        sets = {"validation": self._validation} if self._config.holdout else {}
        if final or not sets:
            sets["test"] = range(self._log.training_rows, len(self._log.rows))
        scores = {}
        for name, rows in sets.items():
            logits, labels = [], []
            for begin in range(rows.start, rows.stop, _ROWS_AT_ONCE):
                numbers, categories, clicked = self._examples(begin, min(begin + _ROWS_AT_ONCE, rows.stop))
                logits.append(model(numbers, categories).float().cpu())
                labels.append(clicked.cpu())
            found = click_scores(torch.cat(logits), torch.cat(labels))
            scores.update({f"{name}_{key}": value for key, value in found.items()})
        return scores

    def _examples(self, begin: int, end: int) -> ClickBatch:
        device = self._env.device
        numbers, categories, labels = self._log.examples(begin, end, self._config.hash_size)
        return to_device(numbers, device), to_device(categories, device), to_device(labels, device)
