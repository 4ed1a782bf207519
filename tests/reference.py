"""Algorithm 1 of the paper in float64 NumPy, written from its equations and from nothing of the library.

Sums are written as sums: the whole history of gradients and curvatures is kept, and both moments are computed from it
anew at every step. The Hessian is the exact matrix. Blocks are lists of element numbers. Probes are drawn by splitmix64
in Python's integers.
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
    """The Rademacher vector of one parameter, element by element."""
    gamma = 0x9E3779B97F4A7C15
    key = 0
    for word in (seed, measurement, probe, parameter):
        key = splitmix64(((key ^ (word & _MASK)) + gamma) & _MASK)
    words = [splitmix64((key + (w + 1) * gamma) & _MASK) for w in range(count // 64 + 1)]
    return np.array([1.0 if words[i // 64] >> (i % 64) & 1 else -1.0 for i in range(count)])


def blocks(shape: tuple[int, ...], averaging: str, size: int) -> list[list[int]]:
    """The element numbers of each block of a tensor."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    if averaging == "auto":
        averaging = "kernel" if len(shape) in (4, 5) else "row"
    if len(shape) < 2 or averaging == "none":
        return [[int(i)] for i in numbers.ravel()]
    if averaging == "kernel":
        return [list(map(int, kernel)) for kernel in numbers.reshape(shape[0] * shape[1], -1)]
    rows = numbers.reshape(-1, shape[-1])
    return [list(map(int, row[start : start + size])) for row in rows for start in range(0, shape[-1], size)]


def average(diagonal: np.ndarray, of: list[list[int]], *, signed: bool) -> np.ndarray:
    """The spatial average, one value per block."""
    return np.array([(diagonal[block] if signed else np.abs(diagonal[block])).sum() / len(block) for block in of])


def over_elements(values: np.ndarray, of: list[list[int]]) -> np.ndarray:
    """The value of its block for each element."""
    result = np.empty(sum(map(len, of)))
    for value, block in zip(values, of, strict=True):
        result[block] = value
    return result


def is_factored(shape: tuple[int, ...], averaging: str) -> bool:
    """Whether rows and columns have values, instead of blocks."""
    return averaging == "factored" and len(shape) > 1


def squares(
    diagonal: np.ndarray, shape: tuple[int, ...], averaging: str, size: int, *, signed: bool
) -> list[np.ndarray]:
    """Return the terms of the running means: squares of blocks, or mean squares of rows and columns."""
    if is_factored(shape, averaging):
        matrix = diagonal.reshape(shape[0], -1) ** 2
        return [matrix.sum(1) / matrix.shape[1], matrix.sum(0) / matrix.shape[0]]
    return [average(diagonal, blocks(shape, averaging, size), signed=signed) ** 2]


def root(means: list[np.ndarray], shape: tuple[int, ...], averaging: str, size: int) -> np.ndarray:
    """The Hessian momentum of each element, from the averages over time of what :func:`squares` returns."""
    if is_factored(shape, averaging):
        row, column = means
        return np.sqrt(row[:, None] * column[None, :] / (column.sum() / len(column))).ravel()
    return np.sqrt(over_elements(means[0], blocks(shape, averaging, size)))


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
    averaging: str = "auto",
    signed: bool = False,
    num_probes: int = 1,
    curvature_every: int = 1,
    curvature_warmup: int = 0,
    steady_start: bool = False,
    seed: int = 0,
    maximize: bool = False,
) -> list[np.ndarray]:
    """The parameters after some steps.

    Args:
        start: The initial parameters.
        derivatives: From all parameters, flattened and joined, to the gradient and the Hessian matrix there.
        steps: How many steps to take.
    """
    shapes = [value.shape for value in start]
    sizes = [value.size for value in start]
    cuts = np.cumsum(sizes)[:-1]
    theta = np.concatenate([value.ravel() for value in start]).astype(np.float64)
    beta1, beta2 = betas
    gradients: list[np.ndarray] = []
    measured: list[list[list[np.ndarray]]] = []  # per measurement and parameter
    last = 0  # the step of the newest measurement
    for t in range(1, steps + 1):
        gradient, hessian = derivatives(theta)
        gradients.append(-gradient if maximize else gradient)
        if not measured or t <= curvature_warmup or t - last >= curvature_every:
            diagonal = np.zeros_like(theta)
            for probe in range(num_probes):
                z = np.concatenate([signs(n, seed, len(measured), probe, i) for i, n in enumerate(sizes)])
                diagonal += z * (hessian @ z) / num_probes
            found = [
                squares(part, shape, averaging, block_size, signed=signed)
                for part, shape in zip(np.split(diagonal, cuts), shapes, strict=True)
            ]
            if steady_start and not measured:
                found = [[(each + each.sum() / len(each)) / 2 for each in of_one] for of_one in found]
            measured.append(found)
            last = t
        m = sum((1 - beta1) * beta1 ** (t - i) * g for i, g in enumerate(gradients, start=1)) / (1 - beta1**t)
        n = len(measured)
        weights = [(1 - beta2) * beta2 ** (n - i) / (1 - beta2**n) for i in range(1, n + 1)]
        rms = []
        for number, shape in enumerate(shapes):
            history = zip(*(of_all[number] for of_all in measured), strict=True)
            means = [sum(w * each for w, each in zip(weights, values, strict=True)) for values in history]
            rms.append(root(means, shape, averaging, block_size))
        v = np.concatenate(rms) ** hessian_power
        theta = theta - lr * weight_decay * theta
        theta = theta - lr * m / (v + eps)
    return [part.reshape(shape) for part, shape in zip(np.split(theta, cuts), shapes, strict=True)]
