"""Penn Treebank and WikiText: words between blanks, a line a sentence or paragraph."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adahessian.lab.data.errors import DataError

END_OF_LINE = "<eos>"
UNKNOWN = "<unk>"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Where the three parts of a text lie, and how long its owner says they are."""

    title: str
    """What messages call it."""

    folder: str
    """The sub-folder that its archive unpacks to, or that people keep it in."""

    file_name: str
    """A file's name, with ``{}`` for ``train``, ``valid`` or ``test``."""

    tokens: tuple[int, int, int]
    """Words of the training, validation and test text, an end of line counted as one."""

    vocabulary: int
    """Different words, the end of line counted as one."""


PTB = TextSource(
    title="Penn Treebank",
    folder="ptb",
    file_name="ptb.{}.txt",
    tokens=(929_589, 73_760, 82_430),
    vocabulary=10_000,
)
WIKITEXT2 = TextSource(
    title="WikiText-2",
    folder="wikitext-2",
    file_name="wiki.{}.tokens",
    tokens=(2_088_628, 217_646, 245_569),
    vocabulary=33_278,
)
WIKITEXT103 = TextSource(
    title="WikiText-103",
    folder="wikitext-103",
    file_name="wiki.{}.tokens",
    tokens=(103_227_021, 217_646, 245_569),
    vocabulary=267_735,
)


@dataclass(frozen=True, kw_only=True)
class WordText:
    """A text as numbers of words, each part one row of int32."""

    words: tuple[str, ...]
    """The words of the training text, the most frequent first: the order that an adaptive softmax needs."""

    train: Tensor
    valid: Tensor
    test: Tensor


def read_word_text(source: TextSource, data_dir: Path) -> WordText:
    """Read the three parts of a text. Every line ends with the word ``<eos>``.

    A word that the training text lacks is read as ``<unk>``. Where the length differs from the owner's, the log says
    so: perplexities of another text cannot be compared.

    Args:
        source: Which text.
        data_dir: The folder with the files, or the one that holds their usual sub-folder.

    Raises:
        DataError: If a file is missing, empty, cut off, or not the text with rare words replaced.
    """
    train, valid, test = _find(source, data_dir)
    counts: Counter[str] = Counter()
    for line in _lines(train):
        counts.update(line)
    if UNKNOWN not in counts:
        raise DataError(
            f"{train} has no {UNKNOWN} in it: it is not {source.title} with rare words replaced, as its owner "
            f"publishes it. Fetch that ({source.file_name.format('train')} and its companions)."
        )
    words = tuple(word for word, _ in counts.most_common())
    numbers = {word: number for number, word in enumerate(words)}
    text = WordText(words=words, train=_read(train, numbers), valid=_read(valid, numbers), test=_read(test, numbers))
    found = (len(text.train), len(text.valid), len(text.test)), len(words)
    if found != (source.tokens, source.vocabulary):
        _LOG.warning(
            "%s has %s words and a vocabulary of %d, not the %s and %d of %s: its perplexities are not comparable "
            "with published ones.",
            train.parent,
            " / ".join(f"{count:,}" for count in found[0]),
            found[1],
            " / ".join(f"{count:,}" for count in source.tokens),
            source.vocabulary,
            source.title,
        )
    return text


def _find(source: TextSource, data_dir: Path) -> tuple[Path, Path, Path]:
    names = [source.file_name.format(part) for part in ("train", "valid", "test")]
    folders = (data_dir, data_dir / source.folder)
    for folder in folders:
        paths = [folder / name for name in names]
        missing = [path for path in paths if not path.is_file()]
        if not missing:
            return paths[0], paths[1], paths[2]
        if len(missing) < len(paths):
            raise DataError(f"{missing[0]} is missing, beside its companions. Put {source.title}'s three files there.")
    raise DataError(
        f"{source.title} is not in {data_dir}, nor in its sub-folder {source.folder}: no {names[0]}. Put {names[0]}, "
        f"{names[1]} and {names[2]} into one of them, or name their folder with --data-dir."
    )


def _lines(path: Path) -> Iterator[list[str]]:
    line = ""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                yield [*line.split(), END_OF_LINE]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8 ({error}). Fetch it again.") from error
    if not line:
        raise DataError(f"{path} is empty. Fetch it again.")
    if not line.endswith("\n"):
        raise DataError(f"{path} ends in the middle of a line, so it is cut off. Fetch it again.")


def _read(path: Path, numbers: dict[str, int]) -> Tensor:
    unknown = numbers[UNKNOWN]
    text = array("i")
    for line in _lines(path):
        text.extend([numbers.get(word, unknown) for word in line])
    return torch.frombuffer(text, dtype=torch.int32).clone()
