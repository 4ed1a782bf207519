"""What is trained: networks on random data, at sizes that fit the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import convert_conv2d_weight_memory_format

from adahessian.lab.models.gpt import GPT
from adahessian.lab.models.lstm import LSTM
from adahessian.lab.models.resnet import ResNet

Batch: TypeAlias = tuple[Tensor, Tensor]
WorkloadName = Literal["resnet20", "resnet32", "gpt", "gpt2", "lstm"]
WORKLOAD_NAMES: tuple[WorkloadName, ...] = get_args(WorkloadName)

IMAGE_CLASSES = 10
# Images of 32 x 32, as in CIFAR-10.
IMAGE_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """A network, with the size of its batch."""

    batch_size: int
    depth: int
    width: int

    @property
    def size(self) -> str:
        """What can be varied, in words."""
        return f"batch {self.batch_size}, depth {self.depth}, width {self.width}"

    @property
    def other_depths(self) -> tuple[int, int]:
        """Depths to set this one against."""
        return self.depth // 2, 2 * self.depth

    @abstractmethod
    def make_model(self) -> nn.Module:
        """A new network, from torch's random stream."""

    @abstractmethod
    def make_batch(self) -> Batch:
        """Inputs and targets, from torch's random stream."""

    def at_other_sizes(self) -> dict[str, Workload]:
        """The same with another batch, depth or width, by a name that says which."""
        batches = {
            f"batch {size}": replace(self, batch_size=size) for size in (self.batch_size // 4, 4 * self.batch_size)
        }
        depths = {f"depth {depth}": replace(self, depth=depth) for depth in self.other_depths}
        widths = {f"width {width}": replace(self, width=width) for width in (self.width // 2, 2 * self.width)}
        return batches | depths | widths


@dataclass(frozen=True, kw_only=True)
class Images(Workload):
    """A ResNet that classifies images."""

    width: int = 16

    @property
    def other_depths(self) -> tuple[int, int]:
        """Two blocks more in each of the three stages, and four: 20, 32, 44."""
        return self.depth + 12, self.depth + 24

    def make_model(self) -> nn.Module:
        """A new ResNet."""
        return ResNet(self.depth, IMAGE_CLASSES, self.width)

    def make_batch(self) -> Batch:
        """Images of noise with random classes."""
        images = torch.randn(self.batch_size, 3, IMAGE_SIZE, IMAGE_SIZE)
        return images, torch.randint(IMAGE_CLASSES, (self.batch_size,))


@dataclass(frozen=True, kw_only=True)
class Tokens(Workload):
    """A language model that predicts the next token."""

    vocabulary: int
    length: int

    def make_batch(self) -> Batch:
        """Random tokens; the targets are the inputs, one further."""
        tokens = torch.randint(self.vocabulary, (self.batch_size, self.length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class GPTTokens(Tokens):
    """A GPT."""

    heads: int
    bfloat16: bool = False

    def make_model(self) -> nn.Module:
        """A new GPT."""
        kind = AutocastGPT if self.bfloat16 else GPT
        return kind(self.depth, self.width, self.heads, self.vocabulary, self.length)


class AutocastGPT(GPT):
    """A GPT that computes in bfloat16, with float32 parameters."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers to logits."""
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return super().forward(tokens)


@dataclass(frozen=True, kw_only=True)
class LSTMTokens(Tokens):
    """An LSTM."""

    def make_model(self) -> nn.Module:
        """A new LSTM."""
        return LSTM(self.depth, self.width, self.vocabulary)


GPU_WORKLOADS: dict[WorkloadName, Workload] = {
    "resnet20": Images(depth=20, batch_size=256),
    "resnet32": Images(depth=32, batch_size=256),
    "gpt": GPTTokens(depth=6, width=512, heads=8, vocabulary=8192, length=256, batch_size=32),
    "gpt2": GPTTokens(depth=12, width=768, heads=12, vocabulary=50257, length=1024, batch_size=32, bfloat16=True),
    "lstm": LSTMTokens(depth=2, width=256, vocabulary=2048, length=64, batch_size=32),
}
# Small enough for two cores and a few minutes.
CPU_WORKLOADS: dict[WorkloadName, Workload] = {
    "resnet20": Images(depth=20, batch_size=4),
    "resnet32": Images(depth=32, batch_size=4),
    "gpt": GPTTokens(depth=2, width=128, heads=4, vocabulary=512, length=64, batch_size=4),
    "gpt2": GPTTokens(depth=2, width=128, heads=4, vocabulary=512, length=64, batch_size=4, bfloat16=True),
    "lstm": LSTMTokens(depth=2, width=128, vocabulary=512, length=16, batch_size=16),
}


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy, the mean over all predictions of a batch."""
    inputs, targets = batch
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Task:
    """A network and a batch of its own on the device."""

    model: nn.Module
    batch: Batch

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, each once."""
        return list(self.model.parameters())

    @property
    def parameter_count(self) -> int:
        """How many numbers are trained."""
        return sum(param.numel() for param in self.parameters)


def make_task(workload: Workload, *, device: torch.device, channels_last: bool, seed: int) -> Task:
    """A new network and its batch: for one seed always the same.

    Args:
        workload: What to train.
        device: Where.
        channels_last: Whether images and the weights of convolutions lie in memory with their channels last.
        seed: Seed of the weights and of the data.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, (inputs, targets) = workload.make_model(), workload.make_batch()
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    if channels_last and isinstance(workload, Images):
        convert_conv2d_weight_memory_format(model, torch.channels_last)
        inputs = inputs.to(memory_format=torch.channels_last)
    return Task(model, (inputs, targets))
