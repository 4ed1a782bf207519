"""Texts as rows of token numbers: words of Penn Treebank and WikiText, and bytes or subwords of any text."""

import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from adahessian.lab.data.files import find_file, read_lines
from adahessian.lab.errors import DataError

END_OF_LINE, UNKNOWN = "<eos>", "<unk>"

_log = logging.getLogger(__name__)


class Text(NamedTuple):
    """The parts of a text, each as one row of token numbers."""

    train: Tensor
    valid: Tensor
    test: Tensor


@dataclass(frozen=True)
class WordSource:
    """The files of a text in words between spaces, and their published length."""

    folder: str  # below the data folder
    file_name: str  # with {} for train, valid or test
    tokens: tuple[int, ...]  # words of the three parts, including the end of each line
    vocabulary: int  # different words, including the end of a line


SOURCES = {
    "ptb": WordSource("ptb", "ptb.{}.txt", (929_589, 73_760, 82_430), 10_000),
    "wikitext103": WordSource("wikitext-103", "wiki.{}.tokens", (103_227_021, 217_646, 245_569), 267_735),
}


def read_words(source: WordSource, data_dir: Path) -> tuple[Text, list[str]]:
    """Read a text with one sentence or paragraph per line as numbers of words. Also return the words.

    An adaptive softmax needs the most frequent words first. Every line ends with ``<eos>``. Words that the training
    text lacks become ``<unk>``. A length other than the published one is logged, because the perplexities of different
    texts cannot be compared.
    """
    train = find_file(data_dir, source.folder, source.file_name.format("train"))
    counts = Counter(chain.from_iterable(_lines(train)))
    if UNKNOWN not in counts:
        raise DataError(f"{train} does not contain {UNKNOWN}. Use the published version with rare words replaced.")
    words = [word for word, _ in counts.most_common()]
    numbers = {word: number for number, word in enumerate(words)}
    text = Text(*(_numbered(train.with_name(source.file_name.format(part)), numbers) for part in Text._fields))
    found = tuple(map(len, text)), len(words)
    if found != (published := (source.tokens, source.vocabulary)):
        message = "%s has %s words (%d different) instead of %s (%d), so perplexities cannot be compared."
        _log.warning(message, train.parent, *found, *published)
    return text, words


def _lines(path: Path) -> Iterator[list[str]]:
    line = ""
    for line in read_lines(path):
        yield [*line.split(), END_OF_LINE]
    if not line.endswith("\n"):
        raise DataError(f"{path} is truncated. Fetch it again.")


def _numbered(path: Path, numbers: dict[str, int]) -> Tensor:
    unknown, text = numbers[UNKNOWN], array("i")
    for line in _lines(path):
        text.extend([numbers.get(word, unknown) for word in line])
    return torch.frombuffer(text, dtype=torch.int32).clone()


def read_bytes(data_dir: Path) -> Text:
    """Read a text as bytes: ``train*.txt``, ``valid*.txt`` and ``test*.txt``, or all text files in such folders."""
    contents = (_content(data_dir, part) for part in Text._fields)
    return Text(*(torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents))


def read_subwords(data_dir: Path, vocabulary: int) -> Text:
    """Read the same files as byte-level subwords, which are learned from the training part."""
    # Words and bytes need no package.
    from adahessian.lab.data.subwords import encode, learn_bpe

    lines = []
    for part in Text._fields:
        try:
            lines.append(_content(data_dir, part).decode().splitlines(keepends=True))
        except UnicodeDecodeError as error:
            problem = f"{part} in {data_dir} is not UTF-8 ({error})"
            raise DataError(f"{problem}. Convert it, or pass --tokens bytes.") from error
    tokenizer = learn_bpe(lines[0], vocabulary)
    return Text(*(encode(tokenizer, part) for part in lines))


def _content(data_dir: Path, part: str) -> bytes:
    folder = data_dir / "novels" if (data_dir / "novels").is_dir() else data_dir
    files = sorted(folder.glob(f"{part}*.txt")) or sorted((folder / part).rglob("*.txt"))
    content = b"".join(path.read_bytes() for path in files)
    if not content:
        raise DataError(f"{folder} has no text in {part}*.txt or {part}/. Put it there, or pass another --data-dir.")
    return content
