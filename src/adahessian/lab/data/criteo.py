"""Criteo's click logs (the Kaggle challenge), through a binary cache that is mapped into memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import rich.progress
import torch
from platformdirs import user_cache_path
from torch import Tensor

from adahessian.lab.errors import DataError

NUMBERS = 13
CATEGORIES = 26
DAYS = 7

# A row of the cache: label, numbers, categories, and a bit for each category that was empty.
_COLUMNS = 1 + NUMBERS + CATEGORIES + 1
_BYTES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class ClickLog:
    """The rows of a log, in its order. As in DLRM's own scripts, they count as seven days of the same length."""

    rows: npt.NDArray[np.uint32]

    @property
    def training_rows(self) -> int:
        """Rows of the first six days."""
        return len(self.rows) - len(self.rows) // DAYS

    def examples(self, begin: int, end: int, hash_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return consecutive rows: ``log(max(x, 0) + 1)`` of the numbers, buckets of the categories, float labels.

        Args:
            begin: The first row.
            end: The row after the last one.
            hash_size: Buckets per column: a category's value modulo this. Empty ones have one more, the last.
        """
        rows = torch.from_numpy(self.rows[begin:end].astype(np.int64))
        labels, numbers, values, empty = rows.split([1, NUMBERS, CATEGORIES, 1], dim=1)
        is_empty = (empty >> torch.arange(CATEGORIES)) & 1
        buckets = torch.where(is_empty.bool(), hash_size, values % hash_size)
        return numbers.float().log1p(), buckets, labels.squeeze(1).float()


def find_log(file: str, data_dir: Path) -> Path:
    """Return the path of a log in the data folder or in its folder ``criteo``.

    Raises:
        DataError: If it is in neither.
    """
    for path in (data_dir / file, data_dir / "criteo" / file):
        if path.is_file():
            return path
    raise DataError(f"{data_dir} has neither {file} nor criteo/{file}. Put the log there, or pass another --file.")


def read_log(path: Path) -> ClickLog:
    """Map a log into memory. The first time, its 164 bytes per row are written to the user's cache folder.

    Raises:
        DataError: If a line is not a label, 13 numbers and 26 hexadecimal categories, with tabs in between, or if there
            are fewer than seven lines.
    """
    cached = user_cache_path("adahessian", ensure_exists=True) / f"criteo-{_digest(path)}.npy"
    if (log := _mapped(cached)) is None:
        unfinished = cached.with_suffix(f".{os.getpid()}.npy")
        try:
            _convert(path, unfinished)
            unfinished.replace(cached)
        finally:
            unfinished.unlink(missing_ok=True)
        log = _mapped(cached)
        assert log is not None
    return log


def _digest(path: Path) -> str:
    """Return what tells logs apart: a hash of the size, the first and the last megabyte."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(1 << 20)
        file.seek(max(0, size - (1 << 20)))
        return sha256(b"%d\n" % size + head + file.read()).hexdigest()[:16]


def _mapped(cached: Path) -> ClickLog | None:
    try:
        rows = np.load(cached, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return ClickLog(rows) if rows.dtype == np.uint32 and rows.shape[1:] == (_COLUMNS,) else None


def _convert(path: Path, target: Path) -> None:
    with path.open("rb") as file:
        count = sum(1 for _ in file)
    if count < DAYS:
        raise DataError(f"{path} has {count} rows. Take the whole log, which has at least {DAYS}.")
    rows = np.lib.format.open_memmap(target, mode="w+", dtype=np.uint32, shape=(count, _COLUMNS))
    line = 0
    with rich.progress.open(path, "rb", description=f"Converting {path.name}", transient=True) as file:
        while lines := file.readlines(_BYTES_AT_ONCE):
            rows[line : line + len(lines)] = [_row(text, path, line + i) for i, text in enumerate(lines, start=1)]
            line += len(lines)
    rows.flush()


def _row(text: bytes, path: Path, line: int) -> list[int]:
    label, *fields = text.rstrip(b"\r\n").split(b"\t")
    where = f"{path}, line {line}"
    if len(fields) != NUMBERS + CATEGORIES:
        raise DataError(f"{where} has {1 + len(fields)} columns instead of 40. Fetch Criteo's training file again.")
    if label not in (b"0", b"1"):
        raise DataError(f"{where} has the label {label.decode(errors='replace')!r} instead of 0 or 1.")
    try:
        numbers = [max(int(number or 0), 0) for number in fields[:NUMBERS]]
        categories = [int(category or b"0", 16) for category in fields[NUMBERS:]]
    except ValueError as error:
        raise DataError(f"{where} is damaged: {error}.") from error
    if max(*numbers, *categories) >= 1 << 32 or min(categories) < 0:
        raise DataError(f"{where} has a value that does not fit into 32 bits.")
    empty = sum(1 << i for i, category in enumerate(fields[NUMBERS:]) if not category)
    return [int(label), *numbers, *categories, empty]
