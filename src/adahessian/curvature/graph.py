"""What the graph of a loss or of a gradient is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from adahessian.curvature.errors import CurvatureError

# The code that every function decorated with @once_differentiable shares.
_ONCE = once_differentiable(lambda _: None).__code__
# What such a function leaves in the graph of a gradient.
_REFUSAL = "torch::autograd::Error"


def check_twice_differentiable(tensors: Iterable[Tensor]) -> None:
    """Refuse functions whose backward says that it cannot be differentiated.

    Torch itself would take their gradient for a constant wherever nothing else demands its derivative, and the
    curvature would be wrong without a word.

    Raises:
        CurvatureError: If there is one; it is named.
    """
    for node in _nodes(tensors):
        function = getattr(node, "_forward_cls", None)
        if function is not None and getattr(function.backward, "__code__", None) is _ONCE:
            name = function.__qualname__
        elif node.name() == _REFUSAL:
            name = "a custom autograd function"
        else:
            continue
        raise CurvatureError(
            f"no curvature: {name} cannot be differentiated twice: its backward is marked @once_differentiable. "
            "Remedy: write that backward with differentiable operations, without the decorator, or freeze the "
            "parameters before it."
        )


def _nodes(tensors: Iterable[Tensor]) -> Iterator[Node]:
    seen: set[Node] = set()
    waiting = [tensor.grad_fn for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(function for function, _ in node.next_functions)
