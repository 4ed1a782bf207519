"""Byte-level subwords (BPE), learned from the training text."""

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

from adahessian.lab.training.atomic_files import atomic_write

# Subwords stay within a word of tokenized text, and within a word or a punctuation mark of plain text.
WORDS, WORDS_AND_PUNCTUATION = r" ?\S+", r" ?[^\s\p{P}]+| ?\p{P}"

# Lines per call of the tokenizer, which bounds memory.
CHUNK = 100_000

_log = logging.getLogger(__name__)


def learn_bpe(lines: Sequence[str], size: int, words: str | None = None) -> Tokenizer:
    """Learn byte-pair encoding, or load what was learned from the same text before. A small text gives fewer subwords.

    Without a pattern of ``words``, GPT-2's is used. With one, the first word of a line is the same token as elsewhere,
    and the first numbers are those of :mod:`.token_batches` for padding, start and end, which no text contains.
    """
    special = ["<padding>", "<start>", "<end>"] if words else []

    def learn() -> bytes:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
        if words is not None:
            tokenizer.normalizer = normalizers.Prepend(" ")
            split = pre_tokenizers.Split(Regex(words), "isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        )
        tokenizer.train_from_iterator(lines, trainer)
        return tokenizer.to_str().encode()

    tokenizer = Tokenizer.from_buffer(_cached("subwords", repr((size, words, special)), lines, learn))
    tokenizer.encode_special_tokens = True  # as any other text
    return tokenizer


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
