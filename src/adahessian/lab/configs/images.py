"""Image classification: ResNet20 and ResNet32 on CIFAR-10, ResNet18 on ImageNet or any folder of images."""

from typing import Annotated, ClassVar, Literal

from adahessian.lab.configs.checks import Count, Natural, NonNegative, minimum
from adahessian.lab.configs.optimizers import SGD, Adagrad, AdaHessian, Adam, AdamW, RMSprop
from adahessian.lab.configs.presets import Configs, preset, same_for, with_modern
from adahessian.lab.configs.run import ScheduleConfig, WithHoldout


class ImageConfig(WithHoldout):
    """Classification of CIFAR-10's images."""

    default_holdout: ClassVar[int] = 5000

    batch_size: Count = 256  # Images per batch, over all processes.
    depth: Annotated[int, minimum(8)] = 20  # Layers of the ResNet: 6 n + 2.


class FolderConfig(WithHoldout):
    """Classification of images that are read from a folder, by ResNet18."""

    default_holdout: ClassVar[int] = 5000

    batch_size: Count = 256  # Images per batch, over all processes.
    image_size: Count = 224  # Height and width of the network's input.
    crops: Literal["resized", "padded"] = "resized"  # Resized random crops, or images shifted by a few pixels.
    workers: Natural = 4  # Processes that decode images. 0 decodes in the training process.
    cache_gib: NonNegative = 0.0  # Keep decoded images on the device if they fit (padded crops only).


_NOTES = """
    Adagrad and RMSprop are not in the paper. Their learning rates were not searched.
    test_accuracy uses batch norm's running statistics, as in the paper. At high learning rates they lag behind the
    weights. test_accuracy_recomputed uses statistics of about 5,000 training images instead.
    """
_CIFAR10 = "CIFAR-10 in its binary form: the folder cifar-10-batches-bin."
_FOLDERS = "with a folder for each class: train/<class>/*.JPEG and val/<class>/*.JPEG"
_STEPS = ScheduleConfig(schedule="steps", decay_epochs=(80, 120))
_PLATEAU = ScheduleConfig(schedule="plateau", decay_factor=0.5)


def _configs(task: ImageConfig | FolderConfig, decay: float, epochs: int, schedule: ScheduleConfig) -> Configs:
    optimizers = {
        "adahessian": AdaHessian(lr=0.15, weight_decay=decay / 0.15),
        "sgd": SGD(lr=0.1, momentum=0.9, weight_decay=decay),
        "adam": Adam(lr=0.001, weight_decay=decay),
        "adamw": AdamW(lr=0.01, weight_decay=decay / 0.01),
        "adagrad": Adagrad(lr=0.01, weight_decay=decay),
        "rmsprop": RMSprop(lr=0.001, weight_decay=decay),
    }
    return same_for(with_modern(optimizers), task, epochs=epochs, schedule=schedule)


@preset("cifar10-resnet20", "ResNet20 on CIFAR-10", _CIFAR10, _NOTES)
def cifar10_resnet20() -> Configs:
    """The learning rate decays after epochs 80 and 120, as in the paper. The authors' script decays an epoch earlier.

    The authors report the best epoch, and we report the last. Our shortcuts pad with zeros, and theirs convolve.
    """
    return _configs(ImageConfig(depth=20), 5e-4, 160, _STEPS)


@preset("cifar10-resnet32", "ResNet32 on CIFAR-10", _CIFAR10, _NOTES)
def cifar10_resnet32() -> Configs:
    """Like cifar10-resnet20, but with 32 layers."""
    return _configs(ImageConfig(depth=32), 5e-4, 160, _STEPS)


@preset("imagenet-resnet18", "ResNet18 on ImageNet", f"ImageNet (ILSVRC 2012) {_FOLDERS}.", _NOTES)
def imagenet_resnet18() -> Configs:
    """This is the better of the paper's two schedules. Learning rates are those of CIFAR-10, as in the paper.

    AdaHessian's weight decay is from a reply of the authors. The other optimizers use the same value. A plateau is one
    of the test accuracy, as in the paper, or of the validation accuracy with --holdout.
    """
    return _configs(FolderConfig(), 1e-4, 90, _PLATEAU)


@preset("image-folder-resnet18", "ResNet18 on a folder of images", f"Images {_FOLDERS} (or .jpg, .png).", _NOTES)
def image_folder_resnet18() -> Configs:
    """Not in the paper: imagenet-resnet18 for small images, such as Tiny ImageNet's.

    For images of 64 x 64 or smaller, the first convolution is 3 x 3, without pooling.
    """
    return _configs(FolderConfig(image_size=64, crops="padded", cache_gib=8.0), 1e-4, 40, _PLATEAU)
