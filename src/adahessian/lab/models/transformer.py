"""A pre-norm Transformer for translation, with one matrix for all embeddings, and its beam search."""

import math
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from adahessian.lab.configs.translation import TranslationConfig
from adahessian.lab.data.token_batches import END, PADDING, START
from adahessian.lab.errors import ConfigError

KeysValues = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Attention of one sequence to another or to itself."""

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        width, self.heads, self.dropout = config.width, config.heads, config.attention_dropout
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        # Query, key and value start as if they were one matrix.
        for layer, gain in ((self.query, 2**-0.5), (self.key, 2**-0.5), (self.value, 2**-0.5), (self.out, 1.0)):
            nn.init.xavier_uniform_(layer.weight, gain)
            nn.init.zeros_(layer.bias)

    def split(self, x: Tensor) -> Tensor:
        """Split activations of shape (N, T, width) into heads: (N, heads, T, width / heads)."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def keys_values(self, x: Tensor) -> KeysValues:
        return self.split(self.key(x)), self.split(self.value(x))

    def forward(self, x: Tensor, keys_values: KeysValues, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Map activations of shape (N, T, width) to the same shape. The mask is True at places to attend to."""
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(
            self.split(self.query(x)), *keys_values, attn_mask=mask, dropout_p=dropout, is_causal=causal
        )
        return cast(Tensor, self.out(attended.transpose(1, 2).flatten(2)))


class FeedForward(nn.Sequential):
    """Two layers with a ReLU between them."""

    def __init__(self, config: TranslationConfig) -> None:
        up, down = nn.Linear(config.width, config.feed_forward), nn.Linear(config.feed_forward, config.width)
        super().__init__(up, nn.ReLU(), nn.Dropout(config.activation_dropout), down)
        for layer in (up, down):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each with layer norm before it and a residual connection."""

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(config.width), Attention(config)
        self.norm2, self.feed_forward = nn.LayerNorm(config.width), FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.dropout(self.attention(normed, self.attention.keys_values(normed), mask))
        return cast(Tensor, x + self.dropout(self.feed_forward(self.norm2(x))))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the source and a feed-forward network, each as in the encoder."""

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(config.width), Attention(config)
        self.norm2, self.source_attention = nn.LayerNorm(config.width), Attention(config)
        self.norm3, self.feed_forward = nn.LayerNorm(config.width), FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, source: KeysValues, mask: Tensor, past: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """Process all places at once or, given a past, the next one. Also return all keys and values so far."""
        normed = self.norm1(x)
        keys_values = self.attention.keys_values(normed)
        if past is not None:
            keys_values = torch.cat([past[0], keys_values[0]], 2), torch.cat([past[1], keys_values[1]], 2)
        x = x + self.dropout(self.attention(normed, keys_values, causal=past is None))
        x = x + self.dropout(self.source_attention(self.norm2(x), source, mask))
        return x + self.dropout(self.feed_forward(self.norm3(x))), keys_values


class Transformer(nn.Module):
    """An encoder that reads a sentence and a causal decoder that generates its translation."""

    def __init__(self, vocabulary: int, config: TranslationConfig) -> None:
        super().__init__()
        if config.width % (least := 2 * config.heads):
            raise ConfigError(f"--width {config.width} is invalid. Pass a multiple of {least} (twice --heads).")
        self.tokens = nn.Embedding(vocabulary, config.width)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.encoder_norm = nn.LayerNorm(config.width)
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.decoder_norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        # Embeddings are scaled by the root of the width, the output layer is not.
        nn.init.normal_(self.tokens.weight, std=config.width**-0.5)

    def embed(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Embed tokens of shape (N, T), the first of which has the position ``first``, and add sines and cosines."""
        scaled = self.tokens(tokens) * math.sqrt(self.tokens.embedding_dim)
        half = self.tokens.embedding_dim // 2
        rates = torch.exp(torch.arange(half, device=tokens.device) * (-math.log(10_000) / max(1, half - 1)))
        angles = torch.arange(first, first + tokens.shape[1], device=tokens.device).unsqueeze(1) * rates
        embedded: Tensor = self.dropout(scaled + torch.cat([angles.sin(), angles.cos()], 1).to(scaled.dtype))
        return embedded

    def encode(self, source: Tensor) -> tuple[list[KeysValues], Tensor]:
        """Return keys and values of the source for each layer of the decoder, and the mask of its tokens."""
        mask = (source != PADDING)[:, None, None, :]
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, mask)
        x = self.encoder_norm(x)
        return [cast(DecoderLayer, layer).source_attention.keys_values(x) for layer in self.decoder], mask

    def logits(self, x: Tensor) -> Tensor:
        """Map the last activations of the decoder to logits."""
        return F.linear(self.decoder_norm(x), self.tokens.weight)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Map tokens of shapes (N, S) and (N, T), padded at the end, to logits of shape (N, T, vocabulary)."""
        encoded, mask = self.encode(source)
        x = self.embed(target)
        for layer, keys_values in zip(self.decoder, encoded, strict=True):
            x, _ = layer(x, keys_values, mask)
        return self.logits(x)


class Decoding:
    """The decoder of a model in eval mode, with the keys and values of what it has generated."""

    def __init__(self, model: Transformer, source: Tensor) -> None:
        self.model = model
        self.encoded, self.mask = model.encode(source)
        self.past = [(keys[:, :, :0], values[:, :, :0]) for keys, values in self.encoded]
        self.length = 0

    def repeat(self, times: int) -> None:
        """Repeat each row this many times, next to each other."""
        self.mask = self.mask.repeat_interleave(times, 0)
        self.encoded, self.past = (
            [(keys.repeat_interleave(times, 0), values.repeat_interleave(times, 0)) for keys, values in pairs]
            for pairs in (self.encoded, self.past)
        )

    def reorder(self, rows: Tensor) -> None:
        """Continue each row with the past of another row, which translates the same sentence."""
        self.past = [(keys[rows], values[rows]) for keys, values in self.past]

    def step(self, tokens: Tensor) -> Tensor:
        """Map the last token of each row to the logits of the next token, of shape (N, vocabulary)."""
        x = self.model.embed(tokens.unsqueeze(1), self.length)
        for number, layer in enumerate(self.model.decoder):
            x, self.past[number] = layer(x, self.encoded[number], self.mask, self.past[number])
        self.length += 1
        return self.model.logits(x).squeeze(1)


def beam_search(decoder: Decoding, limits: Tensor, *, beam_size: int, length_penalty: float) -> list[list[int]]:
    """Return the best sentence for each source, without its end.

    The score of a sentence is the sum of its tokens' log-probabilities over ``n ** length_penalty``, with n tokens
    including the end. The search for a source stops when ``beam_size`` of its sentences have ended. ``limits`` holds
    the longest sentence for each source, including its end.
    """
    sources, device = len(limits), limits.device
    decoder.repeat(beam_size)
    first_rows = (torch.arange(sources, device=device) * beam_size).unsqueeze(1)
    ranks = torch.arange(2 * beam_size, device=device)
    said = torch.full((sources * beam_size, 1), START, device=device)
    # All rows of a beam start alike, so only the first one counts.
    scores = torch.full((sources, beam_size), -torch.inf, device=device)
    scores[:, 0] = 0
    best_scores = torch.full((sources,), -torch.inf, device=device)
    best = torch.full((sources, int(limits.max()) + 1), PADDING, device=device)
    ended = torch.zeros(sources, dtype=torch.long, device=device)

    for length in range(1, best.shape[1]):
        logs = decoder.step(said[:, -1]).float().log_softmax(-1)
        logs[:, [PADDING, START]] = -torch.inf
        at_limit = (limits <= length).repeat_interleave(beam_size)
        words = torch.arange(logs.shape[1], device=device) != END
        logs = logs.masked_fill(at_limit.unsqueeze(1) & words, -torch.inf)

        # A row can end in only one way, so at most half of the candidates are ends.
        candidates = (scores.unsqueeze(2) + logs.unflatten(0, (sources, beam_size))).flatten(1)
        scores, picked = candidates.topk(min(2 * beam_size, candidates.shape[1]), dim=1)
        rows, tokens = first_rows + picked // logs.shape[1], picked % logs.shape[1]

        ends = tokens == END
        # An end counts only among the best of the beam, as a word does.
        counted = ends & (ranks[: ends.shape[1]] < beam_size) & (scores > -torch.inf) & (ended < beam_size).unsqueeze(1)
        found, place = (scores / length**length_penalty).masked_fill(~counted, -torch.inf).max(1)
        better = found > best_scores
        best_scores = torch.where(better, found, best_scores)
        sentence = torch.full_like(best, PADDING)
        sentence[:, :length] = said[rows.gather(1, place.unsqueeze(1)).squeeze(1)]
        best = torch.where(better.unsqueeze(1), sentence, best)
        ended += counted.sum(1)
        if bool(((ended >= beam_size) | (limits <= length)).all()):
            break

        scores, kept = scores.masked_fill(ends, -torch.inf).topk(beam_size, dim=1)
        rows = rows.gather(1, kept).flatten()
        said = torch.cat([said[rows], tokens.gather(1, kept).flatten().unsqueeze(1)], 1)
        decoder.reorder(rows)
    return [[token for token in row if token not in (PADDING, START)] for row in best.tolist()]
