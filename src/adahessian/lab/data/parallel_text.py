"""Texts in two languages, sentence by sentence."""

from pathlib import Path
from typing import TypeAlias

from adahessian.lab.data.files import read_lines
from adahessian.lab.errors import DataError

Pairs: TypeAlias = tuple[list[str], list[str]]
"""Sentences and their translations, with single spaces between words."""

# Names of the parts in IWSLT14, Multi30k and WMT14. The first that exists is read.
_PART_NAMES = (("train",), ("valid", "val", "newstest2013"), ("test", "test_2016_flickr", "newstest2014"))


def read_folder(folder: Path, source: str, target: str) -> tuple[Pairs, Pairs, Pairs]:
    """Return the pairs for training, validation and test, from files such as ``train.de`` with a sentence per line."""
    training, validation, test = (_read_part(folder, names, (source, target)) for names in _PART_NAMES)
    first = training[0][:1000]
    if sum("@@ " in sentence for sentence in first) > len(first) / 2:
        raise DataError(f"{folder} has words that are split into subwords ('@@ '). Pass the text before this step.")
    return training, validation, test


def _read_part(folder: Path, names: tuple[str, ...], languages: tuple[str, str]) -> Pairs:
    name = next((name for name in names if (folder / f"{name}.{languages[0]}").exists()), names[0])
    paths = [folder / f"{name}.{language}" for language in languages]
    source, target = ([" ".join(line.split()) for line in read_lines(path)] for path in paths)
    for path, side in zip(paths, (source, target), strict=True):
        if "" in side:
            raise DataError(f"{path}, line {1 + side.index('')} is empty. Remove it from the files of both languages.")
    if len(source) != len(target):
        lengths = f"{paths[0]} has {len(source):,} lines, and {paths[1]} has {len(target):,}"
        raise DataError(f"{lengths}. Download both again, from the same source.")
    return source, target
