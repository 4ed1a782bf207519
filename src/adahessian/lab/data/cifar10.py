"""CIFAR-10 in the binary version that its owners publish."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adahessian.lab.data.files import find_file
from adahessian.lab.errors import DataError

CLASSES = 10
_ROW_BYTES = 1 + 3 * 32 * 32


def read_cifar10(data_dir: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return training and test examples: uint8 images of shape (N, 3, 32, 32) and int64 labels.

    The files may have fewer rows than published, if all five training files have the same number.
    """
    test = find_file(data_dir, "cifar-10-batches-bin", "test_batch.bin")
    parts = {path: _read_rows(path) for path in (test.with_name(f"data_batch_{number}.bin") for number in range(1, 6))}
    longest = max(map(len, parts.values()))
    for path, rows in parts.items():
        if len(rows) < longest:
            raise DataError(f"{path} has {len(rows)} images instead of {longest}. Fetch CIFAR-10 again.")
    return _examples(np.concatenate([*parts.values()])), _examples(_read_rows(test))


def _read_rows(path: Path) -> npt.NDArray[np.uint8]:
    """Return one row per image: a byte for its label, then its pixels, channel by channel."""
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}). Fetch CIFAR-10 again.") from error
    if content.size == 0 or content.size % _ROW_BYTES:
        problem = f"{path} is truncated, because {content.size} bytes are not rows of {_ROW_BYTES}"
        raise DataError(f"{problem}. Fetch CIFAR-10 again.")
    rows = content.reshape(-1, _ROW_BYTES)
    if (label := rows[:, 0].max()) >= CLASSES:
        raise DataError(f"{path} has the label {label}, but CIFAR-10 has labels from 0 to 9. Fetch CIFAR-10 again.")
    return rows


def _examples(rows: npt.NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
    return torch.tensor(rows[:, 1:]).view(-1, 3, 32, 32), torch.tensor(rows[:, 0], dtype=torch.int64)
