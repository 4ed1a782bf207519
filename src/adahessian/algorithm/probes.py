"""Rademacher probes as a pure function of seed, measurement, probe, parameter and element.

No random generator is read or advanced, and nothing needs to be stored. Every rank draws the same signs.

The bits come from splitmix64 (Steele, Lea and Flood, 2014), a counter with increment G and a finalizer:

    start = mix(seed, measurement, probe, parameter),    word[w] = finalize(start + (w + 1) G)

Bit ``j`` of ``word[w]`` is the sign of element ``64 w + j``. Arithmetic is modulo 2^64, which int64 tensors do exactly.
"""

from functools import lru_cache

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FINALIZER = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # shift, then factor
_BITS = 64
_CHUNK = 1 << 20  # elements drawn at a time, so that temporaries stay in the cache


def draw_like(param: Tensor, key: int, position: int, out: Tensor | None = None) -> Tensor:
    """Draw signs with a parameter's shape and dtype, into a new tensor or into ``out``.

    A complex parameter uses two positions, one for its real part and one for its imaginary part.
    """
    dtype, device = param.dtype.to_real(), param.device
    signs = rademacher(param.shape, key, position, dtype=dtype, device=device)
    if param.is_complex():
        signs = torch.complex(signs, rademacher(param.shape, key, position + 1, dtype=dtype, device=device))
    return signs if out is None else out.copy_(signs)


def rademacher(shape: tuple[int, ...], key: int, position: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw independent signs, +1 or -1 with equal probability.

    ``key`` comes from :func:`probe_key`, and ``position`` numbers the parameters. The dtype does not affect the signs.

    >>> rademacher((6,), probe_key(seed=0, measurement=0, probe=0), 0, dtype=torch.float32, device=torch.device("cpu"))
    tensor([-1.,  1.,  1.,  1.,  1., -1.])
    """
    signs = torch.empty(shape, dtype=dtype, device=device)
    start = as_int64(_mix(key, position))
    for first, chunk in enumerate(signs.view(-1).split(_CHUNK)):
        counters = torch.arange(-(-chunk.numel() // _BITS), dtype=torch.int64, device=device)
        counters.add_(first * _CHUNK // _BITS + 1).mul_(as_int64(_GOLDEN)).add_(start)
        chunk.copy_(_signs_of(counters, dtype)[: chunk.numel()])
    return signs


@lru_cache(maxsize=64)
def probe_key(seed: int, measurement: int, probe: int) -> int:
    """Return the part of the counter's start that all parameters share."""
    return _mix(_mix(_mix(0, seed), measurement), probe)


def as_int64(word: int) -> int:
    """Return the int64 that has the same bits as an unsigned word."""
    return word - (1 << 64) if word >> 63 else word


def _mix(state: int, word: int) -> int:
    x = ((state ^ (word & _MASK)) + _GOLDEN) & _MASK
    for shift, factor in _FINALIZER:
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x


def _signs_of(counters: Tensor, dtype: torch.dtype) -> Tensor:
    """Finalize counters in place, and return one sign per bit."""
    for shift, factor in _FINALIZER:
        # Masked, because >> copies the sign bit of an int64.
        counters.bitwise_xor_((counters >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(as_int64(factor))
    # A table of the eight signs of each byte reduces the operations on the long tensor.
    places = torch.arange(8, device=counters.device)
    octets = (counters.unsqueeze(-1) >> 8 * places).bitwise_and_(255)
    table = (torch.arange(256, device=counters.device).unsqueeze(-1) >> places).bitwise_and_(1).mul_(2).sub_(1)
    return table.to(dtype).index_select(0, octets.view(-1)).view(-1)
