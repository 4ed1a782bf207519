"""Prediction of clicks with DLRM, on Criteo's logs."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from adahessian.lab.configs.recommendation import ClickConfig
from adahessian.lab.data.criteo import CATEGORIES, NUMBERS, Rows, examples, read_log
from adahessian.lab.data.files import find_file
from adahessian.lab.errors import ConfigError
from adahessian.lab.tasks.task import Env, ExampleTask, Tensors, to_device

# Rows that are copied to the device together.
_ROWS_AT_ONCE = 16384


class DLRM(nn.Module):
    """Embeddings of categories and of numbers, their pairwise dot products, and a network on top.

    All columns of categories share one table, so that one lookup serves all of them. Its gradient is sparse.
    """

    def __init__(self, config: ClickConfig) -> None:
        super().__init__()
        buckets, width, rows = config.hash_size + 1, config.embedding_width, CATEGORIES + 1
        self.embeddings = nn.Embedding(CATEGORIES * buckets, width, sparse=True)
        nn.init.uniform_(self.embeddings.weight, -(buckets**-0.5), buckets**-0.5)
        self.bottom = nn.Sequential(*_layers((NUMBERS, *config.bottom_layers, width)))
        pairs = torch.tril_indices(rows, rows, offset=-1)
        self.top = nn.Sequential(*_layers((width + pairs.shape[1], *config.top_layers, 1))[:-1])
        self.first_rows = nn.Buffer(torch.arange(CATEGORIES) * buckets, persistent=False)
        self.pairs = nn.Buffer(pairs[0] * rows + pairs[1], persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Return logits of shape (N,) for numbers of shape (N, 13) and categories of shape (N, 26)."""
        dense = self.bottom(numbers)
        embedded = torch.cat([dense.unsqueeze(1), self.embeddings(categories + self.first_rows)], dim=1)
        products = (embedded @ embedded.mT).flatten(1).index_select(1, self.pairs)
        logits: Tensor = self.top(torch.cat([dense, products], dim=1))
        return logits.squeeze(1)


def _layers(widths: Sequence[int]) -> list[nn.Module]:
    """Return linear layers, each followed by a ReLU, initialized as by DLRM's authors."""
    layers: list[nn.Module] = []
    for width_in, width in pairwise(widths):
        linear = nn.Linear(width_in, width)
        nn.init.normal_(linear.weight, std=(2 / (width_in + width)) ** 0.5)
        nn.init.normal_(linear.bias, std=width**-0.5)
        layers += [linear, nn.ReLU()]
    return layers


class ClickTask(ExampleTask[Tensors]):
    """Criteo's log in its order, with a test on the last day. A batch is (numbers, categories, labels)."""

    def __init__(self, config: ClickConfig, env: Env) -> None:
        rows, test = read_log(find_file(env.data_dir, "criteo", config.file))
        if config.holdout >= len(rows):
            raise ConfigError(f"--holdout {config.holdout} is invalid. Pass fewer than {len(rows)}.")
        super().__init__(config, env, len(rows) - config.holdout)
        self.parts = {"training": rows[: self.count], "validation": rows[self.count :], "test": test}

    def build_model(self) -> nn.Module:
        return DLRM(self.config).to(self.env.device)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Tensors]:
        """Yield the rows of the first six days, in every epoch in the order of the log."""
        size = self.config.batch_size
        rows = self.parts["training"][skip * size : self.steps_per_epoch * size]
        for found in self._examples(rows, max(1, _ROWS_AT_ONCE // size) * size):
            for batch in zip(*(tensor.split(size) for tensor in found), strict=True):
                yield tuple(map(self.env.my_share, batch))

    def loss(self, model: nn.Module, batch: Tensors) -> Tensor:
        numbers, categories, labels = batch
        return F.binary_cross_entropy_with_logits(model(numbers, categories), labels)

    def scores(self, model: nn.Module, examples: Rows) -> dict[str, float]:
        batches = self._examples(examples, _ROWS_AT_ONCE)
        found = [(model(numbers, categories).float().cpu(), labels.cpu()) for numbers, categories, labels in batches]
        return click_scores(*map(torch.cat, zip(*found, strict=True)))

    def _examples(self, rows: Rows, count: int) -> Iterator[Tensors]:
        """Yield ``count`` rows at a time, and the rest."""
        for first in range(0, len(rows), count):
            yield to_device(examples(rows[first : first + count], self.config.hash_size), self.env.device)


def click_scores(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy in percent, area under the ROC curve (NaN if undefined), and log loss in nats."""
    from sklearn.metrics import roc_auc_score

    can_rank = bool((labels != labels[0]).any() and logits.isfinite().all())
    return {
        "accuracy": 100 * ((logits > 0) == labels.bool()).double().mean().item(),
        "auc": float(roc_auc_score(labels, logits)) if can_rank else math.nan,
        "log_loss": F.binary_cross_entropy_with_logits(logits.double(), labels.double()).item(),
    }
