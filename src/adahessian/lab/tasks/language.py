"""Language modelling: the tensorized transformer on Penn Treebank and WikiText, and an ordinary one beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from adahessian.lab.data.word_text import PTB, WIKITEXT2, WIKITEXT103, TextSource, WordText, read_word_text
from adahessian.lab.models.adaptive_softmax import AdaptiveSoftmax
from adahessian.lab.models.tensorized import MultiLinearAttention
from adahessian.lab.models.word_transformer import FullSoftmax, SoftmaxAttention, WordTransformer
from adahessian.lab.randomness import generator_for
from adahessian.lab.settings import OptimizerName, Settings
from adahessian.lab.tasks.task import Experiment, Metric, PaperNumber, Place, Task

Attention = Literal["tensorized", "ordinary"]
Segments = tuple[Tensor, Tensor]

_CLUSTERS_BEGIN = (20_000, 40_000, 200_000)


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(Settings):
    """Settings of language modelling."""

    layers: int = 3
    """Layers of the network."""

    width: int = 256
    """Size of a word's embedding."""

    head_width: int = 40
    """Size of an attention head. The tensorized transformer has one, and this is the rank of its core; the ordinary
    one has as many as fit into the width."""

    feed_forward: int = 2100
    """Hidden size of the feed-forward networks."""

    segment: int = 32
    """Words a segment. Nothing is remembered from one segment to the next."""

    dropout: float = 0.3
    """Share of activations set to 0 in training."""

    label_smoothing: float = 0.1
    """Share of the target's probability that is spread over all words, in training."""

    softmax: Literal["full", "adaptive"] = "full"
    """Over all words, with the embeddings as its weights, or in clusters of rarer words with narrower weights."""


