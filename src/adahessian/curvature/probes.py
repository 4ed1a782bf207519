"""Rademacher probes as a pure function of where they are used.

A probe's sign depends on (seed, measurement, probe, parameter, element) and on nothing else: no generator is read or
advanced, nothing needs to be stored, every rank draws the same, and a shard draws the slice of the whole.

The bits are those of splitmix64 (Steele, Lea and Flood, 2014), a counter with increment G and a finalizer:

    key = mix(seed, measurement, probe, parameter),    word[w] = finalize(key + (w + 1) G)

Bit ``j`` of ``word[w]`` is the sign of element ``64 w + j``. Arithmetic is modulo 2^64, which int64 tensors do exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FINALIZER = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_BITS = 64
# Elements drawn at a time: the temporaries of a draw stay in the cache, and small beside the tensor itself.
_CHUNK = 1 << 20


class ProbeKey(NamedTuple):
    """What a parameter's probe depends on, besides the number of the probe and the element."""

    seed: int
    measurement: int
    parameter: int


def rademacher(
    shape: tuple[int, ...], key: ProbeKey, probe: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor of independent signs, +1 or -1 with equal odds.

    >>> key = ProbeKey(seed=0, measurement=0, parameter=0)
    >>> rademacher((6,), key, probe=0, dtype=torch.float32, device=torch.device("cpu"))
    tensor([-1.,  1.,  1.,  1.,  1., -1.])
    """
    signs = torch.empty(shape, dtype=dtype, device=device)
    flat = signs.view(-1)
    start = _start(key, probe)
    for first in range(0, flat.numel(), _CHUNK):
        chunk = flat[first : first + _CHUNK]
        bits = _bits(start, first // _BITS, -(-chunk.numel() // _BITS), device)
        chunk.copy_(bits[: chunk.numel()])
    return signs.mul_(2).sub_(1)


def rademacher_like(parameter: Tensor, key: ProbeKey, probe: int) -> Tensor:
    """Signs in the shape, dtype and device of a parameter; a complex one gets those of two real ones in a row."""
    real_dtype = parameter.dtype.to_real()
    real = rademacher(parameter.shape, key, probe, dtype=real_dtype, device=parameter.device)
    if not parameter.is_complex():
        return real
    following = key._replace(parameter=key.parameter + 1)
    return torch.complex(real, rademacher(parameter.shape, following, probe, dtype=real_dtype, device=parameter.device))


def _start(key: ProbeKey, probe: int) -> int:
    """The counter's start, from the words it depends on, one round of the generator each."""
    state = 0
    for word in (key.seed, key.measurement, probe, key.parameter):
        state = _finalize_int(((state ^ (word & _MASK)) + _GOLDEN) & _MASK)
    return state


def _finalize_int(x: int) -> int:
    for shift, factor in _FINALIZER:
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> _LAST_SHIFT)


def _bits(start: int, first_word: int, words: int, device: torch.device) -> Tensor:
    """The bits of consecutive words, one a byte."""
    x = torch.arange(first_word + 1, first_word + words + 1, dtype=torch.int64, device=device)
    x.mul_(_signed(_GOLDEN)).add_(_signed(start))
    for shift, factor in _FINALIZER:
        x.bitwise_xor_(_shift_right(x, shift)).mul_(_signed(factor))
    x.bitwise_xor_(_shift_right(x, _LAST_SHIFT))
    # Eight bytes a word and then eight bits a byte: the long dimension is handled in the narrowest type.
    places = torch.arange(8, dtype=torch.int64, device=device)
    octets = (x.unsqueeze(-1) >> (8 * places)).bitwise_and_(255).to(torch.uint8)
    return (octets.unsqueeze(-1) >> places.to(torch.uint8)).bitwise_and_(1).view(-1)


def _shift_right(x: Tensor, shift: int) -> Tensor:
    """A logical shift: that of int64 copies the sign."""
    return (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
