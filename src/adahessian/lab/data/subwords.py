"""Byte-level subwords (BPE) that two languages share, learned from the training text."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import tokenizers
from platformdirs import user_cache_path
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from adahessian.lab.data.token_batches import END, PADDING, START
from adahessian.lab.training.atomic_files import atomic_write

RESERVED = 1 + max(PADDING, START, END)

# Subwords stay within a word of tokenized text, and within a word or a punctuation mark of plain text.
WORDS = r" ?\S+"
WORDS_AND_PUNCTUATION = r" ?[^\s\p{P}]+| ?\p{P}"

Made = TypeVar("Made")

_log = logging.getLogger(__name__)


class Subwords:
    """Maps any text to token numbers and back.

    The first numbers are reserved for padding, start and end, which no text contains.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return RESERVED + int(self._tokenizer.get_vocab_size())

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of each sentence."""
        encodings = self._tokenizer.encode_batch_fast([f" {sentence}" for sentence in sentences])
        return [[RESERVED + number for number in encoding.ids] for encoding in encodings]

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sentence, without reserved numbers."""
        numbers = [[token - RESERVED for token in sentence if token >= RESERVED] for sentence in sentences]
        return [" ".join(text.split()) for text in self._tokenizer.decode_batch(numbers)]


def learn_subwords(texts: Sequence[Sequence[str]], size: int, *, tokenized: bool) -> Subwords:
    """Learn subwords, or load what was learned from the same text before.

    Args:
        texts: The sentences of both languages.
        size: Number of tokens, including the reserved ones. A small text gives fewer.
        tokenized: Whether the text has spaces between all words and punctuation marks.
    """
    pattern = WORDS if tokenized else WORDS_AND_PUNCTUATION
    split = pre_tokenizers.Split(Regex(pattern), "isolated")

    def spaced() -> Iterator[str]:
        # A word is the same token at the start of a sentence and inside of it.
        return (f" {sentence}" for sentences in texts for sentence in sentences)

    return Subwords(
        cached(
            "subwords",
            key_of(repr((size, pattern)), spaced()) + ".json",
            load=lambda path: Tokenizer.from_file(str(path)),
            make=lambda: learn_bpe(spaced(), size - RESERVED, split),
            save=lambda tokenizer, file: file.write(tokenizer.to_str().encode()),
        )
    )


def learn_bpe(lines: Iterable[str], size: int, *split: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """Learn byte-pair encoding. Without ``split``, words are split as GPT-2 splits them."""
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def key_of(options: str, lines: Iterable[str]) -> str:
    """Return a name for what is computed from options and text with this version of tokenizers."""
    key = hashlib.sha256(repr((tokenizers.__version__, options)).encode())
    for line in lines:
        key.update(line.encode() + b"\n")
    return key.hexdigest()


def cached(
    kind: str,
    name: str,
    *,
    load: Callable[[Path], Made],
    make: Callable[[], Made],
    save: Callable[[Made, BinaryIO], object],
) -> Made:
    """Load what an earlier run made, or make and save it, in the user's cache folder (``XDG_CACHE_HOME`` on Linux).

    A damaged file is replaced. A cache that cannot be written costs only time.
    """
    path = user_cache_path("adahessian") / kind / name
    if path.exists():
        try:
            return load(path)
        except Exception as error:  # tokenizers raises plain Exceptions
            _log.warning("%s is damaged (%s) and will be replaced.", path, error)
    made = make()
    try:
        with atomic_write(path) as file:
            save(made, file)
    except OSError as error:
        _log.warning("%s cannot be written (%s). The next run will compute it again.", path, error)
    return made
