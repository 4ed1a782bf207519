"""What is benchmarked: networks, each with one batch of random data, and optimizers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import convert_conv2d_weight_memory_format

from adahessian.lab.configs import optimizers as configs
from adahessian.lab.configs.optimizers import OptimizerConfig
from adahessian.lab.models.gpt import GPT, LSTM
from adahessian.lab.models.resnet import ResNet

Batch: TypeAlias = tuple[Tensor, ...]


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy, averaged over all predictions of a batch."""
    inputs, targets = batch
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def bfloat16_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return :func:`mean_loss` under autocast to bfloat16. The parameters stay float32."""
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        return mean_loss(model, batch)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A network, the size of its batch and the optimizer that usually trains it."""

    baseline: Literal["sgd", "adamw"]
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]  # draws so many examples
    batch_size: int
    loss: Callable[[nn.Module, Batch], Tensor] = mean_loss
    needs_gpu: bool = False

    def build(self, device: torch.device) -> tuple[nn.Module, Batch]:
        """Return a new model and its batch, the same each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, batch = self.model(), self.batch(self.batch_size)
        model, batch = model.to(device), tuple(tensor.to(device) for tensor in batch)
        if device.type == "cuda" and batch[0].dim() == 4:  # as in training
            convert_conv2d_weight_memory_format(model, torch.channels_last)
            batch = (batch[0].to(memory_format=torch.channels_last), *batch[1:])
        return model, batch


def _images(size: int, batch_size: int) -> Batch:
    return torch.randn(batch_size, 3, size, size), torch.randint(10, (batch_size,))


def _tokens(vocabulary: int, length: int, batch_size: int) -> Batch:
    tokens = torch.randint(vocabulary, (batch_size, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


WORKLOADS: dict[str, Workload] = {
    "digits": Workload(baseline="sgd", model=partial(ResNet, 8), batch=partial(_images, 8), batch_size=64),
    "resnet20": Workload(baseline="sgd", model=partial(ResNet, 20), batch=partial(_images, 32), batch_size=256),
    "gpt": Workload(
        baseline="adamw", model=partial(GPT, 6, 512, 8, 8192, 256), batch=partial(_tokens, 8192, 256), batch_size=32
    ),
    "gpt2-124m": Workload(
        baseline="adamw",
        model=partial(GPT, 12, 768, 12, 50257, 1024),
        batch=partial(_tokens, 50257, 1024),
        batch_size=32,
        loss=bfloat16_loss,
        needs_gpu=True,
    ),
    "lstm": Workload(
        baseline="adamw", model=partial(LSTM, 2, 256, 2048), batch=partial(_tokens, 2048, 64), batch_size=32
    ),
}

LR = 1e-6  # so low that training on noise does not diverge
_PLAIN = ("adam", "adamw", "adagrad", "rmsprop", "muon", "soap", "sophia")
_ROUNDED: dict[str, Any] = {"lr": LR, "batch_fraction": 0.25, "product_dtype": "bfloat16"}
# AdaHessianKron refreshes its roots at each of the first measurements, and then at every third one.
_kron = partial(configs.AdaHessianKron, curvature_warmup=20)
# Optimizers and their settings, by the label of their row.
LABELS: dict[str, OptimizerConfig] = {
    "sgd": configs.SGD(lr=LR, momentum=0.9),
    **{name: configs.OPTIMIZERS[name](lr=LR) for name in _PLAIN},
    "adahessian": configs.AdaHessian(lr=LR, block_size=32),
    **{f"adahessian/every-{n}": configs.AdaHessian(block_size=32, curvature_every=n, **_ROUNDED) for n in (10, 20)},
    "adahessian-kron": _kron(lr=LR),
    **{f"adahessian-kron/every-{n}": _kron(curvature_every=n, **_ROUNDED) for n in (10, 20)},
    **{f"adahessian-kron/block-{n}": _kron(block_size=n, **_ROUNDED) for n in (64, 1024)},
}
