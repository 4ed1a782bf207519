"""Image classification: ResNet20 and ResNet32 on CIFAR-10, ResNet18 on ImageNet or any folder of images."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn

from adahessian.lab.augmentation import PaddedCrops
from adahessian.lab.data.cifar10 import CLASSES as CIFAR10_CLASSES
from adahessian.lab.data.cifar10 import read_cifar10
from adahessian.lab.models.resnet import ResNet
from adahessian.lab.models.resnet18 import ResNet18
from adahessian.lab.randomness import generator_for
from adahessian.lab.settings import OptimizerName, Settings, SettingsT
from adahessian.lab.tasks.task import Experiment, Metric, PaperNumber, Place, Task

Batch: TypeAlias = tuple[Tensor, Tensor]

# Views of training images that batch norm's statistics are recomputed from.
_STATISTICS_OF = 5_000

_IMAGENET_MEAN, _IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class FolderSettings(Settings):
    """Settings for images that are read from a folder."""

    image_size: int = 224
    """Height and width that images are brought to."""

    workers: int = 4
    """Processes that decode images; with 0, the training process does."""


@dataclass(frozen=True, kw_only=True)
class CachedFolderSettings(FolderSettings):
    """Settings for images that may all be kept decoded."""

    image_size: int = 64
    """Height and width that images are brought to."""

    cache_gib: float = 8.0
    """Decoded images that together take no more than this are kept on the device; others are decoded every epoch."""


class Images(Protocol):
    """Images and their labels, of which batches can be had."""

    labels: Tensor
    """All labels."""

    def take(self, parts: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        """Images of shape (N, H, W, 3) in uint8 and labels, on the device, for the indices of batch after batch."""


class HeldImages:
    """Images that are all on the device.

    Args:
        images: Of shape (N, H, W, 3), in uint8.
        labels: Their classes.
        device: Where they are to be.
    """

    def __init__(self, images: Tensor, labels: Tensor, device: torch.device) -> None:
        self.images = images.to(device).contiguous()
        self.labels = labels.to(device)

    def take(self, parts: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        """The same images in every epoch. All indices go to the device at once."""
        if parts:
            for part in torch.cat(list(parts)).to(self.labels.device).split([len(part) for part in parts]):
                yield self.images[part], self.labels[part]


class Normalisation:
    """Takes bytes to numbers of mean 0 and deviation 1.

    Args:
        mean: Of each channel, with bytes on a scale from 0 to 1.
        deviation: Likewise.
        device: Where the images are.
    """

    def __init__(self, mean: Sequence[float], deviation: Sequence[float], device: torch.device) -> None:
        means, deviations = torch.tensor(mean, dtype=torch.float64), torch.tensor(deviation, dtype=torch.float64)
        self._scale = (1 / (255 * deviations)).float().to(device)
        self._shift = (-means / deviations).float().to(device)

    @classmethod
    def of(cls, images: Tensor) -> Normalisation:
        """The one for these images, of shape (N, H, W, channels)."""
        # Counts of 256 values give exact moments, and need no copy of the images in floating point.
        counts = torch.stack([images[..., c].reshape(-1).bincount(minlength=256) for c in range(images.shape[-1])])
        shares = counts.cpu().double() / (images.numel() // images.shape[-1])
        values = torch.arange(256, dtype=torch.float64) / 255
        means = shares @ values
        deviations = (shares * (values - means[:, None]) ** 2).sum(1).sqrt()
        # A channel that never changes has no scale of its own.
        deviations[deviations == 0] = 1
        return cls(means.tolist(), deviations.tolist(), images.device)

    def __call__(self, images: Tensor) -> Tensor:
        """The images in float32."""
        return torch.addcmul(self._shift, images.float(), self._scale)


class ImageTask(Task[Batch]):
    """Classifies images.

    Args:
        settings: The run's.
        place: Where it runs.
        make_network: Makes the network.
        training: Images to train on.
        test: Images to evaluate with.
        normalisation: Of both.
        crops: What views are trained on, unless ``training`` sees to that itself.
        evaluated_at_a_time: Test images a batch.
    """

    def __init__(
        self,
        settings: Settings,
        place: Place,
        *,
        make_network: Callable[[], nn.Module],
        training: Images,
        test: Images,
        normalisation: Normalisation,
        crops: PaddedCrops | None,
        evaluated_at_a_time: int = 1000,
    ) -> None:
        self._batch_size = settings.batch_size
        self._place = place
        self._make_network = make_network
        self._training = training
        self._test = test
        self._normalisation = normalisation
        self._crops = crops
        self._evaluated_at_a_time = evaluated_at_a_time
        whole, left_over = divmod(len(training.labels), settings.batch_size)
        # A last, smaller batch counts, if there is something in it for every process.
        self.steps_per_epoch = whole + (left_over >= place.share.ranks)

    def make_model(self) -> nn.Module:
        """A new network."""
        model = self._make_network().to(self._place.device)
        if self._place.device.type == "cuda":
            torch.nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
        return model

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Images of shape (N, 3, H, W) and labels."""
        place = self._place
        order = torch.randperm(len(self._training.labels), generator=generator_for("order", place.seed, epoch))
        parts = [place.share.of(part) for part in order.split(self._batch_size)[start : self.steps_per_epoch]]
        for number, (images, labels) in enumerate(self._training.take(parts, epoch), start):
            if self._crops is None:
                yield self._for_network(self._normalisation(images)), labels
                continue
            key = ("augment", place.seed, epoch, number, place.share.rank)
            views = self._crops.draw(len(images), generator_for(*key, device=place.device))
            cropped = self._normalisation(self._crops.crop(images, views))
            # Only now, since padding is 0 after the normalisation, not before it.
            yield self._for_network(cropped.mul_(self._crops.inside(views))), labels

    def _for_network(self, images: Tensor) -> Tensor:
        # Images are channels last already: there is nothing to copy where convolutions like that.
        on_cuda = self._place.device.type == "cuda"
        layout = torch.channels_last if on_cuda else torch.contiguous_format
        return images.permute(0, 3, 1, 2).contiguous(memory_format=layout)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy."""
        images, labels = batch
        return cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Share of test images that are classified correctly, in %, and their mean loss.

        The share with recomputed statistics of batch norm as well.
        """
        models = model, self._with_recomputed_statistics(model)
        count = len(self._test.labels)
        totals = torch.zeros(2, len(models), device=self._place.device)
        for images, labels in self._test.take(torch.arange(count).split(self._evaluated_at_a_time), epoch=0):
            inputs = self._for_network(self._normalisation(images))
            for of_model, total in zip(models, totals.unbind(1), strict=True):
                logits = of_model(inputs)
                correct = (logits.argmax(1) == labels).sum()
                total += torch.stack((correct, cross_entropy(logits, labels, reduction="sum")))
        (correct_count, recomputed_count), (loss, _) = totals.tolist()
        return {
            "test_accuracy": 100 * correct_count / count,
            "test_loss": loss / count,
            "test_accuracy_recomputed": 100 * recomputed_count / count,
        }

    def _with_recomputed_statistics(self, model: nn.Module) -> nn.Module:
        """A copy whose batch norms have the statistics of some batches of the first epoch, for the weights as they are.

        The running ones are a mean over the last steps, of which each had other weights. Of several processes each
        takes its share of these batches.
        """
        recomputed = copy.deepcopy(model)
        batches = itertools.islice(self.batches(epoch=0), math.ceil(_STATISTICS_OF / self._batch_size))
        update_bn((images for images, _ in batches), recomputed)
        return recomputed