class LanguageTask(Task[Segments]):
    """Predict each word from those before it in its segment. A batch is (words, words that follow).

    Each epoch cuts the training text anew, from an offset below the length of a segment, and shuffles the segments.

    Args:
        settings: How large the network is, and the batches.
        place: Where to run.
        text: The words.
        attention: Which of the two Transformers.
    """

    final_weights = "best"

    def __init__(self, settings: LanguageSettings, place: Place, *, text: WordText, attention: Attention) -> None:
        self.settings = settings
        self.place = place
        self.attention = attention
        self.vocabulary = len(text.words)
        self.train = text.train.to(place.device)
        self.valid = text.valid.to(place.device)
        self.held_out = text.test.to(place.device)
        self.steps_per_epoch = (len(self.train) - settings.segment) // (settings.segment * settings.batch_size)
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"Invalid batch_size: {settings.batch_size}. The training text of {len(self.train)} words is shorter "
                f"than one batch of segments of {settings.segment}."
            )

    def make_model(self) -> nn.Module:
        """The network, with tied embeddings where the softmax is full."""
        settings = self.settings
        softmax: nn.Module
        if settings.softmax == "full":
            softmax = FullSoftmax(settings.width, self.vocabulary)
        else:
            cutoffs = [cutoff for cutoff in _CLUSTERS_BEGIN if cutoff < self.vocabulary]
            if not cutoffs:
                raise ValueError(f"Invalid softmax: adaptive. {self.vocabulary} words are too few for it: take full.")
            softmax = AdaptiveSoftmax(settings.width, self.vocabulary, cutoffs)
        model = WordTransformer(
            layers=settings.layers,
            width=settings.width,
            feed_forward=settings.feed_forward,
            vocabulary=self.vocabulary,
            dropout=settings.dropout,
            make_attention=self._make_attention,
            softmax=softmax,
        )
        return model.to(self.place.device)

    def _make_attention(self) -> nn.Module:
        settings = self.settings
        if self.attention == "tensorized":
            return MultiLinearAttention(settings.segment, settings.width, settings.head_width)
        heads = max(1, settings.width // settings.head_width)
        return SoftmaxAttention(settings.segment, settings.width, settings.head_width, heads)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Segments]:
        """Segments of the training text in an order of their own for every epoch."""
        length, size = self.settings.segment, self.settings.batch_size
        generator = generator_for("segments", self.place.seed, epoch)
        offset = int(torch.randint(length, (), generator=generator))
        order = torch.randperm(self.steps_per_epoch * size, generator=generator).to(self.place.device)
        end = offset + len(order) * length
        words, following = self.train[offset:end].view(-1, length), self.train[offset + 1 : end + 1].view(-1, length)
        for number in range(start, self.steps_per_epoch):
            mine = self.place.share.of(order[number * size : (number + 1) * size])
            yield words[mine].long(), following[mine].long()

    def loss(self, model: nn.Module, batch: Segments) -> Tensor:
        """The cross entropy with smoothed labels, a mean over words."""
        log_prob, over_words = model(*batch)
        smoothing = self.settings.label_smoothing
        loss: Tensor = -((1 - smoothing) * log_prob + smoothing * over_words).mean()
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Perplexities of the validation text, and of every tenth segment of the training text."""
        return {
            "valid_perplexity": self._perplexity(model, self.valid),
            "train_perplexity": self._perplexity(model, self.train, every=10),
        }

    def test(self, model: nn.Module) -> dict[str, float]:
        """Perplexities of the whole texts."""
        return {
            "test_perplexity": self._perplexity(model, self.held_out),
            "valid_perplexity": self._perplexity(model, self.valid),
            "train_perplexity": self._perplexity(model, self.train),
        }

    def _perplexity(self, model: nn.Module, text: Tensor, every: int = 1) -> float:
        """Of a text in segments, or of every so-manyth of them. Each word but the first is predicted once."""
        length, size = self.settings.segment, self.settings.batch_size
        last = len(text) - 1
        starts = torch.arange(0, last, length * every, device=text.device)
        total = torch.zeros((), dtype=torch.float64, device=text.device)
        count = torch.zeros((), dtype=torch.int64, device=text.device)
        for first in range(0, len(starts), size):
            places = starts[first : first + size, None] + torch.arange(length, device=text.device)
            inside = places < last
            places = places.clamp(max=last - 1)
            log_prob, _ = model(text[places].long(), text[places + 1].long())
            total += log_prob.double().where(inside, 0.0).sum()
            count += inside.sum()
        return (-total / count).exp().item()


def _load(settings: LanguageSettings, place: Place, *, source: TextSource, attention: Attention) -> LanguageTask:
    return LanguageTask(settings, place, text=read_word_text(source, place.data_dir), attention=attention)


_CURVE = Metric(name="valid_perplexity", title="validation perplexity", higher_is_better=False)
_OTHERS = (_CURVE, Metric(name="train_perplexity", title="training perplexity", higher_is_better=False))
_METRIC = Metric(name="test_perplexity", title="test perplexity", higher_is_better=False)

_PTB_SETTINGS = LanguageSettings(epochs=30, batch_size=60, lr=2.5e-4, schedule="inverse-sqrt", lr_warmup_steps=4000)
_WIKITEXT103_SETTINGS = replace(_PTB_SETTINGS, batch_size=120, layers=6, segment=80, softmax="adaptive")


def _defaults(common: LanguageSettings, *, adahessian_lr: float) -> Mapping[OptimizerName, LanguageSettings]:
    return {
        "adahessian": replace(common, lr=adahessian_lr, eps=1e-4, block_size=4, hessian_power=0.5),
        "adamw": common,
        "adam": common,
        "sgd": replace(common, lr=0.5, momentum=0.9, clip_norm=0.25),
        "adagrad": replace(common, lr=0.01),
        "rmsprop": replace(common, betas=(0.9, 0.99)),
    }


_NOTES = (
    "The training perplexity is that of the tested weights on the training text. The training loss has dropout and "
    "label smoothing in it.",
    "The paper gives 4000 warm-up steps and not what follows: here the inverse square root, for every optimizer.",
    "The paper gives no learning rate for SGD, nor any setting of Adam, Adagrad and RMSprop: theirs are ours. SGD's, "
    "with gradients clipped, was the best of 0.5, 2 and 5 in 400 steps of a small version; no other was searched.",
)
_TENSORIZED_NOTES = (
    *_NOTES,
    "The tensorized transformer's own code never applies its mask, so that a word sees those it is to predict. This "
    "one is causal: compare its optimizers with each other rather than with the paper's perplexities.",
    "AdamW's 2.5e-4 is from the tensorized transformer's scripts.",
    "No memory is carried over segments, neither in training nor in evaluation.",
)
_TIED_NOTE = "Embeddings are tied to the softmax, the default of the code that the tensorized transformer is built on."

EXPERIMENTS: tuple[Experiment[LanguageSettings], ...] = (
    Experiment(
        name="ptb-tensorized",
        title="tensorized transformer on Penn Treebank",
        data="ptb.train.txt, ptb.valid.txt and ptb.test.txt, as Mikolov prepared them, there or in the sub-folder ptb.",
        curve=_CURVE,
        metric=_METRIC,
        others=_OTHERS,
        defaults=_defaults(_PTB_SETTINGS, adahessian_lr=2.0),
        notes=(*_TENSORIZED_NOTES, _TIED_NOTE),
        paper={
            "sgd": PaperNumber(mean=59.9, deviation=3.0),
            "adamw": PaperNumber(mean=54.2, deviation=1.6),
            "adahessian": PaperNumber(mean=51.5, deviation=1.2),
        },
        load=partial(_load, source=PTB, attention="tensorized"),
    ),
    Experiment(
        name="wikitext103-tensorized",
        title="tensorized transformer on WikiText-103",
        data="wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, there or in the sub-folder wikitext-103.",
        curve=_CURVE,
        metric=_METRIC,
        others=_OTHERS,
        defaults=_defaults(_WIKITEXT103_SETTINGS, adahessian_lr=1.0),
        notes=(
            *_TENSORIZED_NOTES,
            "The softmax is adaptive with clusters from 20,000, 40,000 and 200,000 on, each a quarter as wide as the "
            "one before. Embeddings are not tied to it.",
            "Every cluster is computed for every word: a batch has 10 GB of logits. On small GPUs take fewer segments.",
        ),
        paper={
            "sgd": PaperNumber(mean=78.5),
            "adamw": PaperNumber(mean=20.9),
            "adahessian": PaperNumber(mean=19.9),
        },
        load=partial(_load, source=WIKITEXT103, attention="tensorized"),
    ),
    Experiment(
        name="wikitext2-tensorized",
        title="tensorized transformer on WikiText-2",
        data="wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, there or in the sub-folder wikitext-2.",
        curve=_CURVE,
        metric=_METRIC,
        others=_OTHERS,
        defaults=_defaults(_PTB_SETTINGS, adahessian_lr=2.0),
        notes=(*_TENSORIZED_NOTES, _TIED_NOTE, "Not in the paper: the settings are those of Penn Treebank."),
        load=partial(_load, source=WIKITEXT2, attention="tensorized"),
    ),
    Experiment(
        name="ptb-transformer",
        title="ordinary Transformer on Penn Treebank",
        data="ptb.train.txt, ptb.valid.txt and ptb.test.txt, as Mikolov prepared them, there or in the sub-folder ptb.",
        curve=_CURVE,
        metric=_METRIC,
        others=_OTHERS,
        defaults=_defaults(replace(_PTB_SETTINGS, head_width=64), adahessian_lr=2.0),
        notes=(
            *_NOTES,
            _TIED_NOTE,
            "Not in the paper: the network of ptb-tensorized with ordinary attention of 4 heads, all else alike.",
        ),
        load=partial(_load, source=PTB, attention="ordinary"),
    ),
)
