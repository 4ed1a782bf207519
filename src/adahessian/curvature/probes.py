"""Rademacher probes as a pure function of where they are used.

A probe's sign depends on (seed, measurement, probe, parameter, element) and on nothing else: no generator is read or
advanced, nothing needs to be stored, every rank draws the same, and a shard draws the slice of the whole.

The bits are those of splitmix64 (Steele, Lea and Flood, 2014), a counter with increment G and a finalizer:

    key = mix(seed, measurement, probe, parameter),    word[w] = finalize(key + (w + 1) G)

Bit ``j`` of ``word[w]`` is the sign of element ``64 w + j``. Arithmetic is modulo 2^64, which int64 tensors do exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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
# Parameters of up to so many elements are drawn together.
_TOGETHER = 1 << 15


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
    start = as_int64(_finish(start_of(key.seed, key.measurement, probe), key.parameter))
    for first in range(0, flat.numel(), _CHUNK):
        chunk = flat[first : first + _CHUNK]
        words = -(-chunk.numel() // _BITS)
        counter = torch.arange(first // _BITS + 1, first // _BITS + words + 1, dtype=torch.int64, device=device)
        chunk.copy_(_signs(counter.mul_(as_int64(_GOLDEN)).add_(start), dtype)[: chunk.numel()])
    return signs


def rademacher_like(parameters: Sequence[Tensor], keys: Sequence[ProbeKey], probe: int) -> list[Tensor]:
    """Signs in the shapes, dtypes and devices of parameters; a complex one gets those of two real ones in a row.

    Small parameters are drawn together: a draw is some twenty operations, however few the elements.
    """
    signs: list[Tensor] = [
        torch.complex(*(_alone(parameter, key._replace(parameter=key.parameter + i), probe) for i in (0, 1)))
        if parameter.is_complex()
        else _alone(parameter, key, probe)
        if parameter.numel() > _TOGETHER
        else parameter
        for parameter, key in zip(parameters, keys, strict=True)
    ]
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, parameter in enumerate(parameters):
        if signs[i] is parameter:
            together.setdefault((parameter.device, parameter.dtype), []).append(i)
    for positions in together.values():
        drawn = _in_one_stream([parameters[i] for i in positions], [keys[i] for i in positions], probe)
        for i, sign in zip(positions, drawn, strict=True):
            signs[i] = sign
    return signs


def _alone(parameter: Tensor, key: ProbeKey, probe: int) -> Tensor:
    return rademacher(parameter.shape, key, probe, dtype=parameter.dtype.to_real(), device=parameter.device)


def _in_one_stream(parameters: Sequence[Tensor], keys: Sequence[ProbeKey], probe: int) -> list[Tensor]:
    """The same signs as one by one, from one tensor of words."""
    device = parameters[0].device
    starts = [as_int64(_finish(start_of(key.seed, key.measurement, probe), key.parameter)) for key in keys]
    words = torch.tensor([-(-parameter.numel() // _BITS) for parameter in parameters])
    ends = words.cumsum(0)
    firsts = ends - words
    table = torch.stack([firsts, torch.tensor(starts)]).to(device).repeat_interleave(words.to(device), dim=1)
    counter = torch.arange(1, table.shape[1] + 1, dtype=torch.int64, device=device) - table[0]
    flat = _signs(counter.mul_(as_int64(_GOLDEN)).add_(table[1]), parameters[0].dtype)
    return [
        flat[_BITS * first : _BITS * first + parameter.numel()].view(parameter.shape)
        for first, parameter in zip(firsts.tolist(), parameters, strict=True)
    ]


@lru_cache(maxsize=64)
def start_of(seed: int, measurement: int, probe: int) -> int:
    """The counter's start as far as all parameters share it: one round of the generator a word."""
    state = 0
    for word in (seed, measurement, probe):
        state = _finish(state, word)
    return state


def _finish(state: int, word: int) -> int:
    return _finalize_int(((state ^ (word & _MASK)) + _GOLDEN) & _MASK)


def _finalize_int(x: int) -> int:
    for shift, factor in _FINALIZER:
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> _LAST_SHIFT)


def _signs(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The signs that belong to the words of these counters. The counters are overwritten."""
    for shift, factor in _FINALIZER:
        x.bitwise_xor_(_shift_right(x, shift)).mul_(as_int64(factor))
    x.bitwise_xor_(_shift_right(x, _LAST_SHIFT))
    # Eight bytes a word, and eight signs a byte from a table: few operations handle what is long.
    places = torch.arange(8, device=x.device)
    octets = (x.unsqueeze(-1) >> 8 * places).bitwise_and_(255)
    signs_of_bytes = (torch.arange(256, device=x.device).unsqueeze(-1) >> places).bitwise_and_(1).mul_(2).sub_(1)
    return signs_of_bytes.to(dtype).index_select(0, octets.view(-1)).view(-1)


def _shift_right(x: Tensor, shift: int) -> Tensor:
    """A logical shift: that of int64 copies the sign."""
    return (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def as_int64(word: int) -> int:
    """The int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word
