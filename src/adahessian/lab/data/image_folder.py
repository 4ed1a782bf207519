"""Folders of images in the layout of ImageNet: ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from adahessian.lab.data.augmentation import random_box
from adahessian.lab.errors import DataError
from adahessian.lab.training.random_streams import random_stream

_SUFFIXES = (".jpeg", ".jpg", ".png")
_DECODED_AT_A_TIME = 256

View: TypeAlias = Callable[[Image.Image, int, int], Image.Image]
"""Takes an image, the epoch and the index of the image, and returns a square part of it."""


@dataclass(frozen=True)
class ListedImages:
    """Paths of images and their classes."""

    files: tuple[str, ...]
    labels: Tensor

    def select(self, indices: Tensor) -> ListedImages:
        """Return some of the images."""
        return ListedImages(tuple(self.files[index] for index in indices), self.labels[indices])


def list_image_folder(data_dir: Path) -> tuple[ListedImages, ListedImages, tuple[str, ...]]:
    """Return the training and validation images in the order of their names, and the names of the classes."""
    classes = tuple(folder.name for folder in _folders(data_dir / "train"))
    return _list_images(data_dir / "train", classes), _list_images(data_dir / "val", classes), classes


def _folders(part: Path) -> list[Path]:
    return sorted(filter(Path.is_dir, part.glob("*")))


def _list_images(part: Path, classes: tuple[str, ...]) -> ListedImages:
    listed: list[tuple[str, int]] = []
    for folder in _folders(part):
        if folder.name not in classes:
            raise DataError(f"{folder} is not a class in {part.parent / 'train'}. Remove it, or add training images.")
        found = sorted(str(file) for file in folder.iterdir() if file.suffix.lower() in _SUFFIXES)
        if not found:
            raise DataError(f"{folder} has no .JPEG, .jpg or .png files. Put the images of the class into it.")
        listed += [(file, classes.index(folder.name)) for file in found]
    if not listed:
        raise DataError(f"{part} has no folders. Sort the images into train/<class> and val/<class>.")
    return ListedImages(tuple(file for file, _ in listed), torch.tensor([label for _, label in listed]))


def center_view(size: int, shorter_side: int, image: Image.Image, epoch: int, index: int) -> Image.Image:
    """Scale the shorter side of an image to a length, and return the square in the middle."""
    scale = shorter_side / min(image.size)
    width, height = max(size, round(image.width * scale)), max(size, round(image.height * scale))
    left, upper = (width - size) // 2, (height - size) // 2
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    return scaled.crop((left, upper, left + size, upper + size))


def random_view(size: int, seed: int, image: Image.Image, epoch: int, index: int) -> Image.Image:
    """Return a random part of an image, scaled to a size. Half of them are mirrored.

    The part depends on the seed, the epoch and the index alone, and not on the worker that makes it.
    """
    generator = random_stream("augment", seed, epoch, index)
    box = random_box(image.width, image.height, generator)
    part = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    is_mirrored = torch.rand((), generator=generator).item() < 0.5
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if is_mirrored else part


def decode(file: str) -> Image.Image:
    """Read an image and convert it to RGB."""
    try:
        with Image.open(file, formats=("JPEG", "PNG")) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} cannot be decoded ({error}). Fetch it again, or leave it out.") from error


class StreamedImages:
    """Images that worker processes, at most one per core, decode for every batch. With 0, this process does."""

    def __init__(self, listed: ListedImages, view: View, *, workers: int, device: torch.device) -> None:
        self.labels = listed.labels
        self._files, self._view, self._device = listed.files, view, device
        self._workers = min(workers, os.cpu_count() or 1)

    def take(self, parts: Sequence[Tensor], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield uint8 images of shape (N, size, size, 3) and labels for the indices of each batch."""
        pinned = self._device.type == "cuda"
        loader: DataLoader[Any] = DataLoader(
            _Batches(self._files, self.labels, self._view, epoch),
            batch_size=None,  # the data set has whole batches
            sampler=[part.tolist() for part in parts],
            num_workers=self._workers,
            pin_memory=pinned,
            generator=torch.Generator(),  # the default would draw from torch's random state
        )
        for batch in loader:
            if isinstance(batch, DataError):
                raise batch
            images, labels = batch
            yield images.to(self._device, non_blocking=pinned), labels.to(self._device, non_blocking=pinned)

    def decode_all(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the views of all images, of this height and width, and all labels, on the device."""
        images = torch.empty((len(self._files), size, size, 3), dtype=torch.uint8, device=self._device)
        parts = torch.arange(len(images)).split(_DECODED_AT_A_TIME) if len(images) else ()
        for part, (decoded, _) in zip(parts, self.take(parts, epoch=0), strict=True):
            images[part[0] : part[-1] + 1] = decoded
        return images, self.labels.to(self._device)


@dataclass
class _Batches(Dataset[Any]):
    files: tuple[str, ...]
    labels: Tensor
    view: View
    epoch: int

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor] | DataError:
        try:
            views = [np.asarray(self.view(decode(self.files[index]), self.epoch, index)) for index in indices]
        except DataError as error:
            return error  # if a worker raised it, its message would contain a traceback
        return torch.from_numpy(np.stack(views)), self.labels[indices]
