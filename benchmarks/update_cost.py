"""The cost of an ordinary step, one that measures no curvature, beside torch's foreach AdamW.

    python benchmarks/update_cost.py

Both update the same shapes with the same gradients, in turns within one run, and the ratio of the two medians counts:
machines are shared and noisy, so a time by itself says little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from adahessian import AdaHessian
from adahessian.lab.provenance import provenance

Shapes = list[tuple[int, ...]]


def resnet20() -> Shapes:
    """ResNet20 for CIFAR-10: many small tensors, where Python and launches cost most."""
    shapes: Shapes = [(16, 3, 3, 3), (16,), (16,)]
    width = 16
    for stage in (16, 32, 64):
        for _ in range(3):
            shapes += [(stage, width, 3, 3), (stage,), (stage,), (stage, stage, 3, 3), (stage,), (stage,)]
            width = stage
    return [*shapes, (10, 64), (10,)]


def gpt(layers: int, width: int, vocabulary: int, context: int) -> Shapes:
    """A GPT with tied embeddings: few large tensors, where memory traffic costs most."""
    shapes: Shapes = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [*shapes, (width,), (width,)]


MODELS: dict[str, tuple[Shapes, int]] = {
    "resnet20 (0.27M)": (resnet20(), 100),
    "300 matrices of 16 x 16": ([(16, 16)] * 300, 30),
    "200 matrices of 64 x 63": ([(64, 63)] * 200, 30),
    "20 matrices of 1024 x 1000": ([(1024, 1000)] * 20, 5),
    "gpt 6x512 (45M)": (gpt(6, 512, 50257, 256), 5),
    "gpt2 (124M)": (gpt(12, 768, 50257, 1024), 2),
}

SETTINGS: dict[str, dict[str, Any]] = {
    "block 1": {},
    "block 8": {"block_size": 8},
    "block 32": {"block_size": 32},
    "block 32, power 1/2": {"block_size": 32, "hessian_power": 0.5},
}


def measured(params: list[Tensor], **settings: Any) -> AdaHessian:
    """An AdaHessian that has its curvature and needs no more of it."""
    optimizer = AdaHessian(params, weight_decay=0.01, foreach=True, update_every=10**9, **settings)
    optimizer.feed_curvature({param: torch.rand_like(param) for param in params})
    return optimizer


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of state, scalars aside: a count is not a cost that grows with the model."""
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim())


def medians_in_turns(candidates: dict[str, Callable[[], object]], steps: int, rounds: int) -> dict[str, float]:
    """Median seconds a step of each candidate, a few steps of each in every round."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(rounds + 1):
        for name, step in candidates.items():
            start = time.perf_counter()
            for _ in range(steps):
                step()
            if round_:  # the first one warms up
                times[name].append((time.perf_counter() - start) / steps)
    return {name: statistics.median(values) for name, values in times.items()}


def compare(shapes: Shapes, steps: int, rounds: int) -> list[dict[str, Any]]:
    """AdaHessian at each setting beside AdamW, on parameters of these shapes."""
    params = [torch.randn(shape).mul_(0.02).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    adamw = AdamW(params, lr=1e-6, weight_decay=0.01, foreach=True)
    optimizers: dict[str, Optimizer] = {"AdamW": adamw}
    optimizers |= {name: measured(params, lr=1e-6, **settings) for name, settings in SETTINGS.items()}
    medians = medians_in_turns({name: optimizer.step for name, optimizer in optimizers.items()}, steps, rounds)
    count = sum(param.numel() for param in params)
    return [
        {
            "optimizer": name,
            "milliseconds": 1e3 * medians[name],
            "time_to_adamw": medians[name] / medians["AdamW"],
            "state_bytes_per_parameter": state_bytes(optimizer) / count,
        }
        for name, optimizer in optimizers.items()
    ]


def main() -> None:
    """Print the table and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/update-cost-cpu.json"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    report: dict[str, Any] = {"provenance": provenance(seed=arguments.seed), "models": {}}
    for name, (shapes, steps) in MODELS.items():
        rows = compare(shapes, steps, arguments.rounds)
        report["models"][name] = rows
        print(f"\n{name}")
        for row in rows:
            print(
                f"  {row['optimizer']:<22} {row['milliseconds']:9.3f} ms   {row['time_to_adamw']:5.2f}x AdamW"
                f"   {row['state_bytes_per_parameter']:5.2f} bytes of state a parameter"
            )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {arguments.output}")


if __name__ == "__main__":
    main()
