"""Twelve small trainings of twenty steps on a CPU, whose final parameters are stored in golden.npz.

A change that keeps the method keeps these numbers. Record them anew (``python tests/golden.py``) only when the method
itself changes, and say so in the commit. All data and all initial parameters come from Python's own random generator,
so that they are the same with every version of torch.
"""

import io
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adahessian import AdaHessian, Curvature

STORED = Path(__file__).with_suffix(".npz")
STEPS = 20
EARLY_STEPS = (1, 5)  # stored too for the trainings in EARLY: a difference is easier to find there
EARLY = ("mlp", "convolution", "attention")

Batch = tuple[Tensor, Tensor]
Training = Iterator[nn.Module]


def numbers(rng: random.Random, *shape: int) -> Tensor:
    """Uniform numbers from -1 to 1."""
    count = int(np.prod(shape))
    return torch.tensor([rng.uniform(-1, 1) for _ in range(count)], dtype=torch.float64).view(shape)


def batch(step: int, *shape: int, classes: int = 3) -> Batch:
    rng = random.Random(1000 + step % 7)
    return 2 * numbers(rng, *shape), torch.tensor([rng.randrange(classes) for _ in range(shape[0])])


def filled(model: nn.Module) -> nn.Module:
    """The model in float64, its weights and biases set; the scales of norms stay at one."""
    rng = random.Random(0)
    model.double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() > 1 or "bias" in name:
                param.copy_(0.6 * numbers(rng, *param.shape))
    return model


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def train(
    model: nn.Module, optimizer: AdaHessian, shape: Sequence[int], steps: Sequence[int] = range(STEPS), **options: float
) -> Training:
    """Measure, differentiate, step; yield the model after each step."""
    curvature = Curvature(model, loss_fn, optimizer, **options)
    for step in steps:
        examples = batch(step, *shape)
        curvature.measure(examples)
        optimizer.zero_grad()
        loss_fn(model, examples).backward()
        optimizer.step()
        yield model


def small_mlp() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)))


def mlp() -> Training:
    model = small_mlp()
    return train(model, AdaHessian(model.parameters(), lr=0.05, eps=1e-2), (16, 5))


def convolution() -> Training:
    model = filled(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, stride=2, groups=2, bias=False),
            nn.Flatten(),
            nn.Linear(16, 3),
        )
    )
    named = dict(model.named_parameters())
    # The groups of param_groups, without one of its own for the grouped convolution: their order decides the probes.
    groups = [
        {"params": [named["0.weight"], named["3.weight"]], "averaging": "kernel", "weight_decay": 0.01},
        {"params": [named["0.bias"]], "averaging": "kernel", "weight_decay": 0.0},
        {"params": [named[name] for name in ("1.weight", "1.bias", "5.bias")], "weight_decay": 0.0},
        {"params": [named["5.weight"]], "weight_decay": 0.01},
    ]
    optimizer = AdaHessian(groups, lr=0.03, eps=1e-2)
    return train(model, optimizer, (8, 2, 6, 6), batch_fraction=0.5)


class Attention(nn.Module):
    """One block of a Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.qkv = nn.Linear(4, 12)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 2)).transpose(1, 3).unbind(2)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head((x + self.mlp(x)).mean(1))


def attention() -> Training:
    model = filled(Attention())
    return train(model, AdaHessian(model.parameters(), lr=0.03, eps=1e-2, block_size=2), (6, 5, 4))


class Recurrent(nn.Module):
    """Two recurrent layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


def lstm() -> Training:
    model = filled(Recurrent())
    return train(model, AdaHessian(model.parameters(), lr=0.03, eps=1e-2), (6, 5, 4))


