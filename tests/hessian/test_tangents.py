"""The compiler pass over tangents: they are rounded, or removed if they are zero. The gradient keeps its bits."""

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from requested import request_for, squares
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.func import grad, jvp
from torch.fx.experimental.proxy_tensor import make_fx

from adahessian.hessian import tangents
from adahessian.hessian.compiled import CompiledPass
from adahessian.hessian.tangents import TangentPass, mark

aten = torch.ops.aten
MARK = torch.ops.adahessian.tangent.default
CONVERT = torch.ops.prims.convert_element_type.default
PRODUCTS = [aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, aten.convolution_backward]


def targets(graph):
    """How often each operation occurs among those that have a use."""
    return Counter(node.target for node in graph.nodes if node.op == "call_function" and node.users)


def products(graph, dtype=None):
    """How many products there are, of one dtype."""
    count = 0
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) in PRODUCTS and node.users:
            values = node.meta["val"]
            values = [values] if isinstance(values, torch.Tensor) else [value for value in values if value is not None]
            count += dtype is None or values[0].dtype == dtype
    return count


# In a compiled pass --------------------------------------------------------------------------------------------------


class Compiled(NamedTuple):
    """The results of a compiled pass along two probes, and its rewritten graph."""

    gradients: list[torch.Tensor]
    products: list[torch.Tensor]
    marks: tuple[int, int]
    count: tuple[int, int]
    rounded: int


def compiled(dtype):
    seen = []

    class Watched(TangentPass):
        def uuid(self):
            """Return no key: compiled code is not cached."""

        def __call__(self, graph):
            seen.append((targets(graph)[MARK], products(graph)))
            super().__call__(graph)
            seen.append((targets(graph)[MARK], products(graph), products(graph, torch.bfloat16)))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3, bias=False))
    request = request_for(model.parameters(), num_probes=2)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tangents, "TangentPass", Watched)
        found = CompiledPass(model, squares, request.params, dtype)(torch.randn(32, 2, 4, 4), request, False)
    (marks_before, count_before), (marks_after, count_after, rounded) = seen
    along = [torch.cat([part.flatten() for part in parts]) for parts in found.products]
    return Compiled(found.gradients, along, (marks_before, marks_after), (count_before, count_after), rounded)


@pytest.fixture(scope="module")
def exact():
    return compiled(None)


@pytest.fixture(scope="module")
def rounded():
    return compiled(torch.bfloat16)


def test_the_gradient_keeps_every_bit(exact, rounded):
    assert all(torch.equal(a, b) for a, b in zip(exact.gradients, rounded.gradients, strict=True))


def test_the_product_changes_by_a_little_and_by_far_less_than_from_probe_to_probe(exact, rounded):
    error = (rounded.products[0] - exact.products[0]).norm()
    assert 0 < error < 0.03 * exact.products[0].norm()
    assert error < 0.03 * (exact.products[1] - exact.products[0]).norm()


def test_only_tangents_are_rounded_and_only_if_asked_for(exact, rounded):
    assert exact.rounded == 0
    # The convolution and the layer, and the gradients of both weights and of what is between them.
    assert rounded.count[1] - rounded.rounded == 5


def test_products_with_the_tangent_of_the_batch_are_left_out_and_no_mark_is_left(exact, rounded):
    for each in (exact, rounded):
        assert each.marks == (4, 0)
        assert each.count[1] < each.count[0]
    assert exact.count == rounded.count


# On graphs by themselves ---------------------------------------------------------------------------------------------


def traced(function, *inputs):
    """The graph of a function, as the compiler has it: without what has no use."""
    module = make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    return module


def passed(module, dtype=None):
    TangentPass(dtype)(module.graph)
    module.graph.lint()
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def backward_of_weight(gradient, images, kernel):
    return aten.convolution_backward(
        gradient, images, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
    )[1]


