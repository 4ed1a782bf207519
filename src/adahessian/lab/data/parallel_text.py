"""Texts in two languages, sentence by sentence."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from adahessian.lab.data.files import read_lines
from adahessian.lab.errors import DataError

# Names of the parts in IWSLT14, Multi30k and WMT14. The first that exists is read.
PART_NAMES = (("train",), ("valid", "val", "newstest2013"), ("test", "test_2016_flickr", "newstest2014"))

# One English sentence of Tatoeba in this many is for validation, and one for the test.
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
    """The three parts of a text."""

    training: Pairs
    validation: Pairs
    test: Pairs


def read_folder(folder: Path, source: str, target: str) -> ParallelText:
    """Read files of one sentence per line, such as ``train.de`` and ``train.en`` for ``"de"`` and ``"en"``."""
    text = ParallelText(*(_read_part(folder, names, source, target) for names in PART_NAMES))
    first = text.training.source[:1000]
    if sum("@@ " in sentence for sentence in first) > len(first) / 2:
        raise DataError(f"{folder} has words that are split into subwords ('@@ '). Pass the text before this step.")
    return text


def _read_part(folder: Path, names: tuple[str, ...], source: str, target: str) -> Pairs:
    name = next((name for name in names if (folder / f"{name}.{source}").exists()), names[0])
    paths = [folder / f"{name}.{language}" for language in (source, target)]
    sides = [[" ".join(line.split()) for line in read_lines(path)] for path in paths]
    for path, side in zip(paths, sides, strict=True):
        if "" in side:
            raise DataError(f"{path}, line {1 + side.index('')} is empty. Remove it from the files of both languages.")
    if len(sides[0]) != len(sides[1]):
        lengths = f"{paths[0]} has {len(sides[0]):,} lines, and {paths[1]} has {len(sides[1]):,}"
        raise DataError(f"{lengths}. Download both again, from the same source.")
    return Pairs(*sides)


def read_tatoeba(folder: Path) -> ParallelText:
    """Read Tatoeba's ``deu.txt``, for translation from German to English.

    Each line has an English sentence, a German one and mostly an attribution. Many translations of one English sentence
    follow each other. The English sentences are shuffled by their hash. A 50th of them, with all their translations, is
    the test part, and another 50th the validation part.
    """
    path = folder / "deu.txt"
    rows: list[tuple[str, str]] = []
    for number, line in enumerate(read_lines(path), 1):
        english, german = (" ".join(cell.split()) for cell in (*line.split("\t"), "")[:2])
        if not english or not german:
            raise DataError(f"{path}, line {number} is not a pair of sentences. Download the file again.")
        rows.append((english, german))
    shuffled = sorted({english for english, _ in rows}, key=lambda text: hashlib.sha256(text.encode()).digest())
    if len(shuffled) < 3:
        raise DataError(f"{path} has only {len(shuffled)} different English sentences. Download the file again.")
    count = max(1, len(shuffled) // TATOEBA_SHARE)
    test, validation = set(shuffled[:count]), set(shuffled[count : 2 * count])
    parts = ParallelText(Pairs([], []), Pairs([], []), Pairs([], []))
    for english, german in rows:
        part = parts.test if english in test else parts.validation if english in validation else parts.training
        part.source.append(german)
        part.target.append(english)
    return parts
