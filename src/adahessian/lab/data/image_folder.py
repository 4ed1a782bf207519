"""Folders of images in the layout of ImageNet: ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``."""

from __future__ import annotations

import math
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
    parts = data_dir / "train", data_dir / "val"
    folders = [sorted(filter(Path.is_dir, part.glob("*"))) for part in parts]
    classes = tuple(folder.name for folder in folders[0])
    training, validation = (_list_images(*each, classes) for each in zip(parts, folders, strict=True))
    return training, validation, classes


def _list_images(part: Path, folders: Sequence[Path], classes: Sequence[str]) -> ListedImages:
    if not folders:
        raise DataError(f"{part} has no folders. Sort the images into train/<class> and val/<class>.")
    files, labels = [], []
    for folder in folders:
        if folder.name not in classes:
            raise DataError(f"{folder} is not a class in {part.parent / 'train'}. Remove it, or add training images.")
        found = sorted(str(file) for file in folder.iterdir() if file.suffix.lower() in _SUFFIXES)
        if not found:
            raise DataError(f"{folder} has no .JPEG, .jpg or .png files. Put the images of the class into it.")
        files += found
        labels += [classes.index(folder.name)] * len(found)
    return ListedImages(tuple(files), torch.tensor(labels))


def center_view(size: int, shorter_side: int, image: Image.Image, epoch: int, index: int) -> Image.Image:
    """Scale the shorter side of an image to a length, and return the square in the middle."""
    scale = shorter_side / min(image.size)
    width, height = max(size, round(image.width * scale)), max(size, round(image.height * scale))
    left, upper = (width - size) // 2, (height - size) // 2
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    return scaled.crop((left, upper, left + size, upper + size))


def random_view(size: int, seed: int, image: Image.Image, epoch: int, index: int) -> Image.Image:
    """Return a random part of an image, scaled and perhaps mirrored. All workers draw the same part."""
    generator = random_stream("augment", seed, epoch, index)
    box = random_box(image.width, image.height, generator)
    part = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    is_mirrored = torch.rand((), generator=generator).item() < 0.5
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if is_mirrored else part


def random_box(width: int, height: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Return the left, upper, right and lower edge of a part with 8% to 100% of an image and a ratio of 3:4 to 4:3.

    This is usual for ImageNet. If ten draws do not fit into the image, it is the largest such part in the middle.
    """
    narrowest, widest = 3 / 4, 4 / 3
    for area, ratio, across, down in torch.rand(10, 4, generator=generator, dtype=torch.float64).tolist():
        wanted = width * height * (0.08 + 0.92 * area)
        shape = math.exp(math.log(narrowest) + ratio * math.log(widest / narrowest))
        box_width, box_height = round(math.sqrt(wanted * shape)), round(math.sqrt(wanted / shape))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, upper = int(across * (width - box_width + 1)), int(down * (height - box_height + 1))
            return left, upper, left + box_width, upper + box_height
    box_width, box_height = min(width, round(height * widest)), min(height, round(width / narrowest))
    left, upper = (width - box_width) // 2, (height - box_height) // 2
    return left, upper, left + box_width, upper + box_height


def decode(file: str) -> Image.Image:
    """Read an image and convert it to RGB."""
    try:
        with Image.open(file, formats=("JPEG", "PNG")) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} cannot be decoded ({error}). Fetch it again, or leave it out.") from error


class StreamedImages(Dataset[Any]):
    """Images that worker processes, at most one per core, decode for every batch. With 0, this process does."""

    def __init__(self, listed: ListedImages, view: View, *, workers: int, device: torch.device) -> None:
        self.labels = listed.labels
        self._files, self._view, self._device = listed.files, view, device
        self._workers = min(workers, os.cpu_count() or 1)

    def take(self, parts: Sequence[Tensor], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield uint8 images of shape (N, size, size, 3) and labels for the indices of each batch."""
        pinned = self._device.type == "cuda"
        loader: DataLoader[Any] = DataLoader(
            self,
            batch_size=None,  # an element is a whole batch
            sampler=[(epoch, part.tolist()) for part in parts],
            num_workers=self._workers,
            pin_memory=pinned,
            generator=torch.Generator(),  # the default would draw from torch's random state
        )
        for batch in loader:
            if isinstance(batch, DataError):
                raise batch
            images, labels = batch
            yield images.to(self._device, non_blocking=pinned), labels.to(self._device, non_blocking=pinned)

    def __getitem__(self, batch: tuple[int, list[int]]) -> tuple[Tensor, Tensor] | DataError:
        """Decode the images of a batch: an epoch and indices."""
        epoch, indices = batch
        try:
            views = [np.asarray(self._view(decode(self._files[index]), epoch, index)) for index in indices]
        except DataError as error:
            return error  # if a worker raised it, its message would contain a traceback
        return torch.from_numpy(np.stack(views)), self.labels[indices]

    def decode_all(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the views of all images, of this height and width, and all labels, on the device."""
        images = torch.empty((len(self._files), size, size, 3), dtype=torch.uint8, device=self._device)
        parts = torch.arange(len(images)).split(_DECODED_AT_A_TIME) if len(images) else ()
        for part, (decoded, _) in zip(parts, self.take(parts, epoch=0), strict=True):
            images[part[0] : part[-1] + 1] = decoded
        return images, self.labels.to(self._device)
