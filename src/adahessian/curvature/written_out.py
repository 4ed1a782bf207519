"""What functions whose second derivative is written out have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad

# Tensors that are torch's own: subclasses may do what they like.
KINDS = (Tensor, nn.Parameter, nn.Buffer)
_DTYPES = (torch.float32, torch.float64)


class Pass:
    """A pass in which such functions take part, as long as it lasts.

    Their gradients can be differentiated once more, and no further. The pass says when that is what it is going to do:
    a gradient that is asked for before is a part of the loss, as in a gradient penalty. So is one of a function that is
    called by then, as by an autograd function whose backward takes a gradient itself.
    """

    def __init__(self) -> None:
        self.is_at_gradient = False
        self._is_over = False
        self._constants: dict[Hashable, Tensor] = {}

    def __enter__(self) -> Pass:
        return self

    def __exit__(self, *of_an_error: object) -> None:
        # Whoever has kept such a function has torch's own from now on.
        self._is_over = True
        self._constants.clear()

    def takes(self, *tensors: Tensor | None) -> bool:
        """Whether custom functions can take tensors, here."""
        return not self._is_over and are_plain(*tensors)

    def constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that functions share, as long as the pass lasts: a graph that captures the pass has its own."""
        if key not in self._constants:
            with torch.inference_mode(False), torch.no_grad():  # whoever asks first may not differentiate
                self._constants[key] = make()
        return self._constants[key]

    def remember(self, ctx: Any) -> None:
        """Have a custom function, in its forward, know the pass it is called in."""
        ctx.of_pass = self
        ctx.is_within_gradient = self.is_at_gradient

    @staticmethod
    def is_last_gradient(ctx: Any) -> bool:
        """Whether the gradient of such a function is the one to be differentiated just once more."""
        return bool(ctx.of_pass.is_at_gradient) and not ctx.is_within_gradient


class Watched(Pass):
    """A pass that remembers which functions took part."""

    def __init__(self) -> None:
        super().__init__()
        self.took_part: set[type] = set()

    def remember(self, ctx: Any) -> None:
        """Remember the function, too."""
        super().remember(ctx)
        self.took_part.add(type(ctx))


class _NoContext:
    """In place of a context, where nothing is going to be differentiated: what it is given is let go."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save nothing."""

    def set_materialize_grads(self, value: bool) -> None:
        """Expect no gradients."""


def applied(function: type[Function], *args: Any) -> Any:
    """What a custom function returns: of anything but the class of all of them ``apply`` has no type."""
    # The last of the passes goes through all functions once more, and torch's own way to call them takes time.
    return function.apply(*args) if torch.is_grad_enabled() else function.forward(_NoContext(), *args)


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether custom functions can take tensors: all are torch's own, in one full precision, and not transformed."""
    first = tensors[0]
    return (
        first is not None
        and first.dtype in _DTYPES
        and all(each is not None and type(each) in KINDS and each.dtype is first.dtype for each in tensors)
        and (first.is_cpu or first.is_cuda)
        and not torch.is_autocast_enabled(first.device.type)
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )


def in_full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """No autocast: a gradient may be asked for under one that the function itself was not under."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def gradient_in_torchs_operations(
    function: Callable[..., Any], inputs: Sequence[Tensor], needed: Sequence[bool], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradient of a function of tensors, which can be differentiated as often as torch can.

    Args:
        function: The function, in torch's own operations.
        inputs: What it takes.
        needed: By which of these.
        gradients: Those of the loss by what it returns.
    """
    if not any(needed):
        return (None,) * len(inputs)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # By aliases: an input may depend on another, as where a layer is used twice, and that path is not this one.
        aliases = [each.view_as(each) for each in inputs]
        outputs = function(*aliases)
        wanted = [each for each, is_needed in zip(aliases, needed, strict=True) if is_needed]
        found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=create_graph))
    return tuple(next(found) if is_needed else None for is_needed in needed)
