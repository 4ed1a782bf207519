"""Three small tasks on real data, on which the study of learning rates trains: two networks on digits, one on text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adahessian.lab.digits import BATCH_SIZE, Batch, Examples, small_network, training_and_test_examples
from adahessian.lab.models.gpt import GPT

TaskName = Literal["digits-mlp", "digits-conv", "text"]
TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)

HELD_OUT_DIGITS = 297
TEXT_BATCH, TEXT_LENGTH, HELD_OUT_TEXTS = 8, 32, 256


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, on what, and for how long."""

    name: TaskName

    make_model: Callable[[], nn.Module]
    """Makes the network, its weights drawn from torch's own random stream."""

    batches: Callable[[torch.Generator], Iterator[Batch]]
    """An endless stream of batches, in an order that the generator decides."""

    held_out: Batch
    """What a trained network is judged on."""

    steps: int
    """Length of a run."""

    def model(self, seed: int) -> nn.Module:
        """The network that every run of a seed begins with."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_model()

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module) -> float:
        """The mean loss on what was held out, in eval mode. The model is left in train mode."""
        model.eval()
        loss = mean_loss(model, self.held_out).item()
        model.train()
        return loss


def task_named(name: TaskName, data_dir: Path | None) -> Task:
    """Get a task ready.

    Args:
        name: Which one.
        data_dir: The folder with ``ptb/ptb.train.txt`` and ``ptb/ptb.valid.txt``. The digits need none.

    Raises:
        FileNotFoundError: If there is no text.
    """
    if name == "digits-mlp":
        return _digits(name, multilayer_perceptron)
    if name == "digits-conv":
        return _digits(name, small_network)
    if data_dir is None or not (data_dir / "ptb" / "ptb.train.txt").is_file():
        raise FileNotFoundError(f"the text needs ptb/ptb.train.txt and ptb/ptb.valid.txt in --data-dir, now {data_dir}")
    return _text(data_dir / "ptb")


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy, the mean over all that is predicted: one digit an image, one character a position."""
    inputs, targets = batch
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def multilayer_perceptron() -> nn.Sequential:
    """Two hidden layers for images of 8 x 8 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _digits(name: TaskName, make_model: Callable[[], nn.Module]) -> Task:
    # From the training digits only: those that the demo tests on decide nothing.
    examples, _ = training_and_test_examples()
    train, held_out = train_test_split(
        range(len(examples)), test_size=HELD_OUT_DIGITS, stratify=examples.labels, random_state=0
    )
    training, rest = examples.take(torch.as_tensor(train)), examples.take(torch.as_tensor(held_out))
    return Task(
        name=name,
        make_model=make_model,
        batches=lambda generator: _shuffled(training, generator),
        held_out=(rest.images, rest.labels),
        steps=150,
    )


def _shuffled(examples: Examples, generator: torch.Generator) -> Iterator[Batch]:
    """Batches, epoch after epoch; the incomplete last one of each is left out."""
    while True:
        order = torch.randperm(len(examples), generator=generator)
        for chosen in order.split(BATCH_SIZE)[: len(order) // BATCH_SIZE]:
            yield examples.images[chosen], examples.labels[chosen]


def _text(folder: Path) -> Task:
    """The next character of the Penn Treebank."""
    texts = [(folder / f"ptb.{part}.txt").read_text() for part in ("train", "valid")]
    number = {character: i for i, character in enumerate(sorted(set("".join(texts))))}
    training, validation = (torch.tensor([number[character] for character in text]) for text in texts)
    starts = torch.arange(HELD_OUT_TEXTS) * (len(validation) // HELD_OUT_TEXTS - 1)
    return Task(
        name="text",
        make_model=lambda: GPT(layers=1, width=64, heads=4, vocabulary=len(number), context=TEXT_LENGTH),
        batches=lambda generator: _excerpts(training, generator),
        held_out=_excerpts_at(validation, starts),
        steps=150,
    )


def _excerpts(text: Tensor, generator: torch.Generator) -> Iterator[Batch]:
    while True:
        yield _excerpts_at(text, torch.randint(len(text) - TEXT_LENGTH, (TEXT_BATCH,), generator=generator))


def _excerpts_at(text: Tensor, starts: Tensor) -> Batch:
    """Excerpts that begin at these characters, and the same one character later."""
    places = starts[:, None] + torch.arange(TEXT_LENGTH + 1)
    return text[places][:, :-1], text[places][:, 1:]
