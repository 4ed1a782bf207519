"""AdaHessianKron in float64 NumPy, written from its equations and from nothing of the library.

Like :mod:`reference`, it keeps the whole history and sums anew at every step. Blocks have unequal sizes and roots are
those of an eigendecomposition.
"""

import math

import numpy as np

from reference import signs


def adahessian_kron(start, gradient_of, hessian_of, steps, *, damping, num_probes, beta1=0.9, beta2=0.95, **options):
    """Return the parameters after some steps, from sums over the whole history, and the lengths that were used."""
    lr, decay, seed = options["lr"], options["weight_decay"], options["seed"]
    shapes, sizes = [value.shape for value in start], [value.size for value in start]
    theta, cuts = np.concatenate([value.ravel() for value in start]), np.cumsum(sizes)[:-1]
    gradients, measured, last, limits = [], [], 0, set()

    def mean(values, beta):
        weights = (1 - beta) * beta ** np.arange(len(values))[::-1] / (1 - beta ** len(values))
        return sum(w * value for w, value in zip(weights, values, strict=True))

    def root(products):
        """The inverse root of the rows' factor, from the products of all measurements, block by block."""
        length, other = products[0][0].shape
        factor = mean([sum(y @ y.T for y in of_one) / num_probes for of_one in products], beta2) / other
        delta = max(1 / len(products), damping) * np.trace(factor) / length
        result, size = np.zeros_like(factor), math.ceil(length / math.ceil(length / options["block_size"]))
        for block in (slice(i, i + size) for i in range(0, length, size)):
            values, vectors = np.linalg.eigh(factor[block, block])
            result[block, block] = vectors @ np.diag((values + delta) ** -0.5) @ vectors.T
        return result

    for t in range(1, steps + 1):
        gradients.append(np.split(gradient_of(theta), cuts))
        if not measured or t <= options["curvature_warmup"] or t - last >= options["curvature_every"]:
            hessian, last, of_probes = hessian_of(theta), t, []
            for probe in range(num_probes):
                z = [signs(size, seed, len(measured), probe, i) for i, size in enumerate(sizes)]
                of_probes.append(np.split(hessian @ np.concatenate(z), cuts))
            measured.append(of_probes)
        parts = np.split(theta, cuts)
        for i, shape in enumerate(shapes):
            m = mean([g[i].reshape(shape) for g in gradients], beta1)
            products = [[each[i].reshape(shape) for each in of_one] for of_one in measured]
            if len(shape) == 1:
                rms = np.sqrt(mean([sum(y**2 for y in of_one) / num_probes for of_one in products], beta2))
                u = m / (rms + 0.1 * rms.mean())
            else:
                u = root(products) @ m @ root([[y.T for y in of_one] for of_one in products])
            rows = [(m, u, [g[i] for g in gradients])]
            if len(shape) > 1:
                rows = [(m[row], u[row], [g[i].reshape(shape)[row] for g in gradients]) for row in range(shape[0])]
            scaled = []
            for m_row, u_row, gs in rows:
                rms = np.linalg.norm(u_row) / u_row.size**0.5
                signal = np.linalg.norm(m_row) / np.sqrt(mean([np.sum(g**2) for g in gs], 0.99))
                ratio = np.abs(m_row).sum() * rms / np.sum(m_row * u_row)
                limits.add(int(ratio > 1) + int(ratio > 2))
                scaled.append(signal / rms * min(max(ratio, 1), 2) * u_row)
            parts[i] = (1 - lr * decay) * parts[i] - lr * np.concatenate(scaled)
        theta = np.concatenate(parts)
    return theta, limits
