"""Fine-tuning of a pre-trained SqueezeBERT, or another BERT, on GLUE."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from adahessian.lab.configs.glue import GlueConfig
from adahessian.lab.data.glue import FORMATS, Texts, read_sentences, tokenize
from adahessian.lab.errors import DataError
from adahessian.lab.models.bert import load_classifier, load_tokenizer
from adahessian.lab.tasks.metrics import GLUE_SCORES
from adahessian.lab.tasks.task import Env, Task, split_holdout, to_device
from adahessian.lab.training.random_streams import random_stream

SentenceBatch = dict[str, Tensor]

_EVALUATION_BATCH = 128


def load(config: GlueConfig, env: Env) -> GlueTask:
    """Return the task.

    Raises:
        ConfigError: If the holdout leaves nothing to train on.
        DataError: If data or checkpoint are missing or damaged.
    """
    return GlueTask(config, env)


class GlueTask(Task[SentenceBatch]):
    """A dataset of GLUE, whose batches are tokenized when they are needed."""

    def __init__(self, config: GlueConfig, env: Env) -> None:
        self._config, self._env = config, env
        self._checkpoint = find_checkpoint(config.model, env.data_dir)
        self._tokenizer = load_tokenizer(self._checkpoint, config.max_length)
        self._format = FORMATS[config.dataset]
        folder = env.data_dir / "glue"
        self._training = read_sentences(folder, self._format, "train")
        self._dev = {name: read_sentences(folder, self._format, name) for name in config.dev_sets}
        self._trained, self._held_out = split_holdout(len(self._training[0]), config.holdout)
        whole, rest = divmod(len(self._trained), config.batch_size)
        # Every rank needs a part of the last batch.
        self.steps_per_epoch = whole + (rest >= env.world_size)

    def build_model(self) -> nn.Module:
        """Return the pre-trained encoder with a new head."""
        outputs = len(self._format.classes) or 1
        return load_classifier(self._checkpoint, outputs, self._config.dropout).train().to(self._env.device)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[SentenceBatch]:
        """Yield the training examples, in another order each epoch."""
        generator = random_stream("order", self._env.seed, epoch)
        order = self._trained[torch.randperm(len(self._trained), generator=generator)]
        size = self._config.batch_size
        for step in range(skip, self.steps_per_epoch):
            yield self._batch(*self._training, self._env.my_share(order[step * size : (step + 1) * size]))

    def loss(self, model: nn.Module, batch: SentenceBatch) -> Tensor:
        """Return the mean cross entropy, or the mean squared error of the score."""
        logits = _logits(model, batch)
        if self._format.classes:
            return F.cross_entropy(logits, batch["labels"])
        # In torch 2.13 the forward derivative of the gradient of F.mse_loss raises.
        return (logits.squeeze(-1) - batch["labels"]).square().mean()

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return the scores on the held-out examples, or on each development set."""
        texts, labels = self._training
        held_out = {"validation": ([texts[i] for i in self._held_out.tolist()], labels[self._held_out])}
        sets = held_out if self._config.holdout else self._dev
        if final:
            sets = {**sets, **self._dev}
        scores = {}
        for name, examples in sets.items():
            found = GLUE_SCORES[self._config.score.name](*self._predict(model, *examples))
            scores.update({f"{name}_{key}": value for key, value in found.items()})
        return scores

    def _predict(self, model: nn.Module, texts: Texts, labels: Tensor) -> tuple[Tensor, Tensor]:
        # Sentences of similar length need little padding.
        order = torch.tensor([sum(map(len, text)) for text in texts]).argsort()
        batches = (self._batch(texts, labels, part) for part in order.split(_EVALUATION_BATCH))
        return torch.cat([_logits(model, batch) for batch in batches]).float().cpu(), labels[order]

    def _batch(self, texts: Texts, labels: Tensor, indices: Tensor) -> SentenceBatch:
        tokens = tokenize([texts[i] for i in indices.tolist()], self._tokenizer, self._config.max_length)
        batch = {**tokens, "labels": labels[indices]}
        return {name: to_device(tensor, self._env.device) for name, tensor in batch.items()}


def _logits(model: nn.Module, batch: SentenceBatch) -> Tensor:
    logits: Tensor = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
    return logits


def find_checkpoint(model: str, data_dir: Path) -> Path:
    """Return the folder of a checkpoint, in the data folder or elsewhere.

    Raises:
        DataError: If it does not exist.
    """
    for folder in (data_dir / model, Path(model)):
        if folder.is_dir():
            return folder
    raise DataError(f"There is no folder {data_dir / model}. Put the checkpoint there, or pass another --model.")
