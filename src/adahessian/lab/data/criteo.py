"""Criteo's click logs (the Kaggle challenge), through a binary cache that is mapped into memory."""

from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import rich.progress
import torch
from platformdirs import user_cache_path
from torch import Tensor

from adahessian.lab.errors import DataError
from adahessian.lab.training.atomic_files import atomic_write

Rows: TypeAlias = npt.NDArray[np.uint32]

NUMBERS, CATEGORIES = 13, 26
# As in DLRM's own scripts, the rows of a log count as seven days of the same length.
DAYS = 7

# A row of the cache: label, numbers, categories, and a bit for each category that was empty.
_COLUMNS = 1 + NUMBERS + CATEGORIES + 1
_BYTES_AT_ONCE = 1 << 22


def examples(rows: Rows, hash_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``log(max(x, 0) + 1)`` of the numbers, buckets of the categories and float labels of some rows of a log.

    The bucket of a category is its value modulo ``hash_size``. Empty categories have one more bucket, the last.
    """
    columns = torch.from_numpy(rows.astype(np.int64))
    labels, numbers, values, empty = columns.split([1, NUMBERS, CATEGORIES, 1], dim=1)
    is_empty = (empty >> torch.arange(CATEGORIES)) & 1
    buckets = torch.where(is_empty.bool(), hash_size, values % hash_size)
    return numbers.float().log1p(), buckets, labels.squeeze(1).float()


def read_log(path: Path) -> tuple[Rows, Rows]:
    """Map the rows of the first six days and of the last day into memory.

    The first time, 164 bytes per row are written to the user's cache folder.
    """
    cached = user_cache_path("adahessian") / f"criteo-{_digest(path)}.npy"
    try:
        rows = np.load(cached, mmap_mode="r")
    except (OSError, ValueError, EOFError):  # it is missing or damaged
        with atomic_write(cached) as file:
            _convert(path, file)
        rows = np.load(cached, mmap_mode="r")
    training_rows = len(rows) - len(rows) // DAYS
    return rows[:training_rows], rows[training_rows:]


def _digest(path: Path) -> str:
    """Return a fingerprint of a log: a hash of the size and of the first and the last megabyte."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(1 << 20)
        file.seek(max(0, size - (1 << 20)))
        return sha256(b"%d\n" % size + head + file.read()).hexdigest()[:16]


def _convert(path: Path, target: BinaryIO) -> None:
    with path.open("rb") as file:
        count = sum(1 for _ in file)
    if count < DAYS:
        raise DataError(f"{path} has {count} rows, fewer than {DAYS}. Use the whole log.")
    header = {"descr": "<u4", "fortran_order": False, "shape": (count, _COLUMNS)}
    np.lib.format.write_array_header_1_0(target, header)
    done = 0
    with rich.progress.open(path, "rb", description=f"Converting {path.name}", transient=True) as file:
        while lines := file.readlines(_BYTES_AT_ONCE):
            rows = [_row(text, f"{path}, line {number}") for number, text in enumerate(lines, done + 1)]
            target.write(np.array(rows, "<u4").tobytes())
            done += len(lines)


def _row(text: bytes, where: str) -> list[int]:
    label, *fields = text.rstrip(b"\r\n").split(b"\t")
    try:
        if len(fields) != NUMBERS + CATEGORIES:
            raise ValueError(f"it has {1 + len(fields)} columns instead of {1 + NUMBERS + CATEGORIES}")
        if label not in (b"0", b"1"):
            raise ValueError(f"its label is {label.decode(errors='replace')!r} instead of 0 or 1")
        numbers = [max(int(number or 0), 0) for number in fields[:NUMBERS]]
        categories = [int(category or b"0", 16) for category in fields[NUMBERS:]]
        if max(*numbers, *categories) >= 1 << 32 or min(categories) < 0:
            raise ValueError("a value does not fit into 32 bits")
    except ValueError as error:
        raise DataError(f"{where} is damaged ({error}). Fetch Criteo's training file again.") from error
    empty = sum(1 << i for i, category in enumerate(fields[NUMBERS:]) if not category)
    return [int(label), *numbers, *categories, empty]