def _load_cifar10(depth: int) -> Callable[[Settings, Place], ImageTask]:
    def load(settings: Settings, place: Place) -> ImageTask:
        training, test = (
            HeldImages(images.permute(0, 2, 3, 1), labels, place.device)
            for images, labels in read_cifar10(place.data_dir)
        )
        return ImageTask(
            settings,
            place,
            make_network=lambda: ResNet(depth, CIFAR10_CLASSES),
            training=training,
            test=test,
            normalisation=Normalisation.of(training.images),
            crops=PaddedCrops(training.images.shape[1], device=place.device),
        )

    return load


def _load_imagenet(settings: FolderSettings, place: Place) -> ImageTask:
    from adahessian.lab.data.image_folder import Centre, RandomPart, StreamedImages, list_image_folder

    size = settings.image_size
    listed_training, listed_test, classes = list_image_folder(place.data_dir)
    part, centre = RandomPart(size, place.seed), Centre(size, size * 256 // 224)
    training = StreamedImages(listed_training, part, workers=settings.workers, device=place.device)
    test = StreamedImages(listed_test, centre, workers=settings.workers, device=place.device)
    return _resnet18_task(settings, place, classes=len(classes), training=training, test=test, crops=None)


def _load_folder(settings: CachedFolderSettings, place: Place) -> ImageTask:
    from adahessian.lab.data.image_folder import Centre, StreamedImages, list_image_folder

    size = settings.image_size
    listed_training, listed_test, classes = list_image_folder(place.data_dir)
    streamed = [
        StreamedImages(listed, Centre(size, size), workers=settings.workers, device=place.device)
        for listed in (listed_training, listed_test)
    ]
    training, test = streamed
    crops = PaddedCrops(size, device=place.device)
    if sum(images.decoded_bytes for images in streamed) > settings.cache_gib * 2**30:
        return _resnet18_task(settings, place, classes=len(classes), training=training, test=test, crops=crops)
    held_training, held_test = (HeldImages(images.decoded(), images.labels, place.device) for images in streamed)
    return _resnet18_task(settings, place, classes=len(classes), training=held_training, test=held_test, crops=crops)


def _resnet18_task(
    settings: FolderSettings, place: Place, *, classes: int, training: Images, test: Images, crops: PaddedCrops | None
) -> ImageTask:
    return ImageTask(
        settings,
        place,
        make_network=lambda: ResNet18(classes, small_images=settings.image_size <= 64),
        training=training,
        test=test,
        normalisation=Normalisation(_IMAGENET_MEAN, _IMAGENET_DEVIATION, place.device),
        crops=crops,
        # Large images that fit into memory to train on fit as well to evaluate with.
        evaluated_at_a_time=settings.batch_size,
    )


def _defaults(make: Callable[..., SettingsT], *, decay: float, **common: Any) -> dict[OptimizerName, SettingsT]:
    """The paper's learning rates, which are the same for all images, and ours for Adagrad and RMSprop."""
    return {
        "adahessian": make(lr=0.15, eps=1e-4, weight_decay=decay / 0.15, **common),
        "sgd": make(lr=0.1, momentum=0.9, weight_decay=decay, **common),
        "adam": make(lr=0.001, weight_decay=decay, **common),
        "adamw": make(lr=0.01, weight_decay=decay / 0.01, **common),
        "adagrad": make(lr=0.01, weight_decay=decay, **common),
        # Without a bias correction, a slower second beta would make the first steps far too large.
        "rmsprop": make(lr=0.001, betas=(0.9, 0.99), weight_decay=decay, **common),
    }


_ACCURACY = Metric(name="test_accuracy", title="test accuracy, %")
_RECOMPUTED = Metric(
    name="test_accuracy_recomputed", title="accuracy with recomputed statistics, %", short="recomputed"
)
_VALIDATION_ACCURACY = Metric(name="test_accuracy", title="validation accuracy, top 1, %")

_STATISTICS = (
    "The accuracy is with batch norm's running statistics, as the authors'. While the learning rate is high these lag "
    "behind the weights, and it goes up and down by several points from epoch to epoch. Runs also record what the same "
    f"weights reach with statistics recomputed from about {_STATISTICS_OF:,} training images, as cropped for training."
)
_OURS = "Adagrad and RMSprop are not in the paper: their learning rates are common ones, and were not searched."


def _cifar10_experiment(depth: int, paper: dict[OptimizerName, PaperNumber]) -> Experiment[Settings]:
    return Experiment(
        name=f"cifar10-resnet{depth}",
        title=f"ResNet{depth} on CIFAR-10",
        data="CIFAR-10 as published: cifar-10-batches-bin or cifar-10-batches-py, or one of the two archives.",
        curve=_ACCURACY,
        metric=_ACCURACY,
        beside=(_RECOMPUTED,),
        defaults=_defaults(
            Settings, decay=5e-4, epochs=160, batch_size=256, schedule="steps", decay_epochs=(80, 120), decay_factor=0.1
        ),
        slice_noise=2.0,
        notes=(
            "The learning rate falls after epochs 80 and 120, as the paper says. The authors' script decays one epoch "
            "earlier, since it steps its schedule before the epoch.",
            "There is no warm-up, as in the paper: in the first steps AdaHessian's loss rises above its start, and "
            "falls below it again within the first epoch.",
            "The authors' script reports the best test accuracy of all epochs. Ours is that of the last; the best is "
            "in a column of its own.",
            "Shortcuts that widen pad with zeros, as in He et al. The authors' have a convolution there.",
            "Images are normalised with the means and deviations of the training images at hand.",
            _STATISTICS,
            _OURS,
        ),
        paper=paper,
        paper_is_best_epoch=True,
        load=_load_cifar10(depth),
    )


_CONSTANTS = "Images are normalised with ImageNet's usual means and deviations."
_DECAY = (
    "The weight decay of 1e-4 (over the learning rate, where decoupled) is the authors' reply for AdaHessian; the "
    "paper gives none for the others here, which take the same. Learning rates are those of CIFAR-10, as in the paper."
)

EXPERIMENTS: tuple[Experiment[Any], ...] = (
    _cifar10_experiment(
        20,
        {
            "sgd": PaperNumber(mean=92.08, deviation=0.08),
            "adam": PaperNumber(mean=90.33, deviation=0.13),
            "adamw": PaperNumber(mean=91.97, deviation=0.15),
            "adahessian": PaperNumber(mean=92.13, deviation=0.18),
        },
    ),
    _cifar10_experiment(
        32,
        {
            "sgd": PaperNumber(mean=93.14, deviation=0.10),
            "adam": PaperNumber(mean=91.63, deviation=0.10),
            "adamw": PaperNumber(mean=92.72, deviation=0.20),
            "adahessian": PaperNumber(mean=93.08, deviation=0.10),
        },
    ),
    Experiment(
        name="imagenet-resnet18",
        title="ResNet18 on ImageNet",
        data="ImageNet (ILSVRC 2012) with a folder for each class: train/<class>/*.JPEG and val/<class>/*.JPEG.",
        curve=_VALIDATION_ACCURACY,
        metric=_VALIDATION_ACCURACY,
        beside=(_RECOMPUTED,),
        defaults=_defaults(
            FolderSettings,
            decay=1e-4,
            epochs=90,
            batch_size=256,
            schedule="plateau",
            decay_factor=0.5,
            plateau_patience=3,
        ),
        notes=(
            "Of the two schedules that the paper tried, the one on a plateau, which was better.",
            _DECAY,
            _CONSTANTS,
            _STATISTICS,
            _OURS,
        ),
        paper={
            "sgd": PaperNumber(mean=70.03),
            "adam": PaperNumber(mean=64.53),
            "adamw": PaperNumber(mean=67.41),
            "adahessian": PaperNumber(mean=70.08),
        },
        load=_load_imagenet,
    ),
    Experiment(
        name="image-folder-resnet18",
        title="ResNet18 on a folder of images",
        data="Any images with a folder for each class: train/<class>/*.JPEG and val/<class>/*.JPEG (or .jpg, .png).",
        curve=_VALIDATION_ACCURACY,
        metric=_VALIDATION_ACCURACY,
        beside=(_RECOMPUTED,),
        defaults=_defaults(
            CachedFolderSettings,
            decay=1e-4,
            epochs=40,
            batch_size=256,
            schedule="plateau",
            decay_factor=0.5,
            plateau_patience=3,
        ),
        notes=(
            "A smaller stand-in for ImageNet, such as some classes of Tiny ImageNet. The settings are those of "
            "imagenet-resnet18, but for 40 epochs, images of 64 x 64 with crops of a padding of 4, and a first "
            "convolution of 3x3 without pooling where images are no larger than that. The paper has no such run.",
            _DECAY,
            _CONSTANTS,
            _STATISTICS,
            _OURS,
        ),
        load=_load_folder,
    ),
)
