"""Fine-tuning a pre-trained SqueezeBERT, or another BERT, on the tasks of GLUE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from adahessian.lab.data import glue
from adahessian.lab.data.errors import DataError
from adahessian.lab.data.glue import GlueForm
from adahessian.lab.data.transfer import sent
from adahessian.lab.randomness import generator_for
from adahessian.lab.settings import OptimizerName, Settings
from adahessian.lab.tasks.task import Experiment, Metric, PaperNumber, Place, Task

if TYPE_CHECKING:
    from adahessian.lab.data.glue_tokens import TokenizedSentences

SentenceBatch = dict[str, Tensor]
MetricName = Literal["accuracy", "accuracy_and_f1", "correlation"]

_EVALUATION_BATCH = 128


@dataclass(frozen=True, kw_only=True)
class GlueSettings(Settings):
    """What fine-tuning has besides."""

    model: str = "squeezebert"
    """Folder of the pre-trained checkpoint, with config.json, vocab.txt and weights: in the data folder, or a path."""

    max_length: int = 128
    """Tokens that are left of an example."""

    dropout: float = 0.1
    """Share of activations that are dropped, in the encoder and before the classifier."""


class GlueTask(Task[SentenceBatch]):
    """A task of GLUE with its sentences as tokens.

    Args:
        settings: All that decides the run.
        place: Where it runs.
        form: How the task's files are laid out.
        metric: What it is scored by.

    Raises:
        DataError: If the data or the checkpoint is missing, or not as it should be.
    """

    def __init__(self, settings: GlueSettings, place: Place, form: GlueForm, metric: MetricName) -> None:
        from adahessian.lab.data.glue_tokens import read_tokenizer, tokenize
        from adahessian.lab.models.sentence_classifier import read_config

        self._settings = settings
        self._place = place
        self._form = form
        self._metric = metric
        self._checkpoint = find_checkpoint(settings.model, place.data_dir)
        config = read_config(self._checkpoint)
        tokenizer = read_tokenizer(self._checkpoint, settings.max_length)
        if (words := tokenizer.get_vocab_size()) > config.vocab_size:
            raise DataError(
                f"{self._checkpoint}: vocab.txt has {words} tokens, but the model of config.json knows "
                f"{config.vocab_size}: take both from one checkpoint"
            )
        if settings.max_length > config.max_position_embeddings:
            raise DataError(
                f"{self._checkpoint}: the model reads {config.max_position_embeddings} tokens at the most, but "
                f"max_length is {settings.max_length}: take a smaller one"
            )
        folder = place.data_dir / "glue"
        self._training = tokenize(glue.read_sentences(folder, form, "train"), tokenizer)
        self._dev = {name: tokenize(glue.read_sentences(folder, form, name), tokenizer) for name in form.dev}
        whole, rest = divmod(len(self._training), settings.batch_size)
        # Every process needs a part of the last batch.
        self.steps_per_epoch = whole + (rest >= place.share.ranks)

    def make_model(self) -> nn.Module:
        """The pre-trained encoder with a new head."""
        from adahessian.lab.models.sentence_classifier import SentenceClassifier

        outputs = len(self._form.classes) or 1
        return SentenceClassifier(self._checkpoint, outputs, self._settings.dropout).train().to(self._place.device)

    def batches(self, epoch: int, start: int = 0) -> Iterator[SentenceBatch]:
        """The training examples, in another order each epoch."""
        order = torch.randperm(len(self._training), generator=generator_for("order", self._place.seed, epoch))
        size = self._settings.batch_size
        for step in range(start, self.steps_per_epoch):
            yield self._batch(self._training, self._place.share.of(order[step * size : (step + 1) * size]))

    def loss(self, model: nn.Module, batch: SentenceBatch) -> Tensor:
        """Mean cross entropy, or mean squared error of the score."""
        logits = _logits(model, batch)
        if self._form.classes:
            return F.cross_entropy(logits, batch["labels"])
        # In torch 2.13 the forward derivative of the gradient of F.mse_loss raises.
        return (logits.squeeze(-1) - batch["labels"]).square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The task's scores on each of its development sets."""
        from adahessian.lab import glue_metrics

        score = getattr(glue_metrics, self._metric)
        found: dict[str, float] = {}
        for name, examples in self._dev.items():
            # Sorted by length, so that little is padding.
            lengths = torch.tensor(examples.starts).diff()
            batches = [self._batch(examples, part) for part in lengths.argsort().split(_EVALUATION_BATCH)]
            logits = torch.cat([_logits(model, batch) for batch in batches]).float().cpu()
            labels = torch.cat([batch["labels"] for batch in batches]).cpu()
            found.update({f"{name}_{key}": value for key, value in score(logits, labels).items()})
        return found

    def _batch(self, examples: TokenizedSentences, numbers: Tensor) -> SentenceBatch:
        batch = examples.batch(numbers, self._settings.max_length)
        return {name: sent(tensor, self._place.device) for name, tensor in batch.items()}


def _logits(model: nn.Module, batch: SentenceBatch) -> Tensor:
    logits: Tensor = model(batch["tokens"], batch["types"], batch["mask"])
    return logits


