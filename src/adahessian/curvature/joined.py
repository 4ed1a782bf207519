"""Pairs of convolutions whose results are added, joined into one.

The derivative of a convolution in a direction is a sum of two, ``w * x' + w' * x``, and so are those of its gradients.
Each is one convolution of twice the size: of the channels of ``x'`` and ``x`` side by side for the convolution and for
the gradient of its input, of the images of both for the gradient of its weight. On images as small as CIFAR-10's the
number of kernels decides, and there are a third fewer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_CONVERT = torch.ops.prims.convert_element_type.default
# The masks of those gradients that one node computes alone, with the number of its result.
_OF_INPUT, _OF_WEIGHT = [True, False, False], [False, True, False]
_RESULTS = {0: _OF_INPUT, 1: _OF_WEIGHT}


def join_convolutions(graph: fx.Graph, among: Callable[[fx.Node], bool]) -> None:
    """Rewrite a graph in place.

    Args:
        graph: The graph.
        among: Which convolutions may be joined.
    """
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        if not all(isinstance(term, fx.Node) for term in node.args) or node.args[0] is node.args[1]:
            continue
        chains = [_chain(term) for term in node.args]
        first, second = (chain[-1] for chain in chains)
        if among(first) and among(second) and len(chains[0]) == len(chains[1]) and _alike(first, second, chains):
            _join(graph, node, first, second, chains[0])
            for chain in chains:
                for link in chain:
                    graph.erase_node(link)


def _chain(term: fx.Node) -> list[fx.Node]:
    """From a term of a sum back to what computed it: past a change of dtype and the choice among several results."""
    chain = [term]
    while chain[-1].target in (_CONVERT, operator.getitem) and len(chain[-1].users) == 1:
        chain.append(chain[-1].all_input_nodes[0])
    return chain


def _alike(first: fx.Node, second: fx.Node, chains: Sequence[Sequence[fx.Node]]) -> bool:
    """Whether two nodes are convolutions, or gradients of one kind, of the same shape, and serve this sum alone."""
    if any(len(link.users) != 1 for chain in chains for link in chain):
        return False
    links = [[(link.target, link.args[1:]) for link in chain[:-1]] for chain in chains]
    if links[0] != links[1] or first.target is not second.target:
        return False
    if first.target is aten.convolution.default:
        _, _, bias, *settings = first.args
        operands, is_plain = 2, bias is None
    elif first.target is aten.convolution_backward.default:
        _, _, _, _, *settings = first.args
        operands = 3
        is_plain = list(first.args[-1]) == _RESULTS.get(chains[0][-2].args[1])  # type: ignore[arg-type]
    else:
        return False
    transposed, groups = (settings[i] for i in (3, 5))
    return bool(
        is_plain
        and not transposed
        and groups == 1
        and list(first.args[operands:]) == list(second.args[operands:])
        and all(
            _value(one).shape == _value(other).shape and _value(one).dtype == _value(other).dtype
            for one, other in zip(first.args[:operands], second.args[:operands], strict=True)
        )
    )


def _join(graph: fx.Graph, total: fx.Node, first: fx.Node, second: fx.Node, chain: Sequence[fx.Node]) -> None:
    """Put one convolution in the place of a sum of two."""

    def both(operand: int, dim: int) -> fx.Node:
        return _call(graph, aten.cat.default, [first.args[operand], second.args[operand]], dim)

    with graph.inserting_before(total):
        if first.target is aten.convolution.default:
            joined = _call(graph, first.target, both(0, 1), both(1, 1), *first.args[2:])
        elif list(first.args[-1]) == _OF_INPUT:  # type: ignore[arg-type]
            # Of the input only the shape is read, and below so of the weight.
            joined = _call(graph, first.target, both(0, 1), first.args[1], both(2, 0), *first.args[3:])
        else:
            joined = _call(graph, first.target, both(0, 0), both(1, 0), first.args[2], *first.args[3:])
        for link in reversed(chain[:-1]):
            joined = _call(graph, link.target, joined, *link.args[1:])
    total.replace_all_uses_with(joined)
    graph.erase_node(total)


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    values = fx.map_arg(args, _value)
    fake = next(arg for arg in graph.nodes if isinstance(arg.meta.get("val"), Tensor)).meta["val"].fake_mode
    with fake:
        node.meta["val"] = target(*values)
    return node


def _value(node: Any) -> Any:
    return node.meta["val"]
