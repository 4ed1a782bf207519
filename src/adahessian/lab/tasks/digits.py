"""Handwritten digits that scikit-learn contains, so that nothing has to be downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adahessian.lab.configs.digits import DigitsConfig
from adahessian.lab.models.mlp import mlp
from adahessian.lab.tasks.task import Env, Task, split_holdout
from adahessian.lab.training.random_streams import random_stream

Examples: TypeAlias = tuple[Tensor, Tensor]

TEST_SIZE = 500


def read_digits() -> tuple[Examples, Examples]:
    """Return 1,297 training and 500 test digits, in one fixed stratified split.

    Images have the shape (N, 1, 8, 8) and values from 0 to 1.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(digits.target)
    split = train_test_split(range(len(labels)), test_size=TEST_SIZE, stratify=digits.target, random_state=0)
    training, test = ((images[part], labels[part]) for part in map(torch.as_tensor, split))
    return training, test


def small_convnet() -> nn.Sequential:
    """Return a small network in the style of the paper's ResNets: convolutions, batch norm and average pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class DigitsTask(Task[Examples]):
    """Classification of digits."""

    def __init__(self, config: DigitsConfig, env: Env) -> None:
        self.config, self.env = config, env
        (images, labels), test = read_digits()
        kept, held_out = split_holdout(len(labels), config.holdout)
        parts = {"training": (images[kept], labels[kept]), "validation": (images[held_out], labels[held_out])}
        self.examples = {name: self._on_device(part) for name, part in {**parts, "test": test}.items()}
        self.steps_per_epoch = len(kept) // config.batch_size

    def _on_device(self, examples: Examples) -> Examples:
        images, labels = examples
        return images.to(self.env.device), labels.to(self.env.device)

    def build_model(self) -> nn.Module:
        """Return a new network."""
        if self.config.network == "conv":
            return small_convnet().to(self.env.device)
        return nn.Sequential(nn.Flatten(), mlp([64, 64, 64, 10])).to(self.env.device)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Examples]:
        """Yield images of shape (N, 1, 8, 8) and labels. The incomplete last batch is left out."""
        images, labels = self.examples["training"]
        order = torch.randperm(len(labels), generator=random_stream("order", self.env.seed, epoch))
        for part in order.to(labels.device).split(self.config.batch_size)[skip : self.steps_per_epoch]:
            indices = self.env.my_share(part)
            yield images[indices], labels[indices]

    def loss(self, model: nn.Module, batch: Examples) -> Tensor:
        """Return the cross-entropy."""
        images, labels = batch
        return cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return accuracy in % and mean loss."""
        found: dict[str, float] = {}
        for name in ["validation"] * (self.config.holdout > 0) + ["test"] * (final or not self.config.holdout):
            images, labels = self.examples[name]
            logits = model(images)
            correct = (logits.argmax(1) == labels).sum()
            correct_count, loss = torch.stack((correct, cross_entropy(logits, labels))).tolist()
            found |= {f"{name}_accuracy": 100 * correct_count / len(labels), f"{name}_loss": loss}
        return found


def load(config: DigitsConfig, env: Env) -> DigitsTask:
    """Return the task."""
    return DigitsTask(config, env)