def find_checkpoint(model: str, data_dir: Path) -> Path:
    """The folder of a checkpoint: in the data folder, or else anywhere.

    Raises:
        DataError: If there is neither.
    """
    for folder in (data_dir / model, Path(model)):
        if folder.is_dir():
            return folder
    raise DataError(
        f"no folder {model} in {data_dir}, and none of that path: put the checkpoint there (config.json, vocab.txt and "
        "weights), or name another folder as the model"
    )


def _defaults(*, lr: float, epochs: int) -> Mapping[OptimizerName, GlueSettings]:
    adamw = GlueSettings(epochs=epochs, batch_size=16, lr=2e-5, schedule="linear")
    return {
        "adahessian": replace(adamw, lr=lr, eps=1e-4, block_size=4),
        "adamw": adamw,
        "adam": adamw,
        "sgd": replace(adamw, lr=1e-2, momentum=0.9),
        "adagrad": replace(adamw, lr=1e-3, eps=1e-10),
        "rmsprop": replace(adamw, betas=(0.9, 0.99)),
    }


_NOTES = (
    "Learning rates and dropout were searched in the paper, and are not given. AdaHessian's learning rate, the linear "
    "schedule and the epochs are those of a later paper that ran it again; dropout .1 is BERT's own.",
    "The learning rates of the other optimizers are ours: AdamW's is the one BERT is most often fine-tuned with, and "
    "none of them was searched. No weight decay.",
    "The paper fine-tunes SqueezeBERT after it was fine-tuned on MNLI. Give a checkpoint of that kind to do the same; "
    "of a checkpoint the encoder is taken, never its classifier.",
)
_F1_NOTE = (
    "The paper does not say which number it reports of this task. It is taken for the mean of accuracy and F1, as in "
    "GLUE's own score; both are reported beside it."
)


# What each metric is made of.
_PARTS: dict[MetricName, dict[str, str]] = {
    "accuracy": {"accuracy": "accuracy"},
    "accuracy_and_f1": {"accuracy": "accuracy", "f1": "F1"},
    "correlation": {"pearson": "Pearson", "spearman": "Spearman"},
}


def _experiment(
    form: GlueForm,
    *,
    name: str,
    metric: MetricName = "accuracy",
    lr: float = 1e-3,
    epochs: int = 5,
    adamw: float,
    adahessian: float,
    notes: tuple[str, ...] = (),
) -> Experiment[GlueSettings]:
    meaning = {
        "accuracy": "accuracy, %",
        "accuracy_and_f1": "mean of accuracy and F1, %",
        "correlation": "mean of Pearson and Spearman correlation, %",
    }[metric]
    dev = form.dev[0]
    reported = Metric(name=f"{dev}_{metric}", title=f"{dev.replace('_', ' ')} {meaning}")
    files = ", ".join(f"{file}.tsv" for file in ("train", *form.dev))
    return Experiment(
        name=f"glue-{name}",
        title=f"Fine-tuning on {form.folder}",
        data=f"glue/{form.folder} with {files} as GLUE publishes them, and the folder of the pre-trained model",
        curve=reported,
        metric=reported,
        others=tuple(
            Metric(name=f"{part}_{key}", title=f"{part.replace('_', ' ')} {title}, %")
            for part in form.dev
            for key, title in _PARTS[metric].items()
            if f"{part}_{key}" != reported.name
        ),
        defaults=_defaults(lr=lr, epochs=epochs),
        notes=(*notes, *_NOTES),
        paper={"adamw": PaperNumber(mean=adamw), "adahessian": PaperNumber(mean=adahessian)},
        load=lambda settings, place: GlueTask(settings, place, form, metric),
    )


EXPERIMENTS: tuple[Experiment[GlueSettings], ...] = (
    _experiment(glue.RTE, name="rte", epochs=10, adamw=79.06, adahessian=80.14),
    _experiment(
        glue.MRPC,
        name="mrpc",
        metric="accuracy_and_f1",
        lr=1e-2,
        adamw=90.69,
        adahessian=91.94,
        notes=(_F1_NOTE,),
    ),
    _experiment(
        glue.STSB,
        name="stsb",
        metric="correlation",
        adamw=90.00,
        adahessian=90.59,
        notes=("No learning rate of AdaHessian is given anywhere for this task: 1e-3, as for most others.",),
    ),
    _experiment(glue.SST2, name="sst2", adamw=91.28, adahessian=91.17),
    _experiment(glue.QNLI, name="qnli", adamw=90.30, adahessian=89.97),
    _experiment(
        glue.QQP, name="qqp", metric="accuracy_and_f1", lr=1e-2, adamw=89.49, adahessian=89.33, notes=(_F1_NOTE,)
    ),
    _experiment(
        glue.MNLI,
        name="mnli",
        adamw=82.61,
        adahessian=82.78,
        notes=(
            "The table has the accuracy on the matched set. That on the mismatched set is reported as "
            "dev_mismatched_accuracy; the paper's are 81.84 with AdamW and 82.62 with AdaHessian.",
        ),
    ),
)
"""The paper's seven datasets, with eight results: MNLI has two development sets."""
