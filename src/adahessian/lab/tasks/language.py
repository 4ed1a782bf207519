"""Language modelling: the paper's Transformers on Penn Treebank and WikiText, and GPTs on text files."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from adahessian.lab.configs.language import GPTConfig, WordConfig
from adahessian.lab.data.texts import SOURCES, Text, read_bytes, read_subwords, read_words
from adahessian.lab.errors import ConfigError
from adahessian.lab.models.gpt import GPT
from adahessian.lab.models.word_transformer import (
    AdaptiveSoftmax,
    FullSoftmax,
    MultiLinearAttention,
    SoftmaxAttention,
    WordTransformer,
)
from adahessian.lab.tasks.task import Env, Task
from adahessian.lab.training.random_streams import random_stream

Segments = tuple[Tensor, Tensor]

# First words of the rarer clusters of an adaptive softmax.
CUTOFFS = (20_000, 40_000, 200_000)

# Most tokens in an evaluation of a GPT.
EVALUATED_TOKENS = 100_000


def load(config: WordConfig | GPTConfig, env: Env) -> SegmentTask:
    """Read the text. Subwords are learned from it, or loaded from the cache.

    Raises:
        ConfigError: If a batch is longer than the training text.
        DataError: If a file is missing or damaged.
    """
    return WordTask(config, env) if isinstance(config, WordConfig) else GPTTask(config, env)


class SegmentTask(Task[Segments]):
    """Prediction of each token from the tokens before it in its segment. A batch is (tokens, tokens that follow).

    Each epoch cuts the training text anew, from an offset below the length of a segment, and shuffles the segments.
    """

    def __init__(self, env: Env, texts: Text, *, length: int, batch_size: int) -> None:
        self.env, self.length, self.batch_size = env, length, batch_size
        self.train, self.valid, self.test = (text.to(env.device) for text in (texts.train, texts.valid, texts.test))
        self.steps_per_epoch = (len(self.train) - length) // (length * batch_size)
        if self.steps_per_epoch < 1:
            raise ConfigError(
                f"--batch-size {batch_size} is too large for segments of {length} from the training text of "
                f"{len(self.train)} tokens. Reduce it."
            )

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Segments]:
        """Yield segments of the training text."""
        length, size = self.length, self.batch_size
        generator = random_stream("segments", self.env.seed, epoch)
        offset = int(torch.randint(length, (), generator=generator))
        order = torch.randperm(self.steps_per_epoch * size, generator=generator).to(self.env.device)
        end = offset + len(order) * length
        tokens, following = self.train[offset:end].view(-1, length), self.train[offset + 1 : end + 1].view(-1, length)
        for number in range(skip, self.steps_per_epoch):
            mine = self.env.my_share(order[number * size : (number + 1) * size])
            yield tokens[mine].long(), following[mine].long()

    def evaluated_loss(self, model: nn.Module, text: Tensor, every: int = 1) -> Tensor:
        """Return the mean loss of a text's tokens, in nats, or of the tokens of one segment in ``every``."""
        last = len(text) - 1
        total = torch.zeros((), dtype=torch.float64, device=text.device)
        count = torch.zeros((), dtype=torch.int64, device=text.device)
        for starts in torch.arange(0, last, self.length * every, device=text.device).split(self.batch_size):
            places = starts[:, None] + torch.arange(self.length, device=text.device)
            inside = places < last
            places = places.clamp(max=last - 1)
            losses = self.token_losses(model, text[places].long(), text[places + 1].long())
            total += losses.double().where(inside, 0.0).sum()
            count += inside.sum()
        return total / count

    @abstractmethod
    def token_losses(self, model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
        """Return the loss of each token in nats, of shape (N, length)."""


class WordTask(SegmentTask):
    """Words, with a Transformer of the paper."""

    def __init__(self, config: WordConfig, env: Env) -> None:
        self.config = config
        text, words = read_words(SOURCES[config.text], env.data_dir)
        super().__init__(env, text, length=config.segment, batch_size=config.batch_size)
        self.vocabulary = len(words)

    def build_model(self) -> nn.Module:
        """Return a new network. Embeddings are tied to a full softmax."""
        config = self.config
        softmax: nn.Module
        if config.softmax == "full":
            softmax = FullSoftmax(config.width, self.vocabulary)
        else:
            cutoffs = [cutoff for cutoff in CUTOFFS if cutoff < self.vocabulary]
            if not cutoffs:
                raise ConfigError(f"--softmax adaptive needs more than {self.vocabulary} words. Pass --softmax full.")
            softmax = AdaptiveSoftmax(config.width, self.vocabulary, cutoffs)
        model = WordTransformer(
            layers=config.layers,
            width=config.width,
            feed_forward=config.feed_forward,
            vocabulary=self.vocabulary,
            dropout=config.dropout,
            make_attention=self._make_attention,
            softmax=softmax,
        )
        return model.to(self.env.device)

    def _make_attention(self) -> nn.Module:
        config = self.config
        if config.attention == "tensorized":
            return MultiLinearAttention(config.segment, config.width, config.head_width)
        heads = max(1, config.width // config.head_width)
        return SoftmaxAttention(config.segment, config.width, config.head_width, heads)

    def loss(self, model: nn.Module, batch: Segments) -> Tensor:
        """Return the cross entropy with smoothed labels, the mean over words."""
        log_prob, over_words = model(*batch)
        smoothing = self.config.label_smoothing
        loss: Tensor = -((1 - smoothing) * log_prob + smoothing * over_words).mean()
        return loss

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return perplexities. Of the training text, only the final test reads more than every tenth segment."""
        texts = {"valid": (self.valid, 1), "train": (self.train, 1 if final else 10)}
        if final:
            texts["test"] = self.test, 1
        return {
            f"{part}_perplexity": self.evaluated_loss(model, text, every).exp().item()
            for part, (text, every) in texts.items()
        }

    def token_losses(self, model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
        """Return the loss of each word."""
        log_prob: Tensor = model(tokens, following)[0]
        return -log_prob


class GPTTask(SegmentTask):
    """Bytes or subwords, with a GPT."""

    def __init__(self, config: GPTConfig, env: Env) -> None:
        self.config = config
        is_bytes = config.tokens == "bytes"
        text = read_bytes(env.data_dir) if is_bytes else read_subwords(env.data_dir, config.vocabulary)
        super().__init__(env, text, length=config.context, batch_size=config.batch_size)

    def build_model(self) -> GPT:
        """Return a new GPT."""
        config = self.config
        sizes = config.layers, config.width, config.heads, config.vocabulary, config.context
        return GPT(*sizes, dropout=config.dropout).to(self.env.device)

    def loss(self, model: nn.Module, batch: Segments) -> Tensor:
        """Return the cross entropy, the mean over tokens."""
        tokens, following = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return losses (nats per token), perplexities and, for bytes, bits per character.

        At most :data:`EVALUATED_TOKENS` are read, in segments spread evenly over the text.
        """
        metrics: dict[str, float] = {}
        for part, text in [("valid", self.valid), ("test", self.test)][: 2 if final else 1]:
            loss = self.evaluated_loss(model, text, math.ceil(len(text) / EVALUATED_TOKENS))
            metrics |= {f"{part}_loss": loss.item(), f"{part}_perplexity": loss.exp().item()}
            if self.config.tokens == "bytes":
                # All bytes of a UTF-8 character but the first begin with the bits 10.
                per_byte = ((text & 0xC0) != 0x80).double().mean()
                metrics[f"{part}_bits_per_character"] = (loss / math.log(2) / per_byte).item()
        return metrics

    def token_losses(self, model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
        """Return the loss of each token."""
        losses = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten(), reduction="none")
        return losses.view_as(following)
