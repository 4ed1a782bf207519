"""Which kinds of batches are worth compiling for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from adahessian.curvature.batches import signature
from adahessian.messages import say_once

# The first kind is compiled at once, any other when it has come so often: the last batch of an epoch is not worth a
# minute of compiling until there have been some epochs.
_OFTEN = 10
_MOST = 8
# Kinds that are counted at all: where every batch is of another kind, none is worth it.
_MOST_COUNTED = 1000


class Kinds:
    """Counts batches by shapes, dtypes and all else that compiled code depends on."""

    def __init__(self) -> None:
        self._worth_it: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        self._seen: dict[Hashable, int] = {}

    def key(self, batch: Any, *, often: int = _OFTEN) -> Hashable | None:
        """The kind of a batch, if it is worth compiling for; None if it is not, or not yet.

        Args:
            batch: The batch.
            often: How often a kind must have come, unless it is the first.
        """
        try:
            kind: Hashable = signature(batch)
        except TypeError as error:
            say_once(f"batches are not compiled for, as they hold what cannot be compared: {error}")
            return None
        if kind in self._worth_it:
            return kind
        if kind in self._refused or len(self._seen) >= _MOST_COUNTED:
            return None
        self._seen[kind] = self._seen.get(kind, 0) + 1
        if self._worth_it and (self._seen[kind] < often or len(self._worth_it) >= _MOST):
            say_once(
                "a batch of another shape is not compiled for, nor captured, until that shape has come "
                f"{often} times; pad or drop incomplete batches to have all of them alike"
            )
            return None
        self._worth_it.add(kind)
        return kind

    def refuse(self, kind: Hashable) -> None:
        """Do without the compiler for this kind from now on."""
        self._worth_it.discard(kind)
        self._refused.add(kind)
