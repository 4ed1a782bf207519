"""The handwritten digits that scikit-learn carries: a task that needs no data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adahessian.lab.contenders import CONTENDERS, WEIGHT_DECAY
from adahessian.lab.randomness import generator_for
from adahessian.lab.settings import OptimizerName, Settings
from adahessian.lab.tasks.task import Experiment, Metric, Place, Task

if TYPE_CHECKING:
    from adahessian.lab.digits import Examples

Batch: TypeAlias = tuple[Tensor, Tensor]


class DigitsTask(Task[Batch]):
    """Tells digits apart.

    Args:
        settings: The run's.
        place: Where it runs.
        make_network: Makes the network.
        training: Digits to train on.
        test: Digits to evaluate with.
    """

    def __init__(
        self,
        settings: Settings,
        place: Place,
        *,
        make_network: Callable[[], nn.Module],
        training: Examples,
        test: Examples,
    ) -> None:
        self._batch_size = settings.batch_size
        self._place = place
        self._make_network = make_network
        self._training = training.images.to(place.device), training.labels.to(place.device)
        self._test = test.images.to(place.device), test.labels.to(place.device)
        self.steps_per_epoch = len(training) // settings.batch_size

    def make_model(self) -> nn.Module:
        """A new network."""
        return self._make_network().to(self._place.device)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Images of shape (N, 1, 8, 8) and digits. What is left over of an epoch is left out."""
        images, labels = self._training
        order = torch.randperm(len(labels), generator=generator_for("order", self._place.seed, epoch))
        for part in order.to(labels.device).split(self._batch_size)[start : self.steps_per_epoch]:
            indices = self._place.share.of(part)
            yield images[indices], labels[indices]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy."""
        images, labels = batch
        return cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Share of test digits that are told correctly, in %, and their mean loss."""
        images, labels = self._test
        logits = model(images)
        correct = (logits.argmax(1) == labels).sum()
        correct_count, loss = torch.stack((correct, cross_entropy(logits, labels))).tolist()
        return {"test_accuracy": 100 * correct_count / len(labels), "test_loss": loss}


def _load(settings: Settings, place: Place) -> DigitsTask:
    from adahessian.lab.digits import small_network, training_and_test_examples

    training, test = training_and_test_examples()
    return DigitsTask(settings, place, make_network=small_network, training=training, test=test)


_LRS = {contender.name: contender.lr for contender in CONTENDERS}
# Found as the others were, but among five learning rates each: 0.01 to 1 for Adagrad, 0.001 to 0.1 for RMSprop.
_ADAGRAD_LR = 0.3
_RMSPROP_LR = 0.03


_RUN = Settings(
    epochs=10,
    batch_size=64,
    schedule="cosine",
    # The first epoch: AdaHessian's first steps are the ones at risk. The others have it too, to be treated alike.
    lr_warmup_steps=20,
    lr=_LRS["AdaHessian"],
    weight_decay=WEIGHT_DECAY,
)

_DEFAULTS: dict[OptimizerName, Settings] = {
    "adahessian": replace(_RUN, weight_decay=WEIGHT_DECAY / _LRS["AdaHessian"], eps=1e-4),
    "sgd": replace(_RUN, lr=_LRS["SGD"], momentum=0.9),
    "adam": replace(_RUN, lr=_LRS["Adam"]),
    "adamw": replace(_RUN, lr=_LRS["AdamW"], weight_decay=WEIGHT_DECAY / _LRS["AdamW"]),
    "adagrad": replace(_RUN, lr=_ADAGRAD_LR),
    # Without a bias correction, a slower second beta would make the first steps far too large.
    "rmsprop": replace(_RUN, lr=_RMSPROP_LR, betas=(0.9, 0.99)),
}

_ACCURACY = Metric(name="test_accuracy", title="test accuracy, %")

EXPERIMENTS: tuple[Experiment[Settings], ...] = (
    Experiment(
        name="digits",
        title="A small network on handwritten digits",
        needs_no_data=True,
        data="Nothing: the digits come with scikit-learn.",
        curve=_ACCURACY,
        metric=_ACCURACY,
        defaults=_DEFAULTS,
        slice_noise=2.0,
        notes=(
            "Not in the paper. Network, split and learning rates are those of adahessian demo, which searched them for "
            "runs of ten epochs by cross-validation within the training digits; there without the warm-up that all "
            "optimizers have here.",
            "The learning rates of Adagrad and RMSprop were found in the same way, among fewer.",
        ),
        load=_load,
    ),
)
