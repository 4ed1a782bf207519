"""Tangents in lower precision: the products of a compiled curvature pass that only feed ``H z``.

In forward-over-reverse differentiation the gradient and its tangent are computed side by side, and two thirds of the
matrix products and convolutions belong to the tangent alone. Rounding their operands to bfloat16 leaves the gradient as
it is, bit by bit, and adds to ``H z`` an error far below that of Hutchinson's estimate.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

aten = torch.ops.aten

# Linear in each operand, accumulated in float32 by the hardware.
_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
    }
)


@torch.library.custom_op("adahessian::tangent", mutates_args=())
def mark(direction: Tensor) -> Tensor:
    """The direction of a derivative, marked: what depends on it in a graph is a tangent."""
    return direction.clone()


@mark.register_fake
def _(direction: Tensor) -> Tensor:
    return torch.empty_like(direction)


class ReducedTangents(CustomGraphPass):
    """A pass of the compiler that rounds the operands of tangent products.

    Args:
        dtype: What to round to; None leaves them and only takes the marks away.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def uuid(self) -> bytes:
        """What compiled code is cached by."""
        return get_hash_for_files((__file__,), str(self.dtype))

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place."""
        marks = [node for node in graph.nodes if node.target is torch.ops.adahessian.tangent.default]
        tangents = set(marks)
        for node in graph.nodes:
            if not tangents.isdisjoint(node.all_input_nodes):
                tangents.add(node)
        if self.dtype is not None:
            rounded: dict[fx.Node, fx.Node] = {}
            for node in list(graph.nodes):
                if node in tangents and node.target in _PRODUCTS:
                    _round_operands(graph, node, rounded, self.dtype)
        for node in marks:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _round_operands(graph: fx.Graph, product: fx.Node, rounded: dict[fx.Node, fx.Node], dtype: torch.dtype) -> None:
    def operand(node: fx.Node) -> fx.Node:
        value = node.meta["val"]
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return node
        if node not in rounded:
            with graph.inserting_after(node):
                rounded[node] = _convert(graph, node, dtype)
        return rounded[node]

    product.args = fx.map_arg(product.args, operand)
    values = product.meta["val"]
    if isinstance(values, Tensor):
        results = [product]
        product.meta["val"] = _as(values, dtype)
    else:
        results = [user for user in product.users if isinstance(user.meta["val"], Tensor)]
        product.meta["val"] = type(values)(_as(value, dtype) for value in values)
    for result in results:
        users = list(result.users)
        result.meta["val"] = _as(result.meta["val"], dtype)
        with graph.inserting_after(result):
            exact = _convert(graph, result, torch.float32)
        for user in users:
            user.replace_input_with(result, exact)


def _convert(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    converted = graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
    converted.meta["val"] = _as(node.meta["val"], dtype)
    return converted


def _as(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if value is None:
        return None
    with value.fake_mode:  # type: ignore[attr-defined]
        return value.to(dtype)
