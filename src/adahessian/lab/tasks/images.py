"""Image classification: ResNets on CIFAR-10, ImageNet or any folder of images."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim.swa_utils import update_bn

from adahessian.lab.configs.images import FolderConfig, ImageConfig
from adahessian.lab.data.cifar10 import CLASSES, read_cifar10
from adahessian.lab.models.resnet import ResNet, ResNet18
from adahessian.lab.tasks.task import Env, ExampleTask, Tensors, split_holdout
from adahessian.lab.training.random_streams import random_stream

# Training views from which the statistics of batch norm are recomputed.
_STATISTICS_VIEWS = 5_000

_IMAGENET_MEANS = torch.tensor((0.485, 0.456, 0.406), dtype=torch.float64)
_IMAGENET_DEVIATIONS = torch.tensor((0.229, 0.224, 0.225), dtype=torch.float64)


@dataclass
class HeldImages:
    """Images that are all on the device: uint8, of shape (N, H, W, 3)."""

    images: Tensor
    labels: Tensor

    def take(self, parts: Sequence[Tensor], epoch: int) -> Iterator[Tensors]:
        """Yield images and labels for the indices of each batch. All indices go to the device at once."""
        if parts:
            for part in torch.cat(list(parts)).to(self.labels.device).split([len(part) for part in parts]):
                yield self.images[part], self.labels[part]


def moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation of each channel, from 0 to 1, of bytes of shape (N, H, W, channels)."""
    # One channel at a time, because a copy in floating point is large.
    found = [torch.std_mean(channel.double() / 255, correction=0) for channel in images.unbind(-1)]
    deviations, means = torch.tensor(found, dtype=torch.float64).T
    return means, deviations.masked_fill(deviations == 0, 1)  # a constant channel has no scale


