"""Penn Treebank and WikiText: words between spaces, one sentence or paragraph per line."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adahessian.lab.errors import DataError

END_OF_LINE = "<eos>"
UNKNOWN = "<unk>"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The files of a text, and their published length."""

    title: str
    folder: str
    """Sub-folder that the files may be in."""

    file_name: str
    """Name of a file, with ``{}`` for ``train``, ``valid`` or ``test``."""

    tokens: tuple[int, int, int]
    """Words of the training, validation and test text, including the end of each line."""

    vocabulary: int
    """Different words, including the end of a line."""


SOURCES = {
    "ptb": TextSource(
        title="Penn Treebank",
        folder="ptb",
        file_name="ptb.{}.txt",
        tokens=(929_589, 73_760, 82_430),
        vocabulary=10_000,
    ),
    "wikitext2": TextSource(
        title="WikiText-2",
        folder="wikitext-2",
        file_name="wiki.{}.tokens",
        tokens=(2_088_628, 217_646, 245_569),
        vocabulary=33_278,
    ),
    "wikitext103": TextSource(
        title="WikiText-103",
        folder="wikitext-103",
        file_name="wiki.{}.tokens",
        tokens=(103_227_021, 217_646, 245_569),
        vocabulary=267_735,
    ),
}


@dataclass(frozen=True, kw_only=True)
class WordText:
    """A text as numbers of words, each part one row of int32."""

    words: tuple[str, ...]
    """The words of the training text, the most frequent first, as an adaptive softmax needs them."""

    train: Tensor
    valid: Tensor
    test: Tensor


def read_word_text(source: TextSource, data_dir: Path) -> WordText:
    """Read the three parts of a text from ``data_dir`` or the text's sub-folder. Every line ends with ``<eos>``.

    Words that the training text lacks become ``<unk>``. A length other than the published one is logged, because the
    perplexities of different texts cannot be compared.

    Raises:
        DataError: If a file is missing, empty or truncated, or rare words are not replaced by ``<unk>``.
    """
    train, valid, test = _find(source, data_dir)
    counts: Counter[str] = Counter()
    for line in _lines(train):
        counts.update(line)
    if UNKNOWN not in counts:
        raise DataError(f"{train} contains no {UNKNOWN}. Use the version of {source.title} with rare words replaced.")
    words = tuple(word for word, _ in counts.most_common())
    numbers = {word: number for number, word in enumerate(words)}
    text = WordText(words=words, train=_read(train, numbers), valid=_read(valid, numbers), test=_read(test, numbers))
    found = (len(text.train), len(text.valid), len(text.test)), len(words)
    published = source.tokens, source.vocabulary
    if found != published:
        message = "%s has %s words and a vocabulary of %d. %s has %s and %d, so perplexities cannot be compared."
        _log.warning(message, train.parent, *found, source.title, *published)
    return text


def _find(source: TextSource, data_dir: Path) -> list[Path]:
    names = [source.file_name.format(part) for part in ("train", "valid", "test")]
    for folder in (data_dir, data_dir / source.folder):
        paths = [folder / name for name in names]
        missing = [path for path in paths if not path.is_file()]
        if not missing:
            return paths
        if len(missing) < len(paths):
            raise DataError(f"{missing[0]} is missing. Put it next to the other files of {source.title}.")
    raise DataError(
        f"{data_dir} has neither {names[0]} nor {source.folder}/{names[0]}. "
        f"Put {', '.join(names)} there, or pass another --data-dir."
    )


def _lines(path: Path) -> Iterator[list[str]]:
    line = ""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                yield [*line.split(), END_OF_LINE]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}). Download it again.") from error
    if not line.endswith("\n"):
        raise DataError(f"{path} is {'truncated' if line else 'empty'}. Download it again.")


def _read(path: Path, numbers: dict[str, int]) -> Tensor:
    unknown = numbers[UNKNOWN]
    text = array("i")
    for line in _lines(path):
        text.extend([numbers.get(word, unknown) for word in line])
    return torch.frombuffer(text, dtype=torch.int32).clone()
