"""Which kinds of batches are worth compiling for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from adahessian.curvature.batches import signature
from adahessian.messages import say_once

# The first kind is worth it at once, any other when it has come so often, and in so many batches since it first came.
# Compiling takes a minute, in which hundreds of batches go by uncompiled; capturing takes no longer than a few of them.
_OFTEN = 10
_OFTEN_TO_COMPILE = 300
_ONE_IN = 50
_MOST = 8
# Kinds that are counted at all: where every batch is of another kind, none is worth it.
_MOST_COUNTED = 1000


class Kinds:
    """Counts batches by shapes, dtypes and all else that compiled code depends on."""

    def __init__(self) -> None:
        self._worth_it: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        self._seen: dict[Hashable, int] = {}
        self._before: dict[Hashable, int] = {}
        self._batches = 0

    def key(self, batch: Any, *, compiles: bool = True, at_once: bool = False) -> Hashable | None:
        """The kind of a batch, if it is worth compiling for; None if it is not, or not yet.

        Args:
            batch: The batch.
            compiles: Whether a new kind takes the compiler's time, and not only that of a capture.
            at_once: Whether any kind is worth it, not only one that comes often.
        """
        try:
            kind: Hashable = signature(batch)
        except TypeError as error:
            say_once(f"batches are not compiled for, as they hold what cannot be compared: {error}")
            return None
        self._batches += 1
        if kind in self._worth_it:
            return kind
        if kind in self._refused or len(self._seen) >= _MOST_COUNTED:
            return None
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        since = self._batches - self._before.setdefault(kind, self._batches - 1)
        comes_often = seen >= (_OFTEN_TO_COMPILE if compiles else _OFTEN) and seen * _ONE_IN >= since
        if self._worth_it and not ((comes_often or at_once) and len(self._worth_it) < _MOST):
            say_once(
                "a batch of another shape is not compiled for, nor captured, unless that shape comes often; pad or "
                "drop incomplete batches to have all of them alike"
            )
            return None
        self._worth_it.add(kind)
        return kind

    def pass_by(self) -> None:
        """Count a batch of a kind that is worth it, without its being asked for."""
        self._batches += 1

    def refuse(self, kind: Hashable) -> None:
        """Do without the compiler for this kind from now on."""
        self._worth_it.discard(kind)
        self._refused.add(kind)
