"""Handwritten digits, a small network, and one training run of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

import adahessian
from adahessian.lab.contenders import Contender

Batch: TypeAlias = tuple[Tensor, Tensor]

BATCH_SIZE = 64
TEST_SIZE = 500
# The length of run that the learning rates of the contenders were searched for.
EPOCHS = 10


@dataclass(frozen=True)
class Examples:
    """Images of shape (n, 1, 8, 8) from 0 to 1, and their digits."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Examples:
        """The examples at these indices."""
        return Examples(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class Epoch:
    """What is known after an epoch."""

    train_loss: float
    """Mean cross-entropy over all training examples, with the weights at the end of the epoch, in eval mode."""

    accuracy: float
    """Share of the held-out examples that are classified correctly."""

    train_seconds: float
    """Time spent on training steps since the start of the run; evaluation is not counted."""

    steps: int
    """Training steps since the start of the run."""


def training_and_test_examples() -> tuple[Examples, Examples]:
    """The 1,797 digits that scikit-learn carries, in one fixed, stratified split: 1,297 to train and 500 to test."""
    digits = load_digits()
    examples = Examples(
        torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.as_tensor(digits.target)
    )
    train, test = train_test_split(range(len(examples)), test_size=TEST_SIZE, stratify=digits.target, random_state=0)
    return examples.take(torch.as_tensor(train)), examples.take(torch.as_tensor(test))


def small_network() -> nn.Sequential:
    """A tiny network in the manner of the paper's ResNets: 3x3 convolutions, batch norm, average pooling."""
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


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy, the mean over a batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def train(contender: Contender, *, seed: int, training: Examples, held_out: Examples, epochs: int) -> Iterator[Epoch]:
    """Train the network once, epoch by epoch.

    The seed decides the first weights and the order of the data: for one seed, all contenders begin with the same
    weights and see the same batches. The learning rate falls from its start to 0 along half a cosine.

    Args:
        contender: The optimizer.
        seed: Seed of the weights, of the order of the data and of the curvature's probes.
        training: Examples to train on.
        held_out: Examples to measure accuracy on. They have no influence on the training.
        epochs: Passes over the training examples. The incomplete last batch of each is left out.

    Yields:
        What is known after each epoch.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = small_network()
    order = torch.Generator().manual_seed(seed)
    optimizer = contender.optimizer(model, seed=seed)
    curvature = None
    if isinstance(optimizer, adahessian.AdaHessian):
        curvature = adahessian.Curvature(model, mean_loss, optimizer, batch_fraction=contender.batch_fraction)
    batches_per_epoch = len(training) // BATCH_SIZE
    schedule = CosineAnnealingLR(optimizer, T_max=epochs * batches_per_epoch)

    train_seconds = 0.0
    for epoch in range(1, epochs + 1):
        shuffled = training.take(torch.randperm(len(training), generator=order))
        started = time.perf_counter()
        for i in range(batches_per_epoch):
            part = slice(i * BATCH_SIZE, (i + 1) * BATCH_SIZE)
            batch = (shuffled.images[part], shuffled.labels[part])
            if curvature is not None:
                curvature.measure(batch)
            optimizer.zero_grad()
            mean_loss(model, batch).backward()
            optimizer.step()
            schedule.step()
        train_seconds += time.perf_counter() - started
        train_loss, _ = evaluate(model, training)
        _, accuracy = evaluate(model, held_out)
        yield Epoch(train_loss, accuracy, train_seconds, epoch * batches_per_epoch)


@torch.no_grad()
def evaluate(model: nn.Module, examples: Examples) -> tuple[float, float]:
    """Mean loss and accuracy on all examples, in eval mode. The model is left in train mode."""
    model.eval()
    logits = model(examples.images)
    model.train()
    loss = cross_entropy(logits, examples.labels)
    return loss.item(), (logits.argmax(dim=1) == examples.labels).float().mean().item()
