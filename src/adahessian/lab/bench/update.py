"""The update alone: a step that measures no curvature, beside fused AdamW and beside a copy of memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adahessian import AdaHessian
from adahessian.lab.bench.cells import Cell, unavailable
from adahessian.lab.bench.contenders import ADAMW_NAME, LR, fused_adamw
from adahessian.lab.bench.memory import available_bytes, state_bytes
from adahessian.lab.bench.timing import Candidate, Stopwatch, median_ratio
from adahessian.lab.models.gpt import GPT
from adahessian.lab.models.resnet import ResNet

Shapes = Sequence[tuple[int, ...]]

COPY_NAME = "copy of memory"
OUR_NAMES = {block_size: f"AdaHessian, block {block_size}" for block_size in (1, 32)}
# What the others are set against.
_REFERENCES = (COPY_NAME, ADAMW_NAME)
NAMES = (*_REFERENCES, *OUR_NAMES.values())

# Too large for any cache.
COPIED_BYTES = 2**29
# The parameter, its gradient, everybody's state and what is needed in between, generously.
_BYTES_NEEDED_PER_PARAMETER = 48


def _matrices(count: int, rows: int, columns: int) -> Callable[[], Shapes]:
    return lambda: [(rows, columns)] * count


def _network(build: Callable[[], nn.Module]) -> Callable[[], Shapes]:
    def shapes() -> Shapes:
        with torch.device("meta"):  # the shapes without the numbers
            return [tuple(param.shape) for param in build().parameters()]

    return shapes


# Many small tensors, where Python and launches cost most; rows that no block divides; and large ones, where memory
# traffic does.
SHAPES: dict[str, Callable[[], Shapes]] = {
    "ResNet20 (0.27M)": _network(lambda: ResNet(20)),
    "300 matrices of 16 x 16": _matrices(300, 16, 16),
    "200 matrices of 64 x 63": _matrices(200, 64, 63),
    "10 matrices of 1024 x 1000 (10M)": _matrices(10, 1024, 1000),
    "GPT 6 x 512 (45M)": _network(lambda: GPT(6, 512, 8, 50257, 256)),
    "24 matrices of 2048 x 2048 (100M)": _matrices(24, 2048, 2048),
    "GPT-2 (124M)": _network(lambda: GPT(12, 768, 12, 50257, 1024)),
    "60 matrices of 4096 x 4096 (1B)": _matrices(60, 4096, 4096),
}


def measure_update(
    shapes: Shapes, names: Collection[str], *, seed: int, stopwatch: Stopwatch
) -> Iterator[tuple[str, Cell]]:
    """The name and the cell of each contender, all timed in turns on the same parameters and gradients.

    Args:
        shapes: Shapes of the parameters.
        names: Those of ``NAMES`` to measure. AdamW and the copy of memory are always there.
        seed: Seed of the parameters and gradients.
        stopwatch: Times the updates.
    """
    measured = [name for name in NAMES if name in _REFERENCES or name in names]
    try:
        cells = _measure(shapes, measured, seed=seed, stopwatch=stopwatch)
    except Exception as error:
        cells = dict.fromkeys(measured, unavailable(error))
    yield from cells.items()


def _measure(shapes: Shapes, names: Collection[str], *, seed: int, stopwatch: Stopwatch) -> dict[str, Cell]:
    device = stopwatch.device
    count = sum(map(_size, shapes))
    _demand(count * _BYTES_NEEDED_PER_PARAMETER, device)
    params = _parameters(shapes, seed=seed, device=device)
    optimizers: dict[str, Optimizer] = {ADAMW_NAME: fused_adamw(params)}
    optimizers |= {name: _measured(params, block_size) for block_size, name in OUR_NAMES.items() if name in names}
    source, target = torch.rand(2, COPIED_BYTES // 4, device=device)
    candidates = {COPY_NAME: Candidate(lambda: target.copy_(source))}
    candidates |= {name: Candidate(optimizer.step) for name, optimizer in optimizers.items()}
    for candidate in candidates.values():
        candidate.step()
    seconds = stopwatch.in_turns(candidates)

    moved = {COPY_NAME: 2 * COPIED_BYTES} | {name: _bytes_moved(each, count) for name, each in optimizers.items()}
    speeds = {name: [moved[name] / each for each in seconds[name]] for name in names}
    cells: dict[str, Cell] = {
        name: {
            "milliseconds": 1e3 * median(seconds[name]),
            "bytes_per_second": median(speeds[name]),
            "share_of_copy": median_ratio(speeds[name], speeds[COPY_NAME]),
        }
        for name in names
    }
    for name, optimizer in optimizers.items():
        cells[name] |= {
            "time_to_adamw": median_ratio(seconds[name], seconds[ADAMW_NAME]),
            "bytes_moved_per_parameter": moved[name] / count,
            "state_bytes_per_parameter": state_bytes(optimizer) / count,
            "parameters": count,
        }
    return cells


def _demand(needed: int, device: torch.device) -> None:
    free = available_bytes(device)
    if needed > free:
        raise MemoryError(f"{needed / 1e9:.0f} GB are needed and {free / 1e9:.0f} are free")


def _parameters(shapes: Shapes, *, seed: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)

    def noise(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).mul_(0.02)

    params = [noise(shape).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = noise(tuple(param.shape))
    return params


def _measured(params: list[Tensor], block_size: int) -> AdaHessian:
    """An AdaHessian that has its curvature and needs no more of it."""
    optimizer = AdaHessian(params, LR, block_size=block_size, curvature_every=10**9)
    optimizer.set_curvature({param: torch.ones_like(param) for param in params})
    return optimizer


def _bytes_moved(optimizer: Optimizer, parameters: int) -> int:
    """What an update of float32 must move: 28 bytes a parameter for AdamW, 20 + 4/b for AdaHessian with blocks of b.

    Gradients are read; parameters and state are read and written, but a curvature is only read.
    """
    curvatures = (state["hessian_rms"] for state in optimizer.state.values() if "hessian_rms" in state)
    only_read = sum(int(curvature.nbytes) for curvature in curvatures)
    return 3 * 4 * parameters + 2 * state_bytes(optimizer) - only_read


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
