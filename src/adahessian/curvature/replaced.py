"""Functions of torch's, replaced for the length of a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

_by_name = threading.RLock()


class Replaced(TorchFunctionMode):
    """Inside, functions of torch's are computed by others, which take the same arguments.

    Args:
        replacements: What to call instead of each function.
    """

    def __init__(self, replacements: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._replacements = replacements

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass every other function on."""
        return self._replacements.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def replaced_by_name(replacements: Sequence[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """The same for those who look a function up by its name, in the backward pass too.

    A mode is off while torch differentiates, when checkpointed layers run once more. Names belong to the process: one
    thread at a time is inside.

    Args:
        replacements: A module, the name of a function in it, and what to call instead.
    """
    with _by_name:
        before = [(module, name, getattr(module, name)) for module, name, _ in replacements]
        try:
            for module, name, function in replacements:
                setattr(module, name, function)
            yield
        finally:
            for module, name, function in before:
                setattr(module, name, function)
