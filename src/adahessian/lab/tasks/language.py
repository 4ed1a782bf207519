"""Language modelling: the paper's Transformers on Penn Treebank and WikiText, and GPTs on text files."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from adahessian.lab.configs.language import GPTConfig, WordConfig
from adahessian.lab.data.texts import SOURCES, Text, read_bytes, read_subwords, read_words
from adahessian.lab.models.gpt import GPT
from adahessian.lab.models.word_transformer import WordTransformer
from adahessian.lab.tasks.task import Env, Task, Tensors
from adahessian.lab.training.random_streams import random_stream

# Maximum number of tokens in an evaluation of a GPT.
_EVALUATED_TOKENS = 100_000


class SegmentTask(Task[Tensors]):
    """Prediction of each token from the tokens before it in its segment. A batch is (tokens, tokens that follow).

    Each epoch cuts the training text anew, from an offset below the length of a segment, and shuffles the segments.
    """

    def __init__(self, config: Any, env: Env, texts: Text, length: int) -> None:
        self.config, self.env, self.length, self.batch_size = config, env, length, config.batch_size
        self.train, self.valid, self.test = (text.to(env.device) for text in texts)
        self.steps_per_epoch = (len(self.train) - length) // (length * self.batch_size)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Tensors]:
        length = self.length
        generator = random_stream("segments", self.env.seed, epoch)
        offset = int(torch.randint(length, (), generator=generator))
        order = torch.randperm(self.steps_per_epoch * self.batch_size, generator=generator).to(self.env.device)
        end = offset + len(order) * length
        tokens, following = self.train[offset:end].view(-1, length), self.train[offset + 1 : end + 1].view(-1, length)
        for part in order.split(self.batch_size)[skip:]:
            mine = self.env.my_share(part)
            yield tokens[mine].long(), following[mine].long()

    def evaluated_loss(self, model: nn.Module, text: Tensor, every: int = 1) -> Tensor:
        """Return the mean loss of a text's tokens, in nats, or of the tokens of one segment in ``every``."""
        last = len(text) - 1
        total, count = torch.zeros(2, dtype=torch.float64, device=text.device)
        for starts in torch.arange(0, last, self.length * every, device=text.device).split(self.batch_size):
            places = starts[:, None] + torch.arange(self.length, device=text.device)
            inside = places < last
            places = places.clamp(max=last - 1)
            losses = self.token_losses(model, text[places].long(), text[places + 1].long())
            total += losses.double().where(inside, 0.0).sum()
            count += inside.sum()
        return cast(Tensor, total / count)

    @abstractmethod
    def token_losses(self, model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
        """Return the loss of each token in nats, of shape (N, length)."""


class WordTask(SegmentTask):
    """Words, with a Transformer of the paper."""

    def __init__(self, config: WordConfig, env: Env) -> None:
        text, words = read_words(SOURCES[config.text], env.data_dir)
        super().__init__(config, env, text, config.segment)
        self.vocabulary = len(words)

    def build_model(self) -> WordTransformer:
        return WordTransformer(self.vocabulary, self.config).to(self.env.device)

    def loss(self, model: nn.Module, batch: Tensors) -> Tensor:
        """Return the cross entropy with smoothed labels, the mean over words."""
        tokens, following = batch
        return self.token_losses(model, tokens, following, self.config.label_smoothing).mean()

    def token_losses(self, model: nn.Module, tokens: Tensor, following: Tensor, smoothing: float = 0.0) -> Tensor:
        log_prob, over_words = model(tokens, following)
        return cast(Tensor, -((1 - smoothing) * log_prob + smoothing * over_words))

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return perplexities. Of the training text, only the final test reads more than every tenth segment."""
        texts = {"valid": (self.valid, 1), "train": (self.train, 1 if final else 10)}
        if final:
            texts["test"] = self.test, 1
        return {f"{part}_perplexity": self.evaluated_loss(model, *text).exp().item() for part, text in texts.items()}


class GPTTask(SegmentTask):
    """Bytes or subwords, with a GPT."""

    def __init__(self, config: GPTConfig, env: Env) -> None:
        is_bytes = config.tokens == "bytes"
        text = read_bytes(env.data_dir) if is_bytes else read_subwords(env.data_dir, config.vocabulary)
        super().__init__(config, env, text, config.context)

    def build_model(self) -> GPT:
        config = self.config
        sizes = config.layers, config.width, config.heads, config.vocabulary, config.context
        return GPT(*sizes, dropout=config.dropout).to(self.env.device)

    def loss(self, model: nn.Module, batch: Tensors) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())

    def token_losses(self, model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
        losses = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten(), reduction="none")
        return losses.view_as(following)

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return losses (nats per token) and perplexities, of segments spread evenly over the text."""
        metrics: dict[str, float] = {}
        for part, text in [("valid", self.valid), ("test", self.test)][: 2 if final else 1]:
            loss = self.evaluated_loss(model, text, math.ceil(len(text) / _EVALUATED_TOKENS))
            metrics |= {f"{part}_loss": loss.item(), f"{part}_perplexity": loss.exp().item()}
        return metrics
