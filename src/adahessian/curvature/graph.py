"""What the graph of a loss or of a gradient is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointFunction

from adahessian.curvature.errors import CurvatureError

# The code that every function decorated with @once_differentiable shares, and what it leaves in a gradient's graph.
_ONCE_CODE = once_differentiable(lambda _: None).__code__
_ONCE_MARK = "torch::autograd::Error"
# The gradient of a norm, whose mean and deviation torch takes for constants when it is differentiated twice.
_GRADIENT_OF_NORM = re.compile(r"(layer|batch)norm(?=backwardbackward)", re.IGNORECASE)


def check_twice_differentiable(tensors: Iterable[Tensor], *, of_loss: bool = False) -> None:
    """Refuse what torch differentiates twice without complaint, and wrongly.

    Args:
        tensors: The loss, or gradients that carry their graph.
        of_loss: Whether it is the loss. Gradients of norms in it, as of a gradient penalty, are refused then: nothing
            tells them from those that a gradient's graph has in any case.

    Raises:
        CurvatureError: If such an operation is found; it is named, with the remedy.
    """
    known = set()
    for node in nodes(tensors):
        name = node.name()
        kind = type(node), name
        if kind in known:
            continue
        norm = _GRADIENT_OF_NORM.search(name) if of_loss else None
        if norm is None:  # of norms each is looked at: it depends on more than the kind
            known.add(kind)
        problem = _problem(node) if norm is None else _problem_of_norm(node, norm.group(1).lower())
        if problem is not None:
            raise CurvatureError(f"no curvature: {problem}, or freeze the parameters before it.")


def _problem(node: Node) -> str | None:
    function = getattr(node, "_forward_cls", None)
    if function is CheckpointFunction:
        return (
            "reentrant activation checkpointing hides its parameters from a second derivative. Remedy: call "
            "torch.utils.checkpoint with use_reentrant=False"
        )
    # Its gradient is taken for a constant wherever nothing else demands its derivative.
    once = getattr(getattr(function, "backward", None), "__code__", None) is _ONCE_CODE
    if once or node.name() == _ONCE_MARK:
        name = getattr(function, "__qualname__", "a custom autograd function")
        return (
            f"{name} cannot be differentiated twice: its backward is marked @once_differentiable. Remedy: write that "
            "backward with differentiable operations, without the decorator"
        )
    # The norm that it saves for its backward is taken for a constant.
    if node.name() == "WeightNormInterfaceBackward0":
        return (
            "torch differentiates weight_norm wrongly the second time. Remedy: write it with ordinary operations, as a "
            "parametrization that returns g * v / v.norm(...)"
        )
    return None


def _problem_of_norm(node: Node, kind: str) -> str | None:
    if getattr(node, "_saved_train", True) is False:  # constants indeed
        return None
    return (
        f"the loss has a gradient of {kind}_norm in it, as a gradient penalty has, which torch differentiates wrongly. "
        "Remedy: compile=False, with weights in that norm and in full precision, or group_norm or rms_norm instead"
    )


def nodes(tensors: Iterable[Tensor]) -> Iterator[Node]:
    """All nodes of the graph behind tensors."""
    seen: set[Node] = set()
    waiting = [tensor.grad_fn for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(function for function, _ in node.next_functions)
