"""Subwords that two languages share: byte-pair encoding, learned from the training text."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from adahessian.lab.data.token_batches import END, PADDING, START
from adahessian.lab.files import cache_folder, written_whole

RESERVED = 1 + max(PADDING, START, END)

# No subword goes beyond a word of text that was split into words by its owner, nor beyond punctuation of any other.
WORDS = r" ?\S+"
WORDS_AND_PUNCTUATION = r" ?[^\s\p{P}]+| ?\p{P}"

_log = logging.getLogger("adahessian")


class Subwords:
    """Text to token numbers and back. Every text has numbers, since rare characters are spelled in bytes.

    The first numbers are reserved for padding, start and end, which no text can spell.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return RESERVED + int(self._tokenizer.get_vocab_size())

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """The token numbers of each sentence."""
        encodings = self._tokenizer.encode_batch_fast([f" {sentence}" for sentence in sentences])
        return [[RESERVED + number for number in encoding.ids] for encoding in encodings]

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sentence; reserved numbers have none."""
        numbers = [[token - RESERVED for token in sentence if token >= RESERVED] for sentence in sentences]
        return [" ".join(text.split()) for text in self._tokenizer.decode_batch(numbers)]


def learn_subwords(texts: Sequence[Sequence[str]], size: int, *, tokenized: bool) -> Subwords:
    """Learn subwords from a text, or take them from the cache of an earlier time.

    The same text gives the same subwords, so that the cache saves time and decides nothing. It is in the folder
    ``adahessian`` of ``XDG_CACHE_HOME``, by default ``~/.cache``. A file in it that is damaged is replaced.

    Args:
        texts: The sentences of both languages.
        size: Number of tokens, with those that are reserved. Fewer if the text is too small for as many.
        tokenized: Whether the text has spaces between all words and punctuation, as its owner prepared it.
    """
    path = _cache_file(texts, size, tokenized)
    tokenizer = _read(path)
    if tokenizer is None:
        tokenizer = _learn(texts, size, WORDS if tokenized else WORDS_AND_PUNCTUATION)
        _write(path, tokenizer)
    return Subwords(tokenizer)


def _learn(texts: Sequence[Sequence[str]], size: int, pattern: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - RESERVED, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_spaced(texts), trainer)
    return tokenizer


def _spaced(texts: Sequence[Sequence[str]]) -> Iterator[str]:
    # A word is the same token at the start of a sentence and inside of it.
    return (f" {sentence}" for sentences in texts for sentence in sentences)


def _cache_file(texts: Sequence[Sequence[str]], size: int, tokenized: bool) -> Path:
    key = hashlib.sha256(repr((tokenizers.__version__, size, WORDS if tokenized else WORDS_AND_PUNCTUATION)).encode())
    for sentence in _spaced(texts):
        key.update(sentence.encode() + b"\n")
    return cache_folder() / "subwords" / f"{key.hexdigest()}.json"


def _read(path: Path) -> Tokenizer | None:
    try:
        saved = json.loads(path.read_bytes())
        if saved["sha256"] != hashlib.sha256(saved["tokenizer"].encode()).hexdigest():
            raise ValueError("its content does not match its checksum")
        return Tokenizer.from_str(saved["tokenizer"])
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is wrong with it, and tokenizers raises plain Exceptions
        _log.warning("learning subwords again: cannot use %s: %s", path, error)
        return None


def _write(path: Path, tokenizer: Tokenizer) -> None:
    text = tokenizer.to_str()
    content = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "tokenizer": text})
    try:
        with written_whole(path) as file:
            file.write(content.encode())
    except OSError as error:
        _log.warning("subwords are not cached: %s", error)
