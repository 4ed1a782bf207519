"""Labels that a model draws from its own predictions, as a pure function of where they are used.

A label depends on (seed, measurement, draw, row) and on the row's logits. As with probes, no generator is read or
advanced and nothing needs to be stored.

The draw inverts the cumulated distribution in integers, whose sums are exact in any order and on any device:

    w_c = round(2^30 p_c),    W_c = w_0 + ... + w_c,    label = first c with W_c > floor(u W_last),    0 <= u < 1

u being a multiple of 2^-30. A class of probability 0 is never drawn, and the last class is never overrun.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adahessian.curvature.probes import ProbeKey, rademacher

# So many fair bits a label. The weights, which sum to 2^30 and the rounding of each class, fit into int32.
_BITS = 30
# Parameters count from 0: no probe reads this stream.
_STREAM_OF_LABELS = -1


@torch.no_grad()
def draw_labels(logits: Tensor, seed: int, measurement: int, draw: int, first_row: int = 0) -> Tensor:
    """One label a row, drawn from ``softmax(logits)``.

    Args:
        logits: Logits of shape (rows, classes).
        seed: Seed of the draws.
        measurement: Number of the measurement.
        draw: Number of the draw within the measurement.
        first_row: Number of the first row, where others before it are elsewhere.

    Returns:
        Numbers of classes, of shape (rows,).

    >>> draw_labels(torch.zeros(8, 10), seed=0, measurement=0, draw=0)
    tensor([6, 7, 5, 1, 9, 9, 8, 4])
    """
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    cumulated = probabilities.mul_(1 << _BITS).round_().to(torch.int32).cumsum(-1, dtype=torch.int32)
    key = ProbeKey(seed, measurement, _STREAM_OF_LABELS)
    uniform = _uniform_integers(first_row, len(logits), key, draw, logits.device)
    threshold = (uniform * cumulated[:, -1]) >> _BITS
    labels = torch.searchsorted(cumulated, threshold.to(torch.int32).unsqueeze(-1), right=True).squeeze(-1)
    # A row of NaN has no distribution. Any class will do, since its gradient is NaN too.
    return labels.clamp_(max=logits.shape[-1] - 1)


def _uniform_integers(first: int, count: int, key: ProbeKey, draw: int, device: torch.device) -> Tensor:
    """Integers from 0 to 2^30 - 1, of 30 signs each."""
    digits = rademacher((first + count, _BITS), key, draw, dtype=torch.int8, device=device)[first:].gt(0)
    return (digits.to(torch.int64) << torch.arange(_BITS, device=device)).sum(-1)
