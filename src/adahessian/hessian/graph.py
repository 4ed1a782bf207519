"""Errors for operations whose second derivative PyTorch silently gets wrong."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointFunction

from adahessian.base.errors import CurvatureError

# The code that all functions decorated with @once_differentiable share, and the node they leave in a gradient's graph.
_ONCE_CODE = once_differentiable(lambda _: None).__code__
_ONCE_NODE = "torch::autograd::Error"
# The gradient of a norm. PyTorch's second derivative of a gradient treats mean and deviation as constants.
_GRADIENT_OF_NORM = re.compile(r"(layer|batch)norm(?=backwardbackward)", re.IGNORECASE)


def check_twice_differentiable(tensors: Iterable[Tensor], *, of_loss: bool = False) -> None:
    """Raise a CurvatureError if a graph contains an operation whose second derivative PyTorch silently gets wrong.

    The tensors are gradients with their graph, or the loss. The graph of a gradient may contain the gradient of a norm.
    In the graph of a loss, as with a gradient penalty, this is an error.
    """
    known = set()
    for node in _nodes(tensors):
        kind = type(node), node.name()
        if kind in known:
            continue
        norm = _GRADIENT_OF_NORM.search(node.name()) if of_loss else None
        if norm is None:
            known.add(kind)
            problem = _problem(node)
        elif getattr(node, "_saved_train", True) is False:  # in evaluation mode the statistics are constants
            continue
        else:
            problem = (
                f"The loss contains a gradient of {norm.group(1).lower()}_norm, as in a gradient penalty, and PyTorch "
                "computes a wrong second derivative of this gradient. Use group_norm or rms_norm instead"
            )
        if problem is not None:
            raise CurvatureError(f"{problem}, or freeze the parameters before it.")


def watch_functions(loss: Tensor) -> None:
    """Let the backward of ``loss`` raise an error if a custom function hides its gradients from autograd."""

    def check(name: str, gradients: Sequence[Tensor | None], incoming: Sequence[Tensor | None]) -> None:
        found, given = ([each for each in tensors if each is not None] for tensors in (gradients, incoming))
        # The function that computes the loss is not linear, although its incoming gradient is a constant.
        # Without gradient mode, this is the second differentiation, which keeps no graph.
        is_loss = torch.is_grad_enabled() and all(each.numel() == 1 for each in given)
        is_loss = is_loss and any(each.numel() > 1 for each in found)
        if found and not any(each.requires_grad for each in found) and (is_loss or any(g.requires_grad for g in given)):
            raise CurvatureError(
                f"{name} cannot be differentiated twice because its backward returns gradients without a graph, as a "
                "fused kernel does. Replace it with ordinary operations, or freeze the parameters before it."
            )

    for node in _nodes([loss]):
        if function := getattr(node, "_forward_cls", None):
            node.register_hook(partial(check, function.__qualname__))


def _problem(node: Node) -> str | None:
    function = getattr(node, "_forward_cls", None)
    if function is CheckpointFunction:
        return (
            "Reentrant activation checkpointing hides its parameters from a second derivative. Call "
            "torch.utils.checkpoint with use_reentrant=False"
        )
    # If nothing else needs its derivative, PyTorch treats this backward as a constant.
    if getattr(getattr(function, "backward", None), "__code__", None) is _ONCE_CODE or node.name() == _ONCE_NODE:
        name = getattr(function, "__qualname__", "a custom autograd function")
        return (
            f"{name} cannot be differentiated twice because its backward is marked @once_differentiable. Write that "
            "backward with differentiable operations and without the decorator"
        )
    # The backward treats its saved norm as a constant.
    if node.name() == "WeightNormInterfaceBackward0":
        return (
            "PyTorch computes a wrong second derivative of weight_norm. Replace it with a parametrization that returns "
            "g * v / v.norm(...)"
        )
    return None


def _nodes(tensors: Iterable[Tensor]) -> Iterator[Node]:
    seen: set[Node] = set()
    waiting = [tensor.grad_fn for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(function for function, _ in node.next_functions)
