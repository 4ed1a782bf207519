"""The tangents of a compiled curvature pass: what only feeds ``H z`` may be rounded, and what is zero left out.

In forward-over-reverse differentiation the gradient and its tangent are computed side by side, and two thirds of the
matrix products and convolutions belong to the tangent alone. Rounding their operands to bfloat16 leaves the gradient as
it is, bit by bit, and adds to ``H z`` an error far below that of Hutchinson's estimate.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from adahessian.curvature import joined

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

# What is zero before them is zero after them.
_KEEP_ZEROS = frozenset(
    {
        aten.expand.default,
        aten.view.default,
        aten.reshape.default,
        aten.permute.default,
        aten.clone.default,
        aten.unsqueeze.default,
        torch.ops.prims.convert_element_type.default,
    }
)


@torch.library.custom_op("adahessian::tangent", mutates_args=())
def mark(direction: Tensor) -> Tensor:
    """The direction of a derivative, marked: what depends on it in a graph is a tangent."""
    return direction.clone()


@mark.register_fake
def _(direction: Tensor) -> Tensor:
    return torch.empty_like(direction)


class TangentPass(CustomGraphPass):
    """A pass of the compiler over the graph of a forward-over-reverse product.

    It leaves out products with a zero tangent, such as that of a batch, rounds the operands of the others, and joins
    convolutions whose results are added.

    Args:
        dtype: What to round to; None leaves them as they are.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def uuid(self) -> bytes:
        """What compiled code is cached by."""
        return get_hash_for_files((__file__, joined.__file__), str(self.dtype))

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place."""
        marks = [node for node in graph.nodes if node.target is torch.ops.adahessian.tangent.default]
        tangents = set(marks)
        for node in graph.nodes:
            if not tangents.isdisjoint(node.all_input_nodes):
                tangents.add(node)
        _materialise_zeros(graph)
        _drop_zero_products(graph)
        if self.dtype is not None:
            rounded: dict[fx.Node, fx.Node] = {}
            for node in list(graph.nodes):
                if node in tangents and node.target in _PRODUCTS:
                    _round_operands(graph, node, rounded, self.dtype)
        joined.join_convolutions(graph, tangents.__contains__)
        for node in marks:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _materialise_zeros(graph: fx.Graph) -> None:
    """Zero tangents that torch keeps without any memory have an address of 0, which compiled code would read."""
    for node in list(graph.nodes):
        if node.target is aten._efficientzerotensor.default:
            _replace_by_zeros(graph, node)


def _drop_zero_products(graph: fx.Graph) -> None:
    """A product with a factor that is zero throughout becomes a constant, which costs nothing where it is used."""
    zeros: set[fx.Node] = set()
    for node in list(graph.nodes):
        if _is_zero(node, zeros):
            zeros.add(node)
        elif _is_zero_product(node, zeros):
            zeros.add(_replace_by_zeros(graph, node))
        elif _is_zero_weight_gradient(node, zeros):
            zeros.update(_replace_by_zeros(graph, user) for user in list(node.users))


def _is_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    if node.target is aten.full.default:
        return bool(node.args[1] == 0)
    return node.target in _KEEP_ZEROS and node.args[0] in zeros


def _is_zero_product(node: fx.Node, zeros: set[fx.Node]) -> bool:
    if node.target is aten.convolution.default and node.args[2] is None:
        return not zeros.isdisjoint(node.args[:2])
    return node.target in (aten.mm.default, aten.bmm.default) and not zeros.isdisjoint(node.args)


def _is_zero_weight_gradient(node: fx.Node, zeros: set[fx.Node]) -> bool:
    if node.target is not aten.convolution_backward.default or not isinstance(node.args[-1], (list, tuple)):
        return False
    return list(node.args[-1]) == [False, True, False] and not zeros.isdisjoint(node.args[:2])


def _replace_by_zeros(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    with graph.inserting_after(node):
        zero = graph.call_function(
            aten.full.default, (list(value.shape), 0), {"dtype": value.dtype, "device": value.device}
        )
    zero.meta["val"] = value
    node.replace_all_uses_with(zero)
    graph.erase_node(node)
    return zero


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
