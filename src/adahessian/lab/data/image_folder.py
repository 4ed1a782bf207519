"""Folders of images in the layout of ImageNet: ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from adahessian.lab.augmentation import random_box
from adahessian.lab.data.errors import DataError
from adahessian.lab.data.transfer import sent
from adahessian.lab.randomness import generator_for

_ENDINGS = (".jpeg", ".jpg", ".png")
_DECODED_AT_A_TIME = 256


@dataclass(frozen=True)
class ListedImages:
    """Files of images, and their classes' numbers."""

    files: tuple[str, ...]
    labels: Tensor


def list_image_folder(data_dir: Path) -> tuple[ListedImages, ListedImages, tuple[str, ...]]:
    """The images to train on and those to validate with, in the order of their names, and the names of the classes.

    Raises:
        DataError: If a folder is missing or empty, or if one in ``val`` is not in ``train``.
    """
    training, validation = _class_folders(data_dir / "train"), _class_folders(data_dir / "val")
    classes = tuple(folder.name for folder in training)
    for folder in validation:
        if folder.name not in classes:
            raise DataError(f"{folder} has no folder of its name in {data_dir / 'train'}: it is no class to train on.")
    return _listed(training, classes), _listed(validation, classes), classes


def _class_folders(part: Path) -> list[Path]:
    if not part.is_dir():
        raise DataError(f"No folder {part}: expected train/<class>/*.JPEG and val/<class>/*.JPEG in {part.parent}.")
    folders = sorted(folder for folder in part.iterdir() if folder.is_dir())
    if not folders:
        raise DataError(f"{part} has no folders: sort its images into a folder for each class, {part.name}/<class>.")
    return folders


def _listed(folders: list[Path], classes: tuple[str, ...]) -> ListedImages:
    files: list[str] = []
    labels: list[int] = []
    numbers = {name: number for number, name in enumerate(classes)}
    for folder in folders:
        found = sorted(str(file) for file in folder.iterdir() if file.suffix.lower() in _ENDINGS)
        if not found:
            raise DataError(f"{folder} has no .JPEG, .jpg or .png files: put the images of the class into it.")
        files += found
        labels += [numbers[folder.name]] * len(found)
    return ListedImages(tuple(files), torch.tensor(labels))


class View(Protocol):
    """What is taken of an image: a square of a fixed size."""

    @property
    def size(self) -> int:
        """Its height and width."""

    def __call__(self, image: Image.Image, *, epoch: int, index: int) -> Image.Image:
        """The view of the image with this index in an epoch."""


@dataclass(frozen=True)
class Centre:
    """The square in the middle of an image, after its shorter side was scaled to a length."""

    size: int
    shorter_side: int

    def __call__(self, image: Image.Image, *, epoch: int, index: int) -> Image.Image:
        """The same for every epoch."""
        scale = self.shorter_side / min(image.size)
        width, height = max(self.size, round(image.width * scale)), max(self.size, round(image.height * scale))
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, upper = (width - self.size) // 2, (height - self.size) // 2
        return image.crop((left, upper, left + self.size, upper + self.size))


@dataclass(frozen=True)
class RandomPart:
    """A random part of an image, scaled to a size, and half of them mirrored.

    A function of the seed, the epoch and the image's index alone, whichever worker makes it.
    """

    size: int
    seed: int

    def __call__(self, image: Image.Image, *, epoch: int, index: int) -> Image.Image:
        """Another one for every epoch."""
        generator = generator_for("augment", self.seed, epoch, index)
        box = random_box(image.width, image.height, generator)
        part = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        mirrored = torch.rand((), generator=generator).item() < 0.5
        return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else part


def decode(file: str) -> Image.Image:
    """An image in RGB, whatever it is in the file.

    Raises:
        DataError: If it cannot be decoded.
    """
    try:
        with Image.open(file, formats=("JPEG", "PNG")) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} cannot be decoded ({error}). Fetch it again, or leave it out.") from error


class _Views(Dataset[Tensor | DataError]):
    def __init__(self, files: tuple[str, ...], view: View, epoch: int) -> None:
        self.files = files
        self.view = view
        self.epoch = epoch

    def __getitem__(self, index: int) -> Tensor | DataError:
        try:
            image = decode(self.files[index])
        except DataError as error:
            # Raised in a worker, it would arrive with a worker's traceback in its message.
            return error
        return torch.from_numpy(np.array(self.view(image, epoch=self.epoch, index=index)))


def _stacked(images: list[Tensor | DataError]) -> Tensor | DataError:
    tensors = [image for image in images if isinstance(image, Tensor)]
    return torch.stack(tensors) if len(tensors) == len(images) else next(e for e in images if isinstance(e, DataError))


class StreamedImages:
    """Images that are decoded whenever they are asked for, by processes of their own.

    Args:
        listed: The images.
        view: What is taken of each.
        workers: Processes that decode, no more than there are cores; with 0, this one does.
        device: Where batches go.
    """

    def __init__(self, listed: ListedImages, view: View, *, workers: int, device: torch.device) -> None:
        self.labels = listed.labels
        self._files = listed.files
        self._view = view
        self._workers = min(workers, os.cpu_count() or 1)
        self._device = device

    def take(self, parts: Sequence[Tensor], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images of shape (N, size, size, 3) and labels, on the device, for the indices of one batch after another.

        Raises:
            DataError: If a file cannot be decoded.
        """
        pinned = self._device.type == "cuda"
        batches = DataLoader(
            _Views(self._files, self._view, epoch),
            batch_sampler=[part.tolist() for part in parts],
            num_workers=self._workers,
            collate_fn=_stacked,
            pin_memory=pinned,
            # Else it would draw from torch's own stream. Nothing comes of what it draws.
            generator=torch.Generator(),
        )
        for part, images in zip(parts, batches, strict=True):
            if isinstance(images, DataError):
                raise images
            yield (
                images.to(self._device, non_blocking=pinned),
                sent(self.labels[part], self._device),
            )

    @property
    def decoded_bytes(self) -> int:
        """Memory that all images take when decoded."""
        return len(self._files) * self._view.size**2 * 3

    def decoded(self) -> Tensor:
        """All images, on the device, of shape (N, size, size, 3)."""
        shape = (len(self._files), self._view.size, self._view.size, 3)
        images = torch.empty(shape, dtype=torch.uint8, device=self._device)
        parts = torch.arange(len(self._files)).split(_DECODED_AT_A_TIME)
        places = images.split(_DECODED_AT_A_TIME)
        for place, (batch, _) in zip(places, self.take(parts, epoch=0), strict=True):
            place.copy_(batch)
        return images
