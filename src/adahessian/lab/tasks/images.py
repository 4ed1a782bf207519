"""Image classification: ResNets on CIFAR-10, ImageNet or any folder of images."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn

from adahessian.lab.configs.images import FolderConfig, ImageConfig
from adahessian.lab.data.augmentation import PaddedCrops
from adahessian.lab.data.cifar10 import CLASSES, read_cifar10
from adahessian.lab.models.resnet import ResNet, ResNet18
from adahessian.lab.tasks.task import Env, Task, split_holdout
from adahessian.lab.training.random_streams import random_stream

Batch: TypeAlias = tuple[Tensor, Tensor]

# Training views from which the statistics of batch norm are recomputed.
_STATISTICS_VIEWS = 5_000

_IMAGENET_MEAN, _IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Images(Protocol):
    """Images with labels, from which batches are taken."""

    labels: Tensor

    def take(self, parts: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield uint8 images of shape (N, H, W, 3) and labels, on the device, for the indices of each batch."""


@dataclass
class HeldImages:
    """Images that are all on the device: uint8, of shape (N, H, W, 3)."""

    images: Tensor
    labels: Tensor

    def take(self, parts: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield batches. All indices go to the device at once."""
        if parts:
            for part in torch.cat(list(parts)).to(self.labels.device).split([len(part) for part in parts]):
                yield self.images[part], self.labels[part]


class Normalization:
    """Converts bytes to floats of mean 0 and deviation 1. ``mean`` and ``deviation`` are per channel, from 0 to 1."""

    def __init__(self, mean: Sequence[float], deviation: Sequence[float], device: torch.device) -> None:
        means, deviations = torch.tensor(mean, dtype=torch.float64), torch.tensor(deviation, dtype=torch.float64)
        self._scale = (1 / (255 * deviations)).float().to(device)
        self._shift = (-means / deviations).float().to(device)

    @classmethod
    def of(cls, images: Tensor) -> Normalization:
        """Return the normalization of these images, of shape (N, H, W, channels)."""
        # Counts of 256 values give exact moments, without a copy of the images in floating point.
        counts = torch.stack([images[..., c].reshape(-1).bincount(minlength=256) for c in range(images.shape[-1])])
        shares = counts.cpu().double() / (images.numel() // images.shape[-1])
        values = torch.arange(256, dtype=torch.float64) / 255
        means = shares @ values
        deviations = (shares * (values - means[:, None]) ** 2).sum(1).sqrt()
        # A constant channel has no scale.
        deviations[deviations == 0] = 1
        return cls(means.tolist(), deviations.tolist(), images.device)

    def __call__(self, images: Tensor) -> Tensor:
        """Return normalized images from bytes."""
        return torch.addcmul(self._shift, images.float(), self._scale)


@dataclass(kw_only=True, eq=False)
class ImageTask(Task[Batch]):
    """Image classification."""

    env: Env
    batch_size: int
    network: Callable[[], nn.Module]
    training: Images

    evaluated: dict[str, Images]
    """Images to evaluate on: ``"test"``, after ``"validation"`` if some are held out."""

    normalization: Normalization

    crops: PaddedCrops | None
    """Crops of training images. None if ``training`` crops them."""

    eval_batch_size: int = 1000

    def __post_init__(self) -> None:
        full_batches, rest = divmod(len(self.training.labels), self.batch_size)
        # The last, smaller batch counts if each rank gets a part of it.
        self.steps_per_epoch = full_batches + (rest >= self.env.world_size)

    def build_model(self) -> nn.Module:
        """Return a new network."""
        model = self.network().to(self.env.device)
        if self.env.device.type == "cuda":
            torch.nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
        return model

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Yield images of shape (N, 3, H, W) and labels."""
        env, crops = self.env, self.crops
        order = torch.randperm(len(self.training.labels), generator=random_stream("order", env.seed, epoch))
        parts = [env.my_share(part) for part in order.split(self.batch_size)[skip : self.steps_per_epoch]]
        for number, (images, labels) in enumerate(self.training.take(parts, epoch), skip):
            if crops is None:
                yield self.inputs(images), labels
                continue
            key = ("augment", env.seed, epoch, number, env.rank)
            views = crops.draw(len(images), random_stream(*key, device=env.device))
            cropped = self.normalization(crops.crop(images, views))
            # Padding is 0 after the normalization, not before it.
            yield self._to_network(cropped.mul_(crops.inside(views))), labels

    def inputs(self, images: Tensor) -> Tensor:
        """Convert uint8 images of shape (N, H, W, 3) to inputs of the network."""
        return self._to_network(self.normalization(images))

    def _to_network(self, images: Tensor) -> Tensor:
        # Channels are last already, which convolutions on a GPU prefer.
        on_cuda = self.env.device.type == "cuda"
        layout = torch.channels_last if on_cuda else torch.contiguous_format
        return images.permute(0, 3, 1, 2).contiguous(memory_format=layout)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy."""
        images, labels = batch
        return cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        """Return accuracy in % and mean loss, and the accuracy with recomputed statistics of batch norm.

        Running statistics are a mean over the last steps, each of which had other weights.
        """
        models = model, self.with_recomputed_statistics(model)
        found = {}
        for name in self.evaluated if final else [*self.evaluated][:1]:
            found.update(self._score(name, models))
        return found

    def _score(self, name: str, models: tuple[nn.Module, nn.Module]) -> dict[str, float]:
        source = self.evaluated[name]
        count = len(source.labels)
        totals = torch.zeros(2, len(models), device=self.env.device)
        for images, labels in source.take(torch.arange(count).split(self.eval_batch_size), epoch=0):
            inputs = self.inputs(images)
            for each, total in zip(models, totals.unbind(1), strict=True):
                logits = each(inputs)
                correct = (logits.argmax(1) == labels).sum()
                total += torch.stack((correct, cross_entropy(logits, labels, reduction="sum")))
        (correct_count, recomputed_count), (loss, _) = totals.tolist()
        return {
            f"{name}_accuracy": 100 * correct_count / count,
            f"{name}_loss": loss / count,
            f"{name}_accuracy_recomputed": 100 * recomputed_count / count,
        }

    def with_recomputed_statistics(self, model: nn.Module) -> nn.Module:
        """Return a copy whose batch norms have the statistics of these weights, on some batches of the first epoch.

        Each rank uses its own share of these batches.
        """
        recomputed = copy.deepcopy(model)
        batches = itertools.islice(self.batches(epoch=0), math.ceil(_STATISTICS_VIEWS / self.batch_size))
        update_bn((images for images, _ in batches), recomputed)
        return recomputed


def load(config: ImageConfig | FolderConfig, env: Env) -> ImageTask:
    """Read CIFAR-10, or list the images of a folder."""
    return _load_cifar10(config, env) if isinstance(config, ImageConfig) else _load_folder(config, env)


def _load_cifar10(config: ImageConfig, env: Env) -> ImageTask:
    (images, labels), test_examples = read_cifar10(env.data_dir)
    kept, held_out = split_holdout(len(labels), config.holdout)
    parts = [(images[kept], labels[kept]), (images[held_out], labels[held_out]), test_examples]
    training, validation, test = (
        HeldImages(each.to(env.device).permute(0, 2, 3, 1).contiguous(), its.to(env.device)) for each, its in parts
    )
    return ImageTask(
        env=env,
        batch_size=config.batch_size,
        network=partial(ResNet, config.depth, CLASSES),
        training=training,
        evaluated={"validation": validation, "test": test} if config.holdout else {"test": test},
        normalization=Normalization.of(training.images),
        crops=PaddedCrops(training.images.shape[1], device=env.device),
    )


def _load_folder(config: FolderConfig, env: Env) -> ImageTask:
    from adahessian.lab.data.image_folder import StreamedImages, center_view, list_image_folder, random_view

    size, is_padded = config.image_size, config.crops == "padded"
    listed, listed_test, classes = list_image_folder(env.data_dir)
    kept, held_out = split_holdout(len(listed.labels), config.holdout)
    center = partial(center_view, size, size if is_padded else size * 256 // 224)
    stream = partial(StreamedImages, workers=config.workers, device=env.device)
    streamed = [
        stream(listed.select(kept), center if is_padded else partial(random_view, size, env.seed)),
        stream(listed.select(held_out), center),
        stream(listed_test, center),
    ]
    decoded_bytes = (len(listed.labels) + len(listed_test.labels)) * 3 * size**2
    is_held = is_padded and decoded_bytes <= config.cache_gib * 2**30
    sources: list[Images] = [HeldImages(*each.decode_all(size)) if is_held else each for each in streamed]
    training, validation, test = sources
    return ImageTask(
        env=env,
        batch_size=config.batch_size,
        network=partial(ResNet18, len(classes), small_images=size <= 64),
        training=training,
        evaluated={"validation": validation, "test": test} if config.holdout else {"test": test},
        normalization=Normalization(_IMAGENET_MEAN, _IMAGENET_DEVIATION, env.device),
        crops=PaddedCrops(size, device=env.device) if is_padded else None,
        # If images of this size fit into memory for training, they fit for evaluation.
        eval_batch_size=config.batch_size,
    )
