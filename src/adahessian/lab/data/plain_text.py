"""Plain text as numbers: bytes, or subwords learned from the training part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adahessian.lab.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PARTS = ("train", "valid", "test")

# Folder below the data folder in which the text is looked for first.
FOLDER = "novels"

# Lines per call of the tokenizer, which bounds memory.
CHUNK = 100_000


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """The parts of a text, each as one row of token numbers."""

    train: Tensor
    valid: Tensor
    test: Tensor


def read_bytes(data_dir: Path) -> PlainText:
    """Read a text as bytes: ``train*.txt``, ``valid*.txt`` and ``test*.txt``, or all text files in folders so named.

    Raises:
        DataError: If a part is missing or empty.
    """
    return PlainText(**{part: torch.frombuffer(bytearray(_read(data_dir, part)), dtype=torch.uint8) for part in PARTS})


def read_subwords(data_dir: Path, vocabulary: int) -> PlainText:
    """Read a text as byte-level subwords, which are learned from the training part.

    Raises:
        DataError: If a part is missing, empty or not UTF-8.
    """
    # Bytes need no package.
    from adahessian.lab.data.subwords import cached, key_of, learn_bpe

    lines = {part: _decode(_read(data_dir, part), data_dir, part).splitlines(keepends=True) for part in PARTS}
    arrays = cached(
        "texts",
        key_of(str(vocabulary), (line for part in PARTS for line in [part, *lines[part]])) + ".npz",
        load=lambda path: dict(np.load(path)),
        make=lambda: _encode(learn_bpe(lines[PARTS[0]], vocabulary), lines),
        save=lambda made, file: np.savez(file, **made),
    )
    return PlainText(**{part: torch.from_numpy(arrays[part]) for part in PARTS})


def _read(data_dir: Path, part: str) -> bytes:
    folder = data_dir / FOLDER if _files(data_dir / FOLDER, PARTS[0]) else data_dir
    content = b"".join(path.read_bytes() for path in _files(folder, part))
    if not content:
        raise DataError(f"{folder} has no text in {part}*.txt or {part}/. Put it there, or pass another --data-dir.")
    return content


def _files(folder: Path, part: str) -> list[Path]:
    return sorted(folder.glob(f"{part}*.txt")) or sorted((folder / part).rglob("*.txt"))


def _decode(content: bytes, data_dir: Path, part: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{part} in {data_dir} is not UTF-8 ({error}). Convert it, or pass --tokens bytes.") from error


def _encode(tokenizer: Tokenizer, lines: dict[str, list[str]]) -> dict[str, npt.NDArray[np.int32]]:
    encoded = {}
    for part, text in lines.items():
        chunks = (text[first : first + CHUNK] for first in range(0, len(text), CHUNK))
        encodings = (encoding for chunk in chunks for encoding in tokenizer.encode_batch_fast(chunk))
        encoded[part] = np.fromiter((number for encoding in encodings for number in encoding.ids), np.int32)
    return encoded
