"""Prediction of clicks with DLRM, on Criteo's logs."""

from typing import ClassVar

from adahessian.lab.configs.checks import Count, NonNegative
from adahessian.lab.configs.optimizers import SGD, Adagrad, AdaHessian, AdaHessianKron
from adahessian.lab.configs.presets import Configs, preset, same_for
from adahessian.lab.configs.run import Metric, WithHoldout


class ClickConfig(WithHoldout):
    """Prediction of clicks with DLRM."""

    default_holdout: ClassVar[int] = 1_000_000
    score: ClassVar[Metric] = Metric(name="accuracy", title="accuracy, %", digits=3)

    batch_size: Count = 128  # Rows per batch, over all processes.
    file: str = "train.txt"  # File name of the log, in --data-dir or its subfolder criteo.
    embedding_width: Count = 16  # Size of an embedding.
    hash_size: Count = 1_000_000  # Buckets per column of categories.
    embedding_lr: NonNegative = 0.01  # Learning rate of Adagrad, which trains AdaHessian's embeddings.
    bottom_layers: tuple[Count, ...] = (512, 256, 64)  # Hidden units of the network that embeds numbers.
    top_layers: tuple[Count, ...] = (512, 256)  # Hidden units of the network that predicts.


@preset("criteo-dlrm", "DLRM on Criteo's click logs", "train.txt of Criteo's Kaggle challenge, or criteo/train.txt.")
def criteo_dlrm() -> Configs:
    """AdaHessian trains the layers and Adagrad the embeddings, as in the paper.

    Categories are hashed into a million buckets per column. DLRM's own tables are larger. SGD's learning rate is from
    DLRM's scripts. AdaHessianKron's was not searched. Adam, AdamW and RMSprop do not support sparse gradients.
    """
    optimizers = {
        "adahessian-kron": AdaHessianKron(lr=1e-3),
        "adahessian": AdaHessian(lr=0.043, betas=(0.9, 0.98), hessian_power=0.5),
        "adagrad": Adagrad(lr=0.01, eps=1e-10),
        "sgd": SGD(lr=0.1),
    }
    return same_for(optimizers, ClickConfig())