A = torch.randn(4, 4)
STACK = torch.randn(2, 4, 4)
IMAGES = torch.randn(2, 3, 6, 6)
KERNEL = torch.randn(4, 3, 3, 3)
OUTPUT = torch.randn(2, 4, 4, 4)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda a: a + a @ torch.full((4, 4), 0.0), (A,)),
        (lambda a: a + torch.full((4, 4), 0.0) @ a, (A,)),
        (lambda a: a + torch.bmm(torch.full((2, 4, 4), 0.0), a), (STACK,)),
        (lambda a: a + torch.bmm(torch.full((1, 4, 4), 0.0).expand(2, 4, 4).permute(0, 2, 1), a), (STACK,)),
        (lambda a: a + a @ torch.full((16,), 0.0).view(4, 4).clone(), (A,)),
        (lambda a: a + (a @ torch.full((4, 4), 0.0)) @ a, (A,)),
        (lambda x, k, y: y + torch.conv2d(torch.full((2, 3, 6, 6), 0.0), k), (IMAGES, KERNEL, OUTPUT)),
        (lambda x, k, y: y + torch.conv2d(x, torch.full((4, 3, 3, 3), 0.0)), (IMAGES, KERNEL, OUTPUT)),
        (lambda x, k, y: k + backward_of_weight(torch.full((2, 4, 4, 4), 0.0), x, k), (IMAGES, KERNEL, OUTPUT)),
        (lambda x, k, y: k + backward_of_weight(y, torch.full((2, 3, 6, 6), 0.0), k), (IMAGES, KERNEL, OUTPUT)),
    ],
)
def test_a_product_with_zero_is_left_out_and_the_result_is_the_same(function, inputs):
    module = traced(function, *inputs)
    assert products(module.graph) > 0
    assert products(passed(module).graph) == 0
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda a: a @ torch.full((4, 4), 1.0), (A,)),
        (lambda a: torch.addmm(a, a, torch.full((4, 4), 0.0)), (A,)),
        (lambda a: a @ (torch.full((4, 4), 0.0) + 1), (A,)),
        (lambda x, k: torch.conv2d(torch.full((2, 3, 6, 6), 0.0), k, torch.ones(4)), (IMAGES, KERNEL)),
        (lambda x, k: torch.conv2d(x, k), (IMAGES, KERNEL)),
    ],
)
def test_all_other_products_stay(function, inputs):
    module = traced(function, *inputs)
    assert products(module.graph) == products(passed(module).graph) == 1
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=0, atol=0)


def product_along(weight, direction, x):
    """The gradient of a small network, and its derivative along a marked direction."""
    return jvp(grad(lambda weight: (x @ weight).tanh().square().sum()), (weight,), (mark(direction),))


def test_what_a_direction_feeds_is_rounded_and_what_it_does_not_feed_is_not():
    inputs = (A, torch.randn(4, 4), torch.randn(8, 4))
    expected = product_along(*inputs)
    module = traced(product_along, *inputs)
    assert targets(module.graph)[MARK] == 1
    assert products(module.graph) == 6
    passed(module, torch.bfloat16)
    assert targets(module.graph)[MARK] == 0
    # Two were products with the tangent of x, which is zero; the layer and its gradient stay as they are.
    assert products(module.graph) == 4
    assert products(module.graph, torch.bfloat16) == 2
    found = module(*inputs)
    torch.testing.assert_close(found[0], expected[0])
    assert 0 < (found[1] - expected[1]).norm() < 0.02 * expected[1].norm()
    assert found[1].dtype == torch.float32


def test_an_operand_of_several_products_is_rounded_once():
    module = passed(traced(lambda a, z: (a @ mark(z), mark(z) @ a), A, A), torch.bfloat16)
    assert products(module.graph, torch.bfloat16) == 2
    # Three operands and two results.
    assert targets(module.graph)[CONVERT] == 5


def test_products_of_the_gradient_are_rounded_only_if_nobody_uses_it():
    for rounds_gradient in (False, True):
        module = traced(lambda a, z: (a @ a, mark(z) @ a), A, A)
        TangentPass(torch.bfloat16, rounds_gradient=rounds_gradient)(module.graph)
        assert products(module.graph, torch.bfloat16) == 1 + rounds_gradient


def test_gradients_of_a_convolution_that_nobody_uses_are_left_out():
    def by_input(x, w, z):
        with torch.enable_grad():
            inputs = x.detach().requires_grad_(), w.detach().requires_grad_()
            return torch.autograd.grad(nn.functional.conv2d(*inputs), inputs, mark(z))[0]

    x, w, z = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 3, 3)
    module = traced(by_input, x, w, z)
    (node,) = module.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    assert node.args[-1] == [True, True, False]
    expected = module(x, w, z)
    passed(module, None)
    assert node.args[-1] == [True, False, False]
    torch.testing.assert_close(module(x, w, z), expected)


def test_products_that_autocast_has_rounded_stay_as_they_are():
    module = passed(traced(lambda a, z: (a @ mark(z)).float() @ a.float(), A.bfloat16(), A.bfloat16()), torch.bfloat16)
    assert products(module.graph, torch.bfloat16) == 2
    assert module(A.bfloat16(), A.bfloat16()).dtype == torch.float32


def test_code_is_cached_by_what_is_rounded():
    half = torch.bfloat16
    assert TangentPass(None).uuid() == TangentPass(None).uuid() != TangentPass(half).uuid()
    assert TangentPass(half, rounds_gradient=True).uuid() != TangentPass(half).uuid()