def normalization(means: Tensor, deviations: Tensor, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function from bytes to floats of mean 0 and deviation 1."""
    scale, shift = (each.float().to(device) for each in (1 / (255 * deviations), -means / deviations))
    return lambda images: torch.addcmul(shift, images.float(), scale)


class PaddedCrops:
    """Random crops of images with some zero pixels on each side, as large as the images. Half of them are mirrored.

    There are few such views of an image, so a table holds the source of each pixel of each view. A whole batch is then
    drawn in one call and gathered.
    """

    def __init__(self, size: int, *, padding: int = 4, device: torch.device | str = "cpu") -> None:
        pixels = pad(torch.arange(size**2).view(size, size), [padding] * 4, value=-1)
        windows = pixels.unfold(0, size, 1).unfold(1, size, 1)
        table = torch.stack((windows, windows.flip(3))).flatten(0, 2).to(device)
        self._pixels, self._inside = table.clamp(min=0).flatten(1), (table >= 0).float().unsqueeze(3)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw numbers of views, all with the same probability."""
        return torch.randint(len(self._pixels), (count,), generator=generator, device=self._pixels.device)

    def crop(self, images: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return one view per image of shape (N, size, size, channels), and 1 where it shows the image, else 0."""
        count, height, width, channels = images.shape
        pixels = self._pixels[views].unsqueeze(2).expand(-1, -1, channels)
        return images.reshape(count, height * width, channels).gather(1, pixels).view(images.shape), self._inside[views]


class ClassificationTask(ExampleTask[Tensors]):
    """Classification of images."""

    network: Callable[[], nn.Module]
    normalize: Callable[[Tensor], Tensor]
    crops: PaddedCrops | None  # of training images, unless they come cropped
    eval_batch_size: int

    def build_model(self) -> nn.Module:
        model = self.network().to(self.env.device)
        if self.env.device.type == "cuda":
            torch.nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
        return model

    def batches(self, epoch: int, skip: int = 0) -> Iterator[Tensors]:
        """Yield images of shape (N, 3, H, W) and labels."""
        env, crops, training = self.env, self.crops, self.parts["training"]
        for number, (images, labels) in enumerate(training.take(self.shares(epoch, skip), epoch), skip):
            inside = None
            if crops is not None:
                generator = random_stream("augment", env.seed, epoch, number, env.rank, device=env.device)
                images, inside = crops.crop(images, crops.draw(len(images), generator))
            yield self.inputs(images, inside), labels

    def inputs(self, images: Tensor, inside: Tensor | None = None) -> Tensor:
        """Convert uint8 images of shape (N, H, W, 3) to inputs of the network, which are 0 where ``inside`` is 0."""
        normalized = self.normalize(images)
        if inside is not None:
            normalized *= inside
        # Channels are last already, which convolutions on a GPU prefer.
        layout = torch.channels_last if images.is_cuda else torch.contiguous_format
        return normalized.permute(0, 3, 1, 2).contiguous(memory_format=layout)

    def scores(self, model: nn.Module, examples: Any) -> dict[str, float]:
        """Return accuracy in % and mean loss, and the accuracy with recomputed statistics of batch norm."""
        recomputed, count = self.with_recomputed_statistics(model), len(examples.labels)
        totals = torch.zeros(3, device=self.env.device)
        for images, labels in examples.take(torch.arange(count).split(self.eval_batch_size), epoch=0):
            inputs = self.inputs(images)
            logits = model(inputs)
            hits = [(each.argmax(1) == labels).sum() for each in (logits, recomputed(inputs))]
            totals += torch.stack((*hits, cross_entropy(logits, labels, reduction="sum")))
        correct, correct_recomputed, loss = totals.tolist()
        accuracy, accuracy_recomputed = 100 * correct / count, 100 * correct_recomputed / count
        return {"accuracy": accuracy, "loss": loss / count, "accuracy_recomputed": accuracy_recomputed}

    def with_recomputed_statistics(self, model: nn.Module) -> nn.Module:
        """Return a copy whose batch norms have the statistics of these weights, on this rank's share of some batches.

        The running statistics are a mean over the last steps, each of which had other weights.
        """
        recomputed = copy.deepcopy(model)
        batches = itertools.islice(self.batches(epoch=0), math.ceil(_STATISTICS_VIEWS / self.config.batch_size))
        update_bn((images for images, _ in batches), recomputed)
        return recomputed


class ImageTask(ClassificationTask):
    """CIFAR-10."""

    eval_batch_size = 1000

    def __init__(self, config: ImageConfig, env: Env) -> None:
        (images, labels), test = read_cifar10(env.data_dir)
        kept, held_out = split_holdout(len(labels), config.holdout)
        examples = [(images[kept], labels[kept]), (images[held_out], labels[held_out]), test]
        held = [HeldImages(x.to(env.device).permute(0, 2, 3, 1).contiguous(), y.to(env.device)) for x, y in examples]
        self.parts = dict(zip(("training", "validation", "test"), held, strict=True))
        self.network = partial(ResNet, config.depth, CLASSES)
        self.normalize = normalization(*moments(held[0].images), env.device)
        self.crops = PaddedCrops(held[0].images.shape[1], device=env.device)
        super().__init__(config, env, len(kept))


class FolderTask(ClassificationTask):
    """A folder of images, which are decoded once or for every batch."""

    def __init__(self, config: FolderConfig, env: Env) -> None:
        from adahessian.lab.data.image_folder import StreamedImages, center_view, list_image_folder, random_view

        size, is_padded = config.image_size, config.crops == "padded"
        listed, test, classes = list_image_folder(env.data_dir)
        kept, held_out = split_holdout(len(listed.labels), config.holdout)
        center = partial(center_view, size, size if is_padded else size * 256 // 224)
        stream = partial(StreamedImages, workers=config.workers, device=env.device)
        streamed = {
            "training": stream(listed.select(kept), center if is_padded else partial(random_view, size, env.seed)),
            "validation": stream(listed.select(held_out), center),
            "test": stream(test, center),
        }
        decoded_bytes = (len(listed.labels) + len(test.labels)) * 3 * size**2
        is_held = is_padded and decoded_bytes <= config.cache_gib * 2**30
        self.parts = {name: HeldImages(*each.decode_all(size)) if is_held else each for name, each in streamed.items()}
        self.network = partial(ResNet18, len(classes), small_images=size <= 64)
        self.normalize = normalization(_IMAGENET_MEANS, _IMAGENET_DEVIATIONS, env.device)
        self.crops = PaddedCrops(size, device=env.device) if is_padded else None
        # If images of this size fit into memory for training, they fit for evaluation.
        self.eval_batch_size = config.batch_size
        super().__init__(config, env, len(kept))
