"""A slice of a batch, whatever the batch is made of."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

# What a list may have one of for each example.
_PLAIN = (str, bytes, int, float)


def slice_batch(batch: Any, fraction: float, dim: int = 0) -> Any:
    """The first part of a batch along its batch dimension.

    Tensors inside tuples, named tuples, lists and mappings are sliced, at least one example each, and so are lists that
    have an entry, such as a text, for each example; everything else, and tensors that have no such dimension, is passed
    on as it is.

    Raises:
        ValueError: If there is no tensor to slice, or the tensors disagree about the size of the batch.

    Example:
        >>> import torch
        >>> slice_batch({"x": torch.zeros(8, 3), "y": torch.zeros(8)}, 0.25)["x"].shape
        torch.Size([2, 3])
    """
    if fraction == 1:
        return batch
    sizes = {tensor.shape[dim] for tensor in tensors_of(batch) if tensor.dim() > dim}
    if len(sizes) != 1:
        found = f"tensors of {sorted(sizes)} examples" if sizes else "no tensor"
        raise ValueError(
            f"cannot take a slice of this batch: it holds {found} along dimension {dim}. Name the batch dimension with "
            "batch_dim, or slice the batch yourself and set batch_fraction=1.0"
        )
    length = math.ceil(fraction * sizes.pop() - 1e-9)  # 0.07 * 100 is a little more than 7
    size = next(tensor.shape[dim] for tensor in tensors_of(batch) if tensor.dim() > dim)
    sliced = map_tensors(lambda tensor: tensor.narrow(dim, 0, length) if tensor.dim() > dim else tensor, batch)
    return _cut_lists(sliced, size, length) if dim == 0 else sliced


def _cut_lists(batch: Any, size: int, length: int) -> Any:
    """Lists of as many texts or numbers as there are examples, cut as the tensors are."""
    if (
        isinstance(batch, list)
        and len(batch) == size
        and all(isinstance(part, (str, bytes, int, float)) for part in batch)
    ):
        return batch[:length]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_cut_lists(part, size, length) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_cut_lists(part, size, length) for part in batch)
    if isinstance(batch, MutableMapping):
        for key, part in batch.items():
            batch[key] = _cut_lists(part, size, length)
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (tuple, list)):
        for part in batch:
            yield from tensors_of(part)
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from tensors_of(part)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """A batch of the same structure, with a function applied to each of its tensors."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, part) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(function, part) for part in batch)
    if isinstance(batch, Mapping):
        parts = {key: map_tensors(function, part) for key, part in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return parts
        # Not rebuilt in its own type: mappings of other libraries, which have attributes too, take other arguments.
        mapped = copy.copy(batch)
        mapped.update(parts)
        return mapped
    return batch


def signature(batch: Any) -> Any:
    """All that a batch has in common with others of its kind: structure, shapes and dtypes, and what is no tensor.

    Raises:
        TypeError: If something in it is neither a tensor, nor a collection, nor a plain value.
    """
    if isinstance(batch, Tensor):
        return Tensor, batch.shape, batch.stride(), batch.dtype, batch.device, batch.requires_grad
    if isinstance(batch, (tuple, list)):
        return type(batch), tuple(map(signature, batch))
    if isinstance(batch, Mapping):
        return Mapping, tuple((key, signature(part)) for key, part in batch.items())
    # Objects of other kinds compare by identity: none would be like another, and all would be kept alive.
    if batch is None or isinstance(batch, (str, bytes, int, float, complex, Enum, torch.dtype, torch.device)):
        return batch
    raise TypeError(f"a {type(batch).__name__}")
