"""CIFAR-10 as its owners publish it: the binary version or the Python version, unpacked or as the archive."""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adahessian.lab.data.errors import DataError

Examples: TypeAlias = tuple[Tensor, Tensor]

CLASSES = 10
IMAGE_SHAPE = (3, 32, 32)
_BYTES_PER_IMAGE = 3 * 32 * 32
_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")

_Rows: TypeAlias = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


def read_cifar10(data_dir: Path) -> tuple[Examples, Examples]:
    """Images and labels to train on, and those to test on.

    Args:
        data_dir: A folder that is or holds ``cifar-10-batches-bin`` or ``cifar-10-batches-py``, or holds
            ``cifar-10-binary.tar.gz`` or ``cifar-10-python.tar.gz``; or one of these archives itself. An archive is
            read as it is, and nothing is unpacked. Batches may have fewer rows than the published ones, if all five
            to train on have as many.

    Returns:
        For each of the two, uint8 images of shape (N, 3, 32, 32) and int64 labels.

    Raises:
        DataError: If there is no such thing, or if what is there is truncated or in another format.
    """
    where, contents = _contents(data_dir)
    rows = []
    for name in _BATCHES:
        for suffix, read in ((".bin", _binary_rows), ("", _pickled_rows)):
            if name + suffix in contents:
                rows.append(read(contents[name + suffix], f"{where}/{name}{suffix}"))
                break
        else:
            raise DataError(f"{where} has no {name}: CIFAR-10 has five data batches and a test batch. Fetch it again.")
    counts = [len(labels) for _, labels in rows[:-1]]
    if min(counts) < max(counts):
        raise DataError(
            f"{where}/{_BATCHES[counts.index(min(counts))]} is truncated: it has {min(counts):,} images, where others "
            f"have {max(counts):,}. Fetch it again."
        )
    return _joined(rows[:-1], where, "data batches"), _joined(rows[-1:], where, "test batch")


def _contents(data_dir: Path) -> tuple[Path, Mapping[str, bytes]]:
    """Where the six batches are, and their bytes by name."""
    for folder, suffix in (("cifar-10-batches-bin", ".bin"), ("cifar-10-batches-py", "")):
        for place in (data_dir, data_dir / folder):
            files = [place / f"{name}{suffix}" for name in _BATCHES]
            if any(file.is_file() for file in files):
                return place, {file.name: file.read_bytes() for file in files if file.is_file()}
    for archive in (data_dir, data_dir / "cifar-10-binary.tar.gz", data_dir / "cifar-10-python.tar.gz"):
        if archive.is_file():
            return archive, _members(archive)
    raise DataError(
        f"No CIFAR-10 in {data_dir}: expected cifar-10-batches-bin or cifar-10-batches-py, or the archive "
        f"cifar-10-binary.tar.gz or cifar-10-python.tar.gz. Its owners publish all of them."
    )


def _members(archive: Path) -> dict[str, bytes]:
    wanted = {name + suffix for name in _BATCHES for suffix in (".bin", "")}
    found = {}
    try:
        with tarfile.open(archive, "r:gz") as members:
            for member in members:
                name = Path(member.name).name
                if name in wanted and (stream := members.extractfile(member)) is not None:
                    found[name] = stream.read()
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise DataError(f"{archive} is truncated or not a tar.gz archive ({error}). Fetch it again.") from error
    return found


def _joined(rows: list[_Rows], where: Path, part: str) -> Examples:
    images = np.concatenate([images for images, _ in rows])
    labels = np.concatenate([labels for _, labels in rows])
    if not len(labels):
        raise DataError(f"{where} has no images in its {part}: the files are empty. Fetch CIFAR-10 again.")
    return torch.from_numpy(images).view(-1, *IMAGE_SHAPE), torch.from_numpy(labels)


def _checked(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], file: str) -> _Rows:
    if len(labels) and not 0 <= labels.min() <= labels.max() < CLASSES:
        wrong = labels[(labels < 0) | (labels >= CLASSES)][0]
        raise DataError(f"{file} has the label {wrong}, where CIFAR-10 has labels from 0 to 9. Is it another data set?")
    return images, labels


def _binary_rows(content: bytes, file: str) -> _Rows:
    """Rows of a byte for the label and 3,072 for the image, channel by channel."""
    if len(content) % (1 + _BYTES_PER_IMAGE):
        raise DataError(
            f"{file} is truncated: {len(content)} bytes are not a whole number of rows of {1 + _BYTES_PER_IMAGE}. "
            f"Fetch it again."
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + _BYTES_PER_IMAGE)
    return _checked(rows[:, 1:], rows[:, 0].astype(np.int64), file)


class _Array:
    """Stands in for numpy's array while a pickle is read, and only keeps what it would be made of.

    numpy's own would believe whatever a file says of its memory.
    """

    def __init__(self, *_: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Dtype:
    """Stands in for numpy's dtype while a pickle is read."""

    def __init__(self, name: object, *_: object) -> None:
        self.name = name

    def __setstate__(self, _: object) -> None:
        pass


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}


class _Unpickler(pickle.Unpickler):
    """Reads what the Python version of CIFAR-10 is made of: dicts, lists, numbers, bytes and arrays of bytes."""

    def __init__(self, content: bytes, file: str) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.file = file

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _ALLOWED:
            raise DataError(
                f"{self.file} asks for {module}.{name}, which no batch of CIFAR-10 needs: it may be meant to run code. "
                f"Do not use this file; fetch CIFAR-10 from its owners."
            )
        return _ALLOWED[module, name]


def _pickled_rows(content: bytes, file: str) -> _Rows:
    try:
        batch = _Unpickler(content, file).load()
        _, (count, columns), dtype, by_columns, pixels = batch[b"data"].state
        labels = np.array(batch[b"labels"], np.int64).reshape(-1)
        if (columns, dtype.name, bool(by_columns)) != (_BYTES_PER_IMAGE, b"u1", False):
            raise ValueError(f"data of {columns} columns of {dtype.name!r}")
        images = np.frombuffer(pixels, np.uint8).reshape(count, columns)
        if len(labels) != count:
            raise ValueError(f"{len(labels)} labels for {count} images")
    except DataError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise DataError(
            f"{file} is truncated or not a batch of CIFAR-10's Python version ({type(error).__name__}: {error}). "
            f"Fetch it again."
        ) from error
    return _checked(images, labels, file)
