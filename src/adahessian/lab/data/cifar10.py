"""CIFAR-10 in the binary version that its owners publish, unpacked or as the archive."""

from __future__ import annotations

import tarfile
import zlib
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adahessian.lab.errors import DataError

CLASSES = 10
_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
_ARCHIVE = "cifar-10-binary.tar.gz"
_ROW_BYTES = 1 + 3 * 32 * 32

_Rows: TypeAlias = npt.NDArray[np.uint8]


def read_cifar10(data_dir: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return training and test examples: uint8 images of shape (N, 3, 32, 32) and int64 labels.

    Args:
        data_dir: A folder that is or holds ``cifar-10-batches-bin``, or holds ``cifar-10-binary.tar.gz``; or this
            archive itself, which is read without unpacking it. The files may have fewer rows than published, if all
            five training files have the same number.

    Raises:
        DataError: If a file is missing, truncated or in another format.
    """
    source, contents = _read_files(data_dir)
    if missing := [name for name in _FILES if name not in contents]:
        raise DataError(f"{source} has no {missing[0]}. Fetch CIFAR-10 again.")
    rows = [_rows(contents[name], f"{source}/{name}") for name in _FILES]
    wanted = [max(1, *map(len, rows[:-1]))] * 5 + [1]
    for name, each, least in zip(_FILES, rows, wanted, strict=True):
        if len(each) < least:
            raise DataError(f"{source}/{name} has {len(each)} images instead of {least} or more. Fetch it again.")
    return _examples(np.concatenate(rows[:-1])), _examples(rows[-1])


def _read_files(data_dir: Path) -> tuple[Path, dict[str, bytes]]:
    for folder in (data_dir, data_dir / "cifar-10-batches-bin"):
        if found := [folder / name for name in _FILES if (folder / name).is_file()]:
            return folder, {file.name: file.read_bytes() for file in found}
    for archive in (data_dir, data_dir / _ARCHIVE):
        if archive.is_file():
            return archive, _read_archive(archive)
    raise DataError(f"{data_dir} does not hold CIFAR-10. Put cifar-10-batches-bin or {_ARCHIVE} into it.")


def _read_archive(archive: Path) -> dict[str, bytes]:
    found = {}
    try:
        with tarfile.open(archive, "r:gz") as members:
            for member in members:
                name = Path(member.name).name
                if name in _FILES and (stream := members.extractfile(member)) is not None:
                    found[name] = stream.read()
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise DataError(f"{archive} is truncated or not a tar.gz archive ({error}). Fetch it again.") from error
    return found


def _rows(content: bytes, file: str) -> _Rows:
    """Return one row per image: a byte for its label, then its pixels, channel by channel."""
    if len(content) % _ROW_BYTES:
        raise DataError(f"{file} is truncated: {len(content)} bytes are not rows of {_ROW_BYTES}. Fetch it again.")
    rows = np.frombuffer(content, np.uint8).reshape(-1, _ROW_BYTES)
    if (label := rows[:, 0].max(initial=0)) >= CLASSES:
        raise DataError(f"{file} has the label {label}, but CIFAR-10 has labels from 0 to 9. Fetch CIFAR-10 again.")
    return rows


def _examples(rows: _Rows) -> tuple[Tensor, Tensor]:
    return torch.tensor(rows[:, 1:]).view(-1, 3, 32, 32), torch.tensor(rows[:, 0], dtype=torch.int64)
