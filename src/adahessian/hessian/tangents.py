"""Tangents in a compiled pass: round operands that only ``H z`` needs, and remove products that are zero.

Forward-over-reverse differentiation computes the gradient together with its tangent. Two thirds of the matrix products
and convolutions belong to the tangent. Rounding their operands to bfloat16 changes no bit of the gradient. The error
that rounding adds to ``H z`` is far below the error of Hutchinson's estimate. If nobody uses the gradient, as on a
slice of the batch, its products are rounded too.
"""

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_BACKWARD = aten.convolution_backward.default

# Linear in each operand, accumulated in float32 by the hardware.
_MATRIX_PRODUCTS = (aten.mm.default, aten.bmm.default)
_PRODUCTS = (*_MATRIX_PRODUCTS, aten.addmm.default, aten.baddbmm.default, aten.convolution.default, _BACKWARD)

# Operations that map zeros to zeros.
_SHAPES = (aten.expand.default, aten.view.default, aten.reshape.default, aten.permute.default, aten.unsqueeze.default)
_KEEP_ZEROS = (*_SHAPES, aten.clone.default, _CONVERT)


@torch.library.custom_op("adahessian::tangent", mutates_args=())
def mark(direction: Tensor) -> Tensor:
    """Mark the direction of a derivative. All nodes of a graph that depend on it are tangents."""
    return direction.clone()


@mark.register_fake
def _(direction: Tensor) -> Tensor:
    return torch.empty_like(direction)


class TangentPass(CustomGraphPass):
    """Compiler pass that removes products with a zero tangent, such as those with the batch, and rounds the rest."""

    def __init__(self, dtype: torch.dtype | None, *, rounds_gradient: bool = False) -> None:
        self.dtype, self.rounds_gradient = dtype, rounds_gradient

    def uuid(self) -> bytes:
        """Return the key of this pass in the compiler's cache."""
        return get_hash_for_files((__file__,), f"{self.dtype} {self.rounds_gradient}")

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place."""
        marks = [node for node in graph.nodes if node.target is torch.ops.adahessian.tangent.default]
        tangents = set(marks)
        for node in graph.nodes:
            if not tangents.isdisjoint(node.all_input_nodes):
                tangents.add(node)
        _remove_zero_products(graph)
        _remove_unused_gradients(graph)
        if self.dtype is not None:
            rounded: dict[fx.Node, fx.Node] = {}
            for node in list(graph.nodes):
                if node.target in _PRODUCTS and (self.rounds_gradient or node in tangents) and _is_float32(node):
                    _round_operands(graph, node, rounded, self.dtype)
        for node in marks:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _remove_zero_products(graph: fx.Graph) -> None:
    """Replace products with a zero factor by constants, which are free."""
    zeros: set[fx.Node] = set()
    for node in list(graph.nodes):
        is_constant = node.target is aten.full.default and node.args[1] == 0
        if node.target is aten._efficientzerotensor.default:  # compiled code would read it at address 0
            zeros.add(_replace_by_zeros(graph, node))
        elif is_constant or (node.target in _KEEP_ZEROS and node.args[0] in zeros):
            zeros.add(node)
        elif _is_zero_product(node, zeros):
            zeros.add(_replace_by_zeros(graph, node))
        elif node.target is _BACKWARD and _is_zero_weight_gradient(node, zeros):
            zeros.update(_replace_by_zeros(graph, user) for user in list(node.users))


def _remove_unused_gradients(graph: fx.Graph) -> None:
    """Compute only the gradients of a convolution that are used. PyTorch requests both."""
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        used = {user.args[1] for user in node.users}
        node.args = (*node.args[:-1], [place in used for place in range(3)])
        node.meta["val"] = tuple(value if place in used else None for place, value in enumerate(node.meta["val"]))


def _is_zero_product(node: fx.Node, zeros: set[fx.Node]) -> bool:
    is_convolution = node.target is aten.convolution.default and node.args[2] is None
    return (is_convolution or node.target in _MATRIX_PRODUCTS) and not zeros.isdisjoint(node.args[:2])


def _is_zero_weight_gradient(node: fx.Node, zeros: set[fx.Node]) -> bool:
    wanted = node.args[-1]
    is_alone = isinstance(wanted, (list, tuple)) and list(wanted) == [False, True, False]
    return is_alone and not zeros.isdisjoint(node.args[:2])


def _replace_by_zeros(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    options = {"dtype": value.dtype, "device": value.device}
    with graph.inserting_after(node):
        zero = graph.call_function(aten.full.default, (list(value.shape), 0), options)
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
            rounded[node] = _convert(graph, node, dtype)
        return rounded[node]

    product.args = fx.map_arg(product.args, operand)
    values = product.meta["val"]
    if isinstance(values, Tensor):
        results = [product]
    else:
        results = [user for user in product.users if isinstance(user.meta["val"], Tensor)]
        product.meta["val"] = type(values)(_as(value, dtype) for value in values)
    for result in results:
        users = list(result.users)
        result.meta["val"] = _as(result.meta["val"], dtype)
        exact = _convert(graph, result, torch.float32)
        for user in users:
            user.replace_input_with(result, exact)


def _is_float32(product: fx.Node) -> bool:
    """Return whether the results of a product are float32. Under autocast, they have the lower precision already."""
    values = product.meta["val"]
    tensors = [values] if isinstance(values, Tensor) else values
    return all(each is None or each.dtype == torch.float32 for each in tensors)


def _convert(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    with graph.inserting_after(node):
        converted = graph.call_function(_CONVERT, (node, dtype))
    converted.meta["val"] = _as(node.meta["val"], dtype)
    return converted


def _as(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if value is None:
        return None
    with value.fake_mode:  # type: ignore[attr-defined]
        return value.to(dtype)
