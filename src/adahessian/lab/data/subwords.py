"""Byte-level subwords (BPE), learned from the training text."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import numpy as np
import tokenizers
import torch
from platformdirs import user_cache_path
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from adahessian.lab.data.token_batches import END, PADDING, START
from adahessian.lab.training.atomic_files import atomic_write

RESERVED = 1 + max(PADDING, START, END)

# Subwords stay within a word of tokenized text, and within a word or a punctuation mark of plain text.
WORDS, WORDS_AND_PUNCTUATION = r" ?\S+", r" ?[^\s\p{P}]+| ?\p{P}"

# Lines per call of the tokenizer, which bounds memory.
CHUNK = 100_000

_log = logging.getLogger(__name__)


class Subwords:
    """Subwords that two languages share, which map any text to token numbers and back.

    The first numbers are reserved for padding, start and end, which no text contains. The size includes them. A small
    text gives fewer subwords. ``tokenized`` text has spaces between all words and punctuation marks.
    """

    def __init__(self, texts: Sequence[Sequence[str]], size: int, *, tokenized: bool) -> None:
        sentences = [sentence for side in texts for sentence in side]
        self._tokenizer = learn_bpe(sentences, size - RESERVED, WORDS if tokenized else WORDS_AND_PUNCTUATION)

    def __len__(self) -> int:
        return RESERVED + int(self._tokenizer.get_vocab_size())

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of each sentence."""
        encodings = self._tokenizer.encode_batch_fast(sentences)
        return [[RESERVED + number for number in encoding.ids] for encoding in encodings]

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sentence, without reserved numbers."""
        numbers = [[token - RESERVED for token in sentence if token >= RESERVED] for sentence in sentences]
        return [" ".join(text.split()) for text in self._tokenizer.decode_batch(numbers)]


def learn_bpe(lines: Sequence[str], size: int, words: str | None = None) -> Tokenizer:
    """Learn byte-pair encoding, or load what was learned from the same text before.

    Without a pattern of ``words``, GPT-2's is used. With one, the first word of a line is the same token as elsewhere.
    """

    def learn() -> bytes:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
        if words is not None:
            tokenizer.normalizer = normalizers.Prepend(" ")
            split = pre_tokenizers.Split(Regex(words), "isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(lines, trainer)
        return tokenizer.to_str().encode()

    return Tokenizer.from_buffer(_cached("subwords", repr((size, words)), lines, learn))


def encode(tokenizer: Tokenizer, lines: Sequence[str]) -> Tensor:
    """Return the token numbers of a text as one row of int32, or load what was computed before."""

    def compute() -> bytes:
        chunks = (lines[first : first + CHUNK] for first in range(0, len(lines), CHUNK))
        encodings = (encoding for chunk in chunks for encoding in tokenizer.encode_batch_fast(chunk))
        return np.fromiter((number for encoding in encodings for number in encoding.ids), np.int32).tobytes()

    return torch.frombuffer(bytearray(_cached("texts", tokenizer.to_str(), lines, compute)), dtype=torch.int32)


def _cached(kind: str, options: str, lines: Iterable[str], compute: Callable[[], bytes]) -> bytes:
    """Load what an earlier run computed from options and text with this version of tokenizers, or compute and save it.

    Files are in the user's cache folder (``XDG_CACHE_HOME`` on Linux), each behind its checksum.
    """
    key = hashlib.sha256(repr((tokenizers.__version__, options)).encode())
    for line in lines:
        key.update(line.encode() + b"\n")
    path = user_cache_path("adahessian") / kind / key.hexdigest()
    with suppress(OSError):
        stored = path.read_bytes()
        if stored[:32] == hashlib.sha256(stored[32:]).digest():
            return stored[32:]
        _log.warning("%s is damaged and will be replaced.", path)
    content = compute()
    try:
        with atomic_write(path) as file:
            file.write(hashlib.sha256(content).digest() + content)
    except OSError as error:
        _log.warning("%s cannot be written (%s). The next run will compute it again.", path, error)
    return content
