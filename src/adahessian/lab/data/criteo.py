"""Reads Criteo's click logs (the Kaggle challenge), through a binary cache that is mapped into memory."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from adahessian.lab.data.errors import DataError
from adahessian.lab.files import cache_folder

DENSE = 13
CATEGORIES = 26
DAYS = 7

# A row of the cache: label, numbers, categories, and a bit for each category that was empty.
_COLUMNS = 1 + DENSE + CATEGORIES + 1
_ROWS_AT_ONCE = 16384
_BYTES_AT_ONCE = 1 << 22

Rows = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class ClickLog:
    """The rows of a log, in its order: the first six days are to train on, the last one is to test on.

    As in DLRM's own preparation the rows are taken for seven days of the same length.
    """

    rows: Rows

    @property
    def training_rows(self) -> int:
        """Rows of the first six days."""
        return len(self.rows) - len(self.rows) // DAYS

    def examples(self, begin: int, end: int, hash_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Some consecutive rows as a model takes them.

        Args:
            begin: The first row.
            end: The row behind the last one.
            hash_size: Buckets of a category, by the remainder of its value. One more, the last, is for empty ones.

        Returns:
            Numbers as ``log(max(x, 0) + 1)`` of shape (N, 13), buckets of shape (N, 26), and labels, 0 or 1, as floats.
        """
        rows = torch.from_numpy(self.rows[begin:end].astype(np.int64))
        labels, numbers, values, empty = rows.split([1, DENSE, CATEGORIES, 1], dim=1)
        is_empty = (empty >> torch.arange(CATEGORIES)) & 1
        buckets = torch.where(is_empty.bool(), hash_size, values % hash_size)
        return numbers.float().log1p(), buckets, labels.squeeze(1).float()


def find_log(file: str, data_dir: Path) -> Path:
    """The log in the data folder, or in its folder ``criteo``.

    Raises:
        DataError: If it is in neither.
    """
    for path in (data_dir / file, data_dir / "criteo" / file):
        if path.is_file():
            return path
    raise DataError(
        f"no {file} in {data_dir} or in {data_dir / 'criteo'}: put the train.txt of Criteo's Kaggle challenge there, "
        "or name another file with such rows"
    )


def read_log(path: Path, cache_dir: Path | None = None) -> ClickLog:
    """Map a log into memory. The first time it is written in binary form, at 164 bytes a row.

    Args:
        path: Lines of a label, 13 numbers and 26 hexadecimal categories, with tabs in between.
        cache_dir: Where the binary form is; None takes ``adahessian`` in ``XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        DataError: If a line is anything else, or there are fewer than seven.
    """
    folder = cache_dir or cache_folder()
    key = _key(path)
    for cached in folder.glob(f"criteo-{key}-*.npy"):
        if (rows := _mapped(cached)) is not None:
            return ClickLog(rows)
        with suppress(FileNotFoundError):  # another process was faster
            cached.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f"criteo-{key}-", suffix=".part", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            checksum = _convert(path, file)
        # The name says what the rows add up to, so that one rename makes both known.
        cached = folder / f"criteo-{key}-{checksum:08x}.npy"
        Path(name).replace(cached)
    finally:
        Path(name).unlink(missing_ok=True)
    return ClickLog(np.load(cached, mmap_mode="r", allow_pickle=False))


def _key(path: Path) -> str:
    """What tells one log from another: its size, and what it begins and ends with."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(1 << 20)
        file.seek(max(0, size - (1 << 20)))
        return sha256(b"%d\n" % size + head + file.read()).hexdigest()[:16]


def _mapped(cached: Path) -> Rows | None:
    """The rows of a binary form, or None if it is not what was written."""
    try:
        rows: Rows = np.load(cached, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if rows.dtype != np.uint32 or rows.ndim != 2 or rows.shape[1] != _COLUMNS:
        return None
    checksum = 0
    for begin in range(0, len(rows), _ROWS_AT_ONCE):
        checksum = zlib.crc32(rows[begin : begin + _ROWS_AT_ONCE].tobytes(), checksum)
    return rows if cached.stem.endswith(f"-{checksum:08x}") else None


def _convert(path: Path, file: BinaryIO) -> int:
    """Write the rows of a log as an array, and give their checksum."""
    # How many rows there are is known in the end. numpy leaves room for that in the header.
    header_size = _write_header(file, 0)
    count = checksum = 0
    columns = (TextColumn(f"reading {path.name}, once"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        bar = progress.add_task("", total=path.stat().st_size)
        for rows, bytes_read in _parsed(path):
            data = rows.tobytes()
            file.write(data)
            checksum = zlib.crc32(data, checksum)
            count += len(rows)
            progress.update(bar, completed=bytes_read)
    if count < DAYS:
        raise DataError(f"{path} has {count} rows, but seven days need as many at least: take the whole file")
    file.seek(0)
    if _write_header(file, count) != header_size:
        raise RuntimeError(f"the header of an array grew with its length, in numpy {np.__version__}")
    return checksum


def _write_header(file: BinaryIO, rows: int) -> int:
    np.lib.format.write_array_header_1_0(file, {"descr": "<u4", "fortran_order": False, "shape": (rows, _COLUMNS)})
    return file.tell()


def _parsed(path: Path) -> Iterator[tuple[Rows, int]]:
    """Rows, some at a time, with the bytes that were read so far."""
    line, bytes_read = 1, 0
    with path.open("rb") as file:
        while lines := file.readlines(_BYTES_AT_ONCE):
            rows = [_row(text, path, number) for number, text in enumerate(lines, start=line)]
            line += len(lines)
            bytes_read += sum(map(len, lines))
            yield np.array(rows, dtype="<u4"), bytes_read


def _row(text: bytes, path: Path, line: int) -> list[int]:
    fields = text.rstrip(b"\r\n").split(b"\t")
    if len(fields) != 1 + DENSE + CATEGORIES:
        raise DataError(
            f"{path}, line {line}: {len(fields)} columns, but a label, 13 numbers and 26 categories are 40: the file "
            "is truncated or is not Criteo's training file"
        )
    label, numbers, categories = fields[0], fields[1 : 1 + DENSE], fields[1 + DENSE :]
    if label not in (b"0", b"1"):
        raise DataError(f"{path}, line {line}: the label is {label.decode(errors='replace')!r}, but it must be 0 or 1")
    try:
        row = [int(label)]
        row += [max(int(number), 0) if number else 0 for number in numbers]
        row += [int(category, 16) if category else 0 for category in categories]
    except ValueError as error:
        raise DataError(f"{path}, line {line}: {error}") from error
    if max(row) >= 1 << 32 or min(row) < 0:
        raise DataError(f"{path}, line {line}: a value does not fit into 32 bits")
    row.append(sum(1 << number for number, category in enumerate(categories) if not category))
    return row
