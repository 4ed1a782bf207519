"""Algorithm 1 of the paper in float64 NumPy, written from its equations and from nothing of the library.

Sums are written out as sums: the whole history of gradients and curvatures is kept, and both moments are computed from
it anew at every step. The Hessian is the exact matrix. Blocks are lists of element numbers. Probes are drawn by
splitmix64 in Python's integers.
"""

from collections.abc import Callable

import numpy as np

_MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """One output of the generator, from a state that has been advanced already."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def signs(count: int, seed: int, measurement: int, probe: int, parameter: int) -> np.ndarray:
    """The Rademacher vector of one parameter, an element at a time."""
    gamma = 0x9E3779B97F4A7C15
    key = 0
    for word in (seed, measurement, probe, parameter):
        key = splitmix64(((key ^ (word & _MASK)) + gamma) & _MASK)
    words = [splitmix64((key + (w + 1) * gamma) & _MASK) for w in range(count // 64 + 1)]
    return np.array([1.0 if words[i // 64] >> (i % 64) & 1 else -1.0 for i in range(count)])


def blocks(shape: tuple[int, ...], layout: str, size: int) -> list[list[int]]:
    """The element numbers of each block of a tensor."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    if layout == "auto":
        layout = "kernel" if len(shape) > 2 else "row"
    if len(shape) < 2 or layout == "none":
        return [[int(i)] for i in numbers.ravel()]
    if layout == "kernel":
        return [list(map(int, kernel)) for kernel in numbers.reshape(shape[0] * shape[1], -1)]
    rows = numbers.reshape(-1, shape[-1])
    return [list(map(int, row[start : start + size])) for row in rows for start in range(0, shape[-1], size)]


def average(diagonal: np.ndarray, of: list[list[int]], averaging: str) -> np.ndarray:
    """The spatial average, one value an element."""
    result = np.empty_like(diagonal)
    for block in of:
        values = np.abs(diagonal[block]) if averaging == "magnitude" else diagonal[block]
        result[block] = values.sum() / len(block)
    return result


def adahessian(
    start: list[np.ndarray],
    derivatives: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    steps: int,
    *,
    lr: float = 0.15,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-4,
    weight_decay: float = 0.0,
    hessian_power: float = 1.0,
    block_size: int = 1,
    blocks_layout: str = "auto",
    averaging: str = "magnitude",
    num_probes: int = 1,
    update_every: int = 1,
    warmup_steps: int = 0,
    beta2_per: str = "measurement",
    steady_start: bool = False,
    seed: int = 0,
    maximize: bool = False,
) -> list[np.ndarray]:
    """The parameters after some steps.

    Args:
        start: The initial parameters.
        derivatives: From all parameters, flattened and joined, to the gradient and the Hessian matrix there.
        steps: How many to take.
    """
    sizes = [value.size for value in start]
    ends = np.cumsum([0, *sizes])
    theta = np.concatenate([value.ravel() for value in start]).astype(np.float64)
    beta1, beta2 = betas
    gradients: list[np.ndarray] = []
    measured: list[tuple[int, np.ndarray]] = []  # the step and the averaged diagonal
    for t in range(1, steps + 1):
        gradient, hessian = derivatives(theta)
        gradients.append(-gradient if maximize else gradient)
        if not measured or t <= warmup_steps or t - measured[-1][0] >= update_every:
            diagonal = np.zeros_like(theta)
            for probe in range(num_probes):
                z = np.concatenate([signs(n, seed, len(measured), probe, i) for i, n in enumerate(sizes)])
                diagonal += z * (hessian @ z) / num_probes
            spatial = [
                average(diagonal[a:b], blocks(value.shape, blocks_layout, block_size), averaging)
                for value, a, b in zip(start, ends[:-1], ends[1:], strict=True)
            ]
            if steady_start and not measured:
                of_each = [blocks(value.shape, blocks_layout, block_size) for value in start]
                means = [np.mean([d[block[0]] ** 2 for block in of]) for d, of in zip(spatial, of_each, strict=True)]
                spatial = [np.sqrt((d**2 + mean) / 2) for d, mean in zip(spatial, means, strict=True)]
            measured.append((t, np.concatenate(spatial)))
        m = sum((1 - beta1) * beta1 ** (t - i) * g for i, g in enumerate(gradients, start=1)) / (1 - beta1**t)
        # The curvatures that the Hessian momentum is a sum of: each measurement once, or once a step.
        if beta2_per == "measurement":
            history = [d for _, d in measured]
        else:
            # A measurement stands for its own step and those before it that had none.
            history = [next(d for when, d in measured if when >= i) for i in range(1, measured[-1][0] + 1)]
        n = len(history)
        sum_of_squares = sum((1 - beta2) * beta2 ** (n - i) * d * d for i, d in enumerate(history, start=1))
        v = np.sqrt(sum_of_squares / (1 - beta2**n)) ** hessian_power
        theta = theta - lr * weight_decay * theta
        theta = theta - lr * m / (v + eps)
    return [theta[a:b].reshape(value.shape) for value, a, b in zip(start, ends[:-1], ends[1:], strict=True)]
