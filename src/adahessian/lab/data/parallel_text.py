"""Texts in two languages, sentence by sentence."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from adahessian.lab.data.errors import DataError

# Each part goes by the first of these names that is there: IWSLT14's, Multi30k's, WMT14's.
TRAINING_NAMES = ("train",)
VALIDATION_NAMES = ("valid", "val", "newstest2013")
TEST_NAMES = ("test", "test_2016_flickr", "newstest2014")

TATOEBA_NAME = "deu.txt"
# One English sentence in so many is for validation, and as many for the test.
TATOEBA_SHARE = 50


@dataclass(frozen=True)
class Pairs:
    """Sentences and their translations, with single spaces between words."""

    source: list[str]
    target: list[str]

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class ParallelText:
    """A text in its three parts."""

    training: Pairs
    validation: Pairs
    test: Pairs


def read_folder(folder: Path, source: str, target: str) -> ParallelText:
    """Read files of one sentence a line, such as ``train.de`` and ``train.en``, ``valid.*`` and ``test.*``.

    Args:
        folder: Where the files are. Multi30k's and WMT14's own names of the parts do as well.
        source: The ending of the files to translate from, such as ``"de"``.
        target: The ending of the files to translate to.

    Raises:
        DataError: If a file is missing, has an empty line or is not UTF-8, if the two sides differ in length, or if the
            text was split into subwords already.
    """
    training = _read_part(folder, TRAINING_NAMES, source, target)
    _refuse_subwords(training, folder)
    return ParallelText(
        training,
        _read_part(folder, VALIDATION_NAMES, source, target),
        _read_part(folder, TEST_NAMES, source, target),
    )


def read_tatoeba(folder: Path) -> ParallelText:
    """Read Tatoeba's ``deu.txt``, to translate from German to English.

    The file has an English sentence, a German one and mostly an attribution in each line, sorted by length, with many
    translations of one English sentence. It comes in no parts. Here the English sentences are shuffled by a hash of
    their own, and each goes with all of its translations to one part: a 50th to the test, as many to validation.

    Raises:
        DataError: If the file is missing, not UTF-8, or has a line without two sentences.
    """
    path = folder / TATOEBA_NAME
    rows: list[tuple[str, str]] = []
    for number, line in enumerate(_lines(path), 1):
        english, german = (_single_spaced(cell) for cell in (*line.split("\t"), "")[:2])
        if not english or not german:
            raise DataError(
                f"{path}, line {number}: expected an English and a German sentence with a tab between them, but got "
                f"{line[:80]!r}. Get the German-English file of Tatoeba's sentence pairs again"
            )
        rows.append((english, german))
    shuffled = sorted({english for english, _ in rows}, key=lambda text: hashlib.sha256(text.encode()).digest())
    if len(shuffled) < 3:
        raise DataError(f"{path}: {len(shuffled)} different English sentences are too few for three parts")
    count = max(1, len(shuffled) // TATOEBA_SHARE)
    test, validation = set(shuffled[:count]), set(shuffled[count : 2 * count])
    parts = ParallelText(Pairs([], []), Pairs([], []), Pairs([], []))
    for english, german in rows:
        part = parts.test if english in test else parts.validation if english in validation else parts.training
        part.source.append(german)
        part.target.append(english)
    return parts


def _read_part(folder: Path, names: tuple[str, ...], source: str, target: str) -> Pairs:
    name = next((name for name in names if (folder / f"{name}.{source}").exists()), names[0])
    paths = [folder / f"{name}.{language}" for language in (source, target)]
    sides = [_sentences(path) for path in paths]
    if len(sides[0]) != len(sides[1]):
        raise DataError(
            f"{paths[0]} has {len(sides[0]):,} lines and {paths[1]} has {len(sides[1]):,}, where line by line one is "
            "the translation of the other. Get both again, from one source"
        )
    return Pairs(*sides)


def _sentences(path: Path) -> list[str]:
    sentences = [_single_spaced(line) for line in _lines(path)]
    for number, sentence in enumerate(sentences, 1):
        if not sentence:
            raise DataError(f"{path}, line {number}: empty. Remove this line from the files of both languages")
    return sentences


def _lines(path: Path) -> list[str]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}. Put the file there, or name another --data-dir") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {number}: not UTF-8. Get the file again, or convert it") from error
    # Other characters that Python takes for the end of a line are part of a sentence.
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise DataError(f"{path}: empty. Get the file again")
    return lines


def _single_spaced(text: str) -> str:
    return " ".join(text.split())


def _refuse_subwords(training: Pairs, folder: Path) -> None:
    first = training.source[:1000]
    if sum("@@ " in sentence for sentence in first) > len(first) / 2:
        raise DataError(
            f"{folder}: the words of the training text are split into subwords ('@@ ') already. Give the folder with "
            "the text from before that step of the preparation"
        )
