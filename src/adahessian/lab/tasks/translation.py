"""Translation: Transformers on IWSLT14 and WMT14, as in the paper, and on Multi30k and Tatoeba."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from adahessian.lab.configs.translation import TranslationConfig
from adahessian.lab.data.parallel_text import Pairs, ParallelText, read_folder, read_tatoeba
from adahessian.lab.data.token_batches import PADDING, PairBatch, Sentences, TokenBatches
from adahessian.lab.errors import ConfigError
from adahessian.lab.models.beam_search import beam_search
from adahessian.lab.models.transformer import Decoding, Transformer
from adahessian.lab.tasks.metrics import bleu
from adahessian.lab.tasks.task import Env, Task, to_device

# Most tokens of a batch in evaluation, which bounds memory.
EVALUATED_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """How to read a text, and how to compare its translations."""

    folder: str
    """Folder below the data folder in which the files are looked for first."""

    read: Callable[[Path], ParallelText]
    language: str
    """Language of the translations."""

    tokenized: bool = False
    """Whether Moses put spaces between words and punctuation."""

    lowercase: bool = False
    """Whether BLEU ignores case."""


_TO_ENGLISH = partial(read_folder, source="de", target="en")
_TO_GERMAN = partial(read_folder, source="en", target="de")
CORPORA = {
    "iwslt14": Corpus(folder="iwslt14", read=_TO_ENGLISH, language="en", tokenized=True, lowercase=True),
    "wmt14": Corpus(folder="wmt14", read=_TO_GERMAN, language="de", tokenized=True),
    "multi30k": Corpus(folder="multi30k", read=_TO_ENGLISH, language="en"),
    "tatoeba": Corpus(folder="tatoeba-deu-eng", read=read_tatoeba, language="en"),
}


def load(config: TranslationConfig, env: Env) -> Translation:
    """Read the text, and learn its subwords or load them from the cache.

    Raises:
        ConfigError: If the text gives no training batch.
        DataError: If a file is missing or damaged.
    """
    return Translation(config, env)


class Translation(Task[PairBatch]):
    """Training on sentence pairs, validation by their loss, and a test by BLEU."""

    def __init__(self, config: TranslationConfig, env: Env) -> None:
        from adahessian.lab.data.subwords import Subwords

        self.config, self.env, self.corpus = config, env, CORPORA[config.corpus]
        folder = env.data_dir / self.corpus.folder
        text = self.corpus.read(folder if folder.is_dir() else env.data_dir)
        sides = [text.training.source, text.training.target]
        self.subwords = Subwords(sides, config.vocabulary, tokenized=self.corpus.tokenized)
        self.training = TokenBatches(*self._encode(text.training, config.max_sentence), config.batch_size, env)
        self.validation = TokenBatches(*self._encode(text.validation), EVALUATED_TOKENS)
        self.test = TokenBatches(*self._encode(text.test), EVALUATED_TOKENS)
        self.references = text.test.target
        self.steps_per_epoch = len(self.training)
        if not len(self.training):
            raise ConfigError(
                f"--max-sentence {config.max_sentence} and --batch-size {config.batch_size} leave none of "
                f"{len(text.training):,} training pairs for {env.world_size} processes. Increase one of them."
            )

    def build_model(self) -> Transformer:
        """Return a new Transformer."""
        config = self.config
        return Transformer(
            len(self.subwords),
            layers=config.layers,
            width=config.width,
            feed_forward=config.feed_forward,
            heads=config.heads,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            activation_dropout=config.activation_dropout,
        ).to(self.env.device)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[PairBatch]:
        """Yield batches of pairs of about the same length."""
        return map(self._on_device, self.training.epoch(epoch, skip))

    def loss(self, model: nn.Module, batch: PairBatch) -> Tensor:
        """Return the cross entropy with smoothed labels, the mean over all tokens except padding."""
        return _token_loss(model, batch, label_smoothing=self.config.label_smoothing)

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return loss (nats per token, without label smoothing) and perplexity. BLEU is part of the final test."""
        metrics = self._losses(model, "valid", self.validation)
        if final:
            corpus = self.corpus
            metrics |= bleu(
                self.translate(model),
                self.references,
                tokenized=corpus.tokenized,
                lowercase=corpus.lowercase,
                language=corpus.language,
            )
            metrics |= self._losses(model, "test", self.test)
        return metrics

    def translate(self, model: nn.Module) -> list[str]:
        """Translate the test text by beam search."""
        translations = [""] * len(self.references)
        for indices, batch in self.test.in_order():
            source = batch[0].to(self.env.device)
            # Long enough for any correct translation, and an end to endless ones.
            limits = 2 * (source != PADDING).sum(1) + 10
            sentences, _ = beam_search(
                Decoding(cast(Transformer, model), source),
                limits,
                beam_size=self.config.beam_size,
                length_penalty=self.config.length_penalty,
            )
            for index, translation in zip(indices.tolist(), self.subwords.decode(sentences), strict=True):
                translations[index] = translation
        return translations

    def _losses(self, model: nn.Module, part: str, batches: TokenBatches) -> dict[str, float]:
        total, tokens = torch.zeros((), device=self.env.device), 0
        for _, batch in batches.in_order():
            count = int((batch[2] != PADDING).sum())
            total += count * _token_loss(model, self._on_device(batch))
            tokens += count
        loss = total.item() / tokens
        return {f"{part}_loss": loss, f"{part}_perplexity": math.exp(loss) if loss < 700 else math.inf}

    def _encode(self, pairs: Pairs, longest: int | None = None) -> tuple[Sentences, Sentences]:
        sides = self.subwords.encode(pairs.source), self.subwords.encode(pairs.target)
        if longest is not None:
            kept = [pair for pair in zip(*sides, strict=True) if max(map(len, pair)) <= longest]
            sides = [source for source, _ in kept], [target for _, target in kept]
        return Sentences(sides[0]), Sentences(sides[1])

    def _on_device(self, batch: PairBatch) -> PairBatch:
        source, read, target = (to_device(part, self.env.device) for part in batch)
        return source, read, target


def _token_loss(model: nn.Module, batch: PairBatch, label_smoothing: float = 0.0) -> Tensor:
    source, read, target = batch
    logits = model(source, read).flatten(0, 1)
    return F.cross_entropy(logits, target.flatten(), ignore_index=PADDING, label_smoothing=label_smoothing)