class Tied(nn.Module):
    """A word model whose embedding is its output layer; words 7 and 8 never occur."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.hidden = nn.Linear(4, 4)
        self.output = nn.Linear(4, 9)
        self.output.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        word = ((x[:, 0] + 2) * 1.6).long()
        return self.output(torch.tanh(self.hidden(self.words(word))))


def tied() -> Training:
    model = filled(Tied())
    return train(model, AdaHessian(model.parameters(), lr=0.05, eps=1e-2), (8, 1), batch_fraction=0.25)


def thawed() -> Training:
    """The first layer is frozen for seven steps, and then waits for the next measurement."""
    model = small_mlp()
    model[0].requires_grad_(False)
    optimizer = AdaHessian(model.parameters(), lr=0.05, eps=1e-2, curvature_every=3)
    for step, trained in enumerate(train(model, optimizer, (16, 5)), start=1):
        if step == 7:
            model[0].requires_grad_(True)
        yield trained


class Wide(nn.Linear):
    """A layer whose products are in float64, whatever its parameters are: products in bfloat16 differ by processor."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.double(), self.bias.double())


def bfloat16() -> Training:
    model = filled(nn.Sequential(Wide(5, 7), nn.Tanh(), Wide(7, 3))).bfloat16()
    return train(model, AdaHessian(model.parameters(), lr=0.05, eps=1e-2, block_size=3), (16, 5))


def two_groups() -> Training:
    model = small_mlp()
    groups = [
        {"params": model[0].parameters(), "block_size": 3, "weight_decay": 0.1, "curvature_every": 2},
        {"params": model[2].parameters(), "hessian_power": 0.5, "lr": 0.02, "curvature_every": 3, "maximize": False},
    ]
    return train(model, AdaHessian(groups, lr=0.05, eps=1e-2, seed=-3, curvature_warmup=2), (16, 5))


def accumulation() -> Training:
    """Three micro-batches of different sizes per step, weighted by their examples."""
    model = small_mlp()
    optimizer = AdaHessian(model.parameters(), lr=0.05, eps=1e-2, curvature_every=2)
    curvature = Curvature(model, loss_fn, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number, examples in enumerate((3, 5, 8)):
            part = batch(3 * step + number, examples, 5)
            curvature.measure(part, weight=examples)
            (loss_fn(model, part) * examples / 16).backward()
        optimizer.step()
        yield model


def resumed() -> Training:
    """Saved after nine steps, between two measurements, and loaded into a model and an optimizer made anew."""
    options = {"lr": 0.05, "eps": 1e-2, "block_size": 2, "curvature_every": 4, "curvature_warmup": 2, "seed": 7}
    model = small_mlp()
    optimizer = AdaHessian(model.parameters(), **options)
    yield from train(model, optimizer, (16, 5), range(9))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    optimizer = AdaHessian(model.parameters())
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    yield from train(model, optimizer, (16, 5), range(9, STEPS))


def probes() -> Training:
    """Signed means over blocks and three probes, every other step, with a steady start."""
    model = small_mlp()
    optimizer = AdaHessian(
        model.parameters(), lr=0.05, eps=1e-2, num_probes=3, signed=True, block_size=3, curvature_every=2,
        steady_start=True, betas=(0.8, 0.95),
    )  # fmt: skip
    return train(model, optimizer, (16, 5))


def classic() -> Training:
    """The curvature comes from the graph of the gradient."""
    model = small_mlp()
    optimizer = AdaHessian(model.parameters(), lr=0.05, eps=1e-2, curvature_every=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_fn(model, batch(step, 16, 5)).backward(create_graph=optimizer.curvature_due)
        optimizer.step()
        yield model


TRAININGS: dict[str, Callable[[], Training]] = {
    make.__name__: make
    for make in (
        mlp, convolution, attention, lstm, tied, thawed, bfloat16, two_groups, accumulation, resumed, probes, classic,
    )
}  # fmt: skip


def run(name: str) -> dict[str, np.ndarray]:
    """The parameters of one training, flattened and joined, in float64."""
    found = {}
    for step, model in enumerate(TRAININGS[name](), start=1):
        if step == STEPS or (name in EARLY and step in EARLY_STEPS):
            parts = [param.detach().double().flatten() for param in model.parameters()]
            found[f"{name}/{step}"] = torch.cat(parts).numpy()
    return found


def main() -> None:
    """Record all trainings."""
    np.savez_compressed(STORED, **{key: values for name in TRAININGS for key, values in run(name).items()})


if __name__ == "__main__":
    main()
