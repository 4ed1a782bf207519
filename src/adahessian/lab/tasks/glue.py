"""Fine-tuning of a pre-trained SqueezeBERT, or another BERT, on GLUE."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from adahessian.lab.configs.glue import GlueConfig
from adahessian.lab.data.glue import FORMATS, Texts, read_sentences, tokenize
from adahessian.lab.errors import DataError
from adahessian.lab.models.bert import load_classifier, load_tokenizer
from adahessian.lab.tasks.task import Env, ExampleTask, split_holdout, to_device

SentenceBatch = dict[str, Tensor]


class GlueTask(ExampleTask[SentenceBatch]):
    """A dataset of GLUE, whose batches are tokenized when they are needed."""

    def __init__(self, config: GlueConfig, env: Env) -> None:
        inside, elsewhere = env.data_dir / config.model, Path(config.model)
        self.checkpoint = inside if inside.is_dir() else elsewhere
        if not self.checkpoint.is_dir():
            raise DataError(f"--model {config.model} is not a folder in {env.data_dir}. Put a checkpoint there.")
        self.tokenizer = load_tokenizer(self.checkpoint, config.max_length)
        self.format, self.test_parts = FORMATS[config.dataset], config.dev_sets
        names = ("train", *self.test_parts)
        self.parts = {name: read_sentences(env.data_dir / "glue", self.format, name) for name in names}
        texts, labels = self.parts["train"]
        kept, held_out = split_holdout(len(texts), config.holdout)
        for name, indices in {"train": kept, "validation": held_out}.items():
            self.parts[name] = [texts[i] for i in indices.tolist()], labels[indices]
        super().__init__(config, env, len(kept))

    def build_model(self) -> nn.Module:
        """Return the pre-trained encoder with a new head."""
        outputs = len(self.format.classes) or 1
        return load_classifier(self.checkpoint, outputs, self.config.dropout).train().to(self.env.device)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[SentenceBatch]:
        """Yield tokens, masks and ``"labels"``."""
        for share in self.shares(epoch, skip):
            yield self.batch(self.parts["train"], share)

    def batch(self, examples: tuple[Texts, Tensor], indices: Tensor) -> SentenceBatch:
        texts, labels = examples
        tokens = tokenize([texts[i] for i in indices.tolist()], self.tokenizer, self.config.max_length)
        return to_device({**tokens, "labels": labels[indices]}, self.env.device)

    def loss(self, model: nn.Module, batch: SentenceBatch) -> Tensor:
        """Return the mean cross entropy, or the mean squared error of the score."""
        logits = _logits(model, batch)
        if self.format.classes:
            return F.cross_entropy(logits, batch["labels"])
        # In torch 2.13 the forward derivative of the gradient of F.mse_loss raises.
        return (logits.squeeze(-1) - batch["labels"]).square().mean()

    def scores(self, model: nn.Module, examples: tuple[Texts, Tensor]) -> dict[str, float]:
        texts, labels = examples
        # Sentences of similar length need little padding.
        order = torch.tensor([sum(map(len, text)) for text in texts]).argsort()
        batches = (self.batch(examples, indices) for indices in order.split(128))
        logits = torch.cat([_logits(model, batch) for batch in batches]).float().cpu()
        return glue_scores(self.config.score.name, logits, labels[order])


def _logits(model: nn.Module, batch: SentenceBatch) -> Tensor:
    logits: Tensor = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
    return logits


def glue_scores(name: str, logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy, accuracy and F1 of class 1, or correlations, in percent. Correlations of constants are 0."""
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import f1_score

    if name == "correlation":
        found, pearson, spearman = logits.reshape(-1).double(), 0.0, 0.0
        if (found != found[0]).any() and found.isfinite().all():
            pearson, spearman = (100 * float(each(found, labels.double()).statistic) for each in (pearsonr, spearmanr))
        return {"pearson": pearson, "spearman": spearman, "correlation": (pearson + spearman) / 2}
    found = logits.argmax(-1)
    accuracy = 100 * (found == labels).double().mean().item()
    if name == "accuracy":
        return {"accuracy": accuracy}
    f1 = 100 * float(f1_score(labels, found, zero_division=0.0))
    return {"accuracy": accuracy, "f1": f1, "accuracy_and_f1": (accuracy + f1) / 2}
