"""Handwritten digits, from scikit-learn."""

from typing import ClassVar, Literal

from adahessian.lab.configs.checks import Count
from adahessian.lab.configs.optimizers import SGD, Adagrad, AdaHessian, Adam, AdamW, RMSprop
from adahessian.lab.configs.presets import Configs, preset, same_for, with_modern
from adahessian.lab.configs.run import ScheduleConfig, WithHoldout


class DigitsConfig(WithHoldout):
    """Classification of 8 x 8 digits."""

    default_holdout: ClassVar[int] = 300

    batch_size: Count = 64  # Examples per batch, over all processes.
    network: Literal["conv", "mlp"] = "conv"  # Two convolutions, or a multilayer perceptron.


# All optimizers have a warm-up of one epoch, because AdaHessian's first steps are at risk.
_SCHEDULE = ScheduleConfig(schedule="cosine", lr_warmup_steps=20)
_DECAY = 5e-4


@preset("digits", "small CNN on handwritten digits")
def digits() -> Configs:
    """Not in the paper. Learning rates were chosen by cross-validation within the training digits.

    SGD, Adam, AdamW and AdaHessian use the best of seven, Adagrad and RMSprop the best of five.
    """
    optimizers = {
        "adahessian": AdaHessian(lr=0.3, weight_decay=_DECAY / 0.3),
        "sgd": SGD(lr=1.0, momentum=0.9, weight_decay=_DECAY),
        "adam": Adam(lr=0.1, weight_decay=_DECAY),
        "adamw": AdamW(lr=0.03, weight_decay=_DECAY / 0.03),
        "adagrad": Adagrad(lr=0.3, weight_decay=_DECAY),
        "rmsprop": RMSprop(lr=0.03, weight_decay=_DECAY),
    }
    return same_for(with_modern(optimizers), DigitsConfig(), epochs=10, schedule=_SCHEDULE)


@preset("digits-mlp", "small MLP on handwritten digits")
def digits_mlp() -> Configs:
    """Not in the paper. Learning rates are those of docs/learning-rate.md with a warm-up. Adam uses AdamW's."""
    optimizers = {"adahessian": AdaHessian(lr=0.3), "sgd": SGD(lr=0.3, momentum=0.9), "adam": Adam(lr=0.03)}
    mlp = DigitsConfig(network="mlp")
    return same_for(with_modern({**optimizers, "adamw": AdamW(lr=0.03)}), mlp, epochs=10, schedule=_SCHEDULE)
