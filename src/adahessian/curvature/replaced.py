"""Functions of torch's, replaced for the length of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_KINDS = (Tensor, nn.Parameter, nn.Buffer)
_DTYPES = (torch.float32, torch.float64)


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

    A mode is off while torch differentiates, when checkpointed layers run once more.

    Args:
        replacements: A module, the name of a function in it, and what to call instead.
    """
    before = [(module, name, getattr(module, name)) for module, name, _ in replacements]
    try:
        for module, name, function in replacements:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether custom functions can take tensors: all are torch's own, in one full precision, and not transformed."""
    first = tensors[0]
    return (
        first is not None
        and first.dtype in _DTYPES
        and all(each is not None and type(each) in _KINDS and each.dtype is first.dtype for each in tensors)
        and not torch.is_autocast_enabled(first.device.type)
        and torch._C._functorch.peek_interpreter_stack() is None
    )
