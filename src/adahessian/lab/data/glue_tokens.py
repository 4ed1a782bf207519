"""Sentences as the numbers that a BERT reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import BertWordPieceTokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adahessian.lab.data.errors import DataError
from adahessian.lab.data.glue import Sentences

# Batches are as long as a multiple of this: a compiled step is compiled for each length that occurs.
LENGTHS = 32


def read_tokenizer(folder: Path, max_length: int) -> BertWordPieceTokenizer:
    """The tokenizer of a checkpoint, from its ``vocab.txt``.

    Args:
        folder: The checkpoint.
        max_length: Tokens that are left of an example; the longer sentence is cut first.

    Raises:
        DataError: If the vocabulary is missing, or is not BERT's.
    """
    path = folder / "vocab.txt"
    if not path.is_file():
        raise DataError(f"{path} is missing: give the folder of a checkpoint with config.json, vocab.txt and weights")
    try:
        tokenizer = BertWordPieceTokenizer(str(path), lowercase=_is_lower_case(folder))
    except Exception as error:  # the library raises bare Exceptions
        raise DataError(f"{path} is not a vocabulary of a BERT ({error})") from error
    tokenizer.enable_truncation(max_length)
    return tokenizer


def _is_lower_case(folder: Path) -> bool:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return True
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
        return bool(settings.get("do_lower_case", True))
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} is not the configuration of a tokenizer ({error})") from error


@dataclass(frozen=True)
class TokenizedSentences:
    """Examples, all one after the other, and where each begins."""

    tokens: Tensor
    types: Tensor
    starts: list[int]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, examples: Tensor, max_length: int) -> dict[str, Tensor]:
        """Some of the examples, padded to the same length.

        Args:
            examples: Their numbers.
            max_length: What no example is longer than.

        Returns:
            ``tokens``, ``types`` (0 in the first sentence, 1 in the second), ``mask`` (1 where there is a token), each
            of shape (N, T), and ``labels``.
        """
        spans = [slice(self.starts[i], self.starts[i + 1]) for i in examples.tolist()]
        longest = max((span.stop - span.start for span in spans), default=0)
        length = min(max_length, -(-longest // LENGTHS) * LENGTHS)
        padded = {
            name: _padded([values[span].long() for span in spans], length)
            for name, values in (("tokens", self.tokens), ("types", self.types))
        }
        lengths = torch.tensor([span.stop - span.start for span in spans])
        mask = (torch.arange(length) < lengths[:, None]).long()
        return {**padded, "mask": mask, "labels": self.labels[examples]}


def _padded(sequences: list[Tensor], length: int) -> Tensor:
    # pad_sequence pads to the longest: an empty row of the wanted length makes that one the longest.
    return pad_sequence([*sequences, torch.zeros(length, dtype=torch.long)], batch_first=True)[:-1]


def tokenize(sentences: Sentences, tokenizer: BertWordPieceTokenizer) -> TokenizedSentences:
    """Tokenize the examples of a file: one sentence, or two with a separator between them."""
    pieces: list[tuple[Tensor, Tensor]] = []
    lengths: list[int] = []
    bounds = chain(range(0, len(sentences.texts), 4096), [len(sentences.texts)])
    for begin, end in pairwise(bounds):
        texts = [text if len(text) > 1 else text[0] for text in sentences.texts[begin:end]]
        encodings = tokenizer.encode_batch(texts)
        tokens = list(chain.from_iterable(encoding.ids for encoding in encodings))
        types = list(chain.from_iterable(encoding.type_ids for encoding in encodings))
        pieces.append((torch.tensor(tokens, dtype=torch.int32), torch.tensor(types, dtype=torch.int8)))
        lengths.extend(len(encoding.ids) for encoding in encodings)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return TokenizedSentences(
        torch.cat([tokens for tokens, _ in pieces]), torch.cat([types for _, types in pieces]), starts, sentences.labels
    )
