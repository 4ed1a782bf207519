"""Batches of any structure: their tensors, slices and signatures."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from adahessian.base.log import info_once, warn_once

_PLAIN = (str, bytes, int, float)
_ANY = -1  # a list of strings or numbers fits any number of examples


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(batch, Tensor):
        yield batch
    for part in (_parts(batch) or {}).values():
        yield from tensors_in(part)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return a batch of the same structure with a function applied to each of its tensors."""
    return function(batch) if isinstance(batch, Tensor) else _map_parts(lambda part: map_tensors(function, part), batch)


def _parts(batch: Any) -> dict[Any, Any] | None:
    if isinstance(batch, (tuple, list)):
        return dict(enumerate(batch))
    if isinstance(batch, Mapping):
        return dict(batch.items())
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return None


def _map_parts(function: Callable[[Any], Any], batch: Any) -> Any:
    if (old := _parts(batch)) is None:
        return batch
    parts = {key: function(part) for key, part in old.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(*parts.values()) if hasattr(batch, "_fields") else type(batch)(parts.values())
    if isinstance(batch, Mapping) and not isinstance(batch, MutableMapping):
        return parts
    mapped = copy.copy(batch)  # the constructor may take other arguments, and a dataclass may be frozen
    assign = type(batch).__setitem__ if isinstance(batch, MutableMapping) else object.__setattr__
    for key, part in parts.items():
        assign(mapped, key, part)
    return mapped


def slice_batch(batch: Any, fraction: float, dim: int = 0) -> Any:
    """Return the first examples of a batch, at least one.

    Tensors are sliced along the batch dimension. A list of examples is shortened, and its entries stay whole. Examples
    are mappings that share keys, dataclasses, named tuples, tuples with a label, or tensors of different sizes. Tensors
    of one size, alone or in tuples, count as examples if the list is longer than that size, or as long as the rest of
    the batch has examples. A list of strings or numbers is shortened if it has one entry per example.
    Raise a ValueError if there is nothing to slice, or parts of the batch have different numbers of examples.

    >>> slice_batch({"x": torch.arange(8), "names": ["a", "b", "c", "d"] * 2}, 0.25)
    {'x': tensor([0, 1]), 'names': ['a', 'b']}
    """
    if fraction == 1:
        return batch
    found = _counts_in(batch, dim)
    plain = {counts[0] for counts in found if _ANY in counts}
    others = [counts for counts in found if _ANY not in counts]
    certain = {counts[0] for counts in others if len(counts) == 1} or plain
    sizes = {counts[0] if counts[0] in certain else counts[-1] for counts in others} or plain
    if len(sizes) != 1:
        raise ValueError(
            f"batch_fraction={fraction} needs the same number of examples everywhere along dimension {dim}, but the "
            f"batch has {sorted(sizes) or 'no tensor to slice'}. Set batch_dim to the batch dimension, or pass a "
            "function that returns a part of the batch as batch_fraction."
        )
    (size,) = sizes
    length = min(size, max(1, math.ceil(fraction * size - 1e-9)))  # 0.07 * 100 is a little more than 7

    def cut(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.narrow(dim, 0, length) if part.dim() > dim else part
        return part[:length] if size in certain and _counts(part, dim)[:1] == (size,) else _map_parts(cut, part)

    return cut(batch)


def choose_part(choose: Callable[[Any], Any], batch: Any) -> Any:
    """Return the part of a batch that a function chooses. Raise a ValueError if the part is empty.

    >>> choose_part(lambda batch: batch[:2], torch.arange(8))
    tensor([0, 1])
    """
    part = choose(batch)
    if isinstance(part, _PLAIN) or _is_empty(part):
        found = "no example" if _parts(part) or isinstance(part, Tensor) else repr(part)
        raise ValueError(f"batch_fraction is a function that returned {found}. Return the part to measure on.")
    return part


def _is_empty(part: Any) -> bool:
    if isinstance(part, Tensor):
        return part.numel() == 0
    return part is None if (parts := _parts(part)) is None else all(map(_is_empty, parts.values()))


def _counts_in(batch: Any, dim: int) -> list[tuple[int, ...]]:
    if counts := _counts(batch, dim):
        return [counts]
    return [counts for part in (_parts(batch) or {}).values() for counts in _counts_in(part, dim)]


def _counts(batch: Any, dim: int) -> tuple[int, ...]:
    """Return the possible numbers of examples in a tensor or list, starting with the length of a list."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape[dim : dim + 1])
    if not isinstance(batch, list) or not batch:
        return ()
    if all(_is_plain(part, dim) for part in batch):
        return len(batch), _ANY
    if len({(part.dtype, part.dim()) if isinstance(part, Tensor) else type(part) for part in batch}) > 1:
        return ()
    if isinstance(batch[0], (Tensor, tuple, list)) and not hasattr(batch[0], "_fields"):
        samples = [[part] if isinstance(part, Tensor) else part for part in batch]
        tensors = [each for sample in samples for each in sample if isinstance(each, Tensor)]
        sizes = {tensor.shape[dim] for tensor in tensors if tensor.dim() > dim}
        # A label in each entry, such as (image, 3), shows that the entries are examples.
        labeled = all(any(_is_plain(each, dim) for each in sample) for sample in samples)
        is_flat = all(isinstance(each, (Tensor, *_PLAIN)) for sample in samples for each in sample)
        if not tensors or not is_flat or len(set(map(len, samples))) > 1:
            return ()
        return (len(batch), *sizes) if len(sizes) == 1 and len(batch) <= max(sizes) and not labeled else (len(batch),)
    # Examples share keys. A DataLoader's mapping of inputs and its mapping of targets usually do not.
    return (len(batch),) if set.intersection(*(set(_parts(part) or ()) for part in batch)) else ()


def _is_plain(part: Any, dim: int) -> bool:
    return isinstance(part, _PLAIN) or (isinstance(part, Tensor) and part.dim() <= dim)


def signature(batch: Any) -> Hashable:
    """Return the properties of a batch that compiled code depends on. Objects of other types raise a TypeError."""
    if isinstance(batch, Tensor) and batch.layout is torch.strided:
        return Tensor, batch.shape, batch.stride(), batch.dtype, batch.device, batch.requires_grad
    if (parts := _parts(batch)) is not None:
        kind = Mapping if isinstance(batch, Mapping) else type(batch)
        return kind, tuple((key, signature(part)) for key, part in parts.items())
    # Other objects compare by identity, so no two would be equal, and each would be kept alive.
    if batch is None or isinstance(batch, (*_PLAIN, complex, Enum, torch.dtype, torch.device)):
        return type(batch), batch
    raise TypeError(type(batch).__name__)


class SeenSignatures:
    """Signatures worth compiling for: the first one at once, and up to three others after 50 batches each."""

    def __init__(self) -> None:
        self._tried: dict[Hashable, Hashable | None] = {}  # None after refuse
        self._seen: Counter[Hashable] = Counter()

    def key(self, batch: Any) -> Hashable | None:
        """Return the signature of a batch if it is worth compiling for, else None."""
        try:
            key = signature(batch)
        except TypeError as error:
            warn_once(
                f"Batches with a {error} are neither compiled nor captured, because it cannot be compared between "
                "batches. Pass only tensors, plain values and collections of them."
            )
            return None
        if key not in self._tried:
            self._seen[key] += 1
            if self._tried and (self._seen[key] < 50 or len(self._tried) == 4):
                info_once(
                    "A batch of a new shape is neither compiled nor captured until the shape has occurred 50 times. "
                    "Pad or drop incomplete batches, so that all batches have one shape."
                )
                if len(self._seen) > 1000:
                    self._seen.clear()
                return None
            self._tried[key] = key
        return self._tried[key]

    def refuse(self, key: Hashable) -> None:
        """Treat a signature as not worth compiling for from now on."""
        self._tried[key] = None
