"""Undo changes to a trainer's objects, such as counters and lists of metrics, after a loss is computed once more."""

import copy
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def attributes_restored(owner: object, *, shared: Collection[str] = ()) -> Iterator[None]:
    """Replace the mutable attributes of an object with copies, and restore the originals at the end.

    Args:
        owner: The object whose attributes are replaced.
        shared: Names of attributes that are not copied, because they do not change or are too large.

    Example:
        >>> from types import SimpleNamespace
        >>> metrics = SimpleNamespace(count=1, losses=[0.5])
        >>> with attributes_restored(metrics):
        ...     metrics.count += 1
        ...     metrics.losses.append(0.4)
        >>> metrics
        namespace(count=1, losses=[0.5])
    """
    attributes, spares = dict(vars(owner)), dict[int, Any]()
    vars(owner).update({name: _spare(attributes[name], spares) for name in attributes.keys() - set(shared)})
    try:
        yield
    finally:
        vars(owner).clear()
        vars(owner).update(attributes)


def _spare(value: Any, spares: dict[int, Any]) -> Any:
    """Copy mutable values, except tensors in lists, because a list can hold the outputs of a whole epoch.

    ``spares`` maps the id of each original to its copy, because values may contain each other.
    """
    if id(value) in spares:
        return spares[id(value)]
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.clone()
    spare = copy.copy(value) if isinstance(value, (list, dict, set, deque)) else value
    spares[id(value)] = spare
    if isinstance(spare, list):
        spare[:] = [each if isinstance(each, Tensor) else _spare(each, spares) for each in spare]
    elif isinstance(spare, dict):
        for key, each in spare.items():
            spare[key] = _spare(each, spares)
    return spare
