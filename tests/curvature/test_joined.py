"""Convolutions whose results are added become one, and the sum stays what it was."""

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.func import grad, jvp
from torch.fx.experimental.proxy_tensor import make_fx

from adahessian.curvature.joined import join_convolutions
from adahessian.curvature.tangents import TangentPass, mark

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)

IMAGES, OTHER_IMAGES = torch.randn(2, 2, 3, 6, 6, dtype=torch.float64).unbind()
KERNEL, OTHER_KERNEL = torch.randn(2, 4, 3, 3, 3, dtype=torch.float64).unbind()
OUTPUT, OTHER_OUTPUT = torch.randn(2, 2, 4, 3, 3, dtype=torch.float64).unbind()


def traced(function, *inputs):
    module = make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    return module


def convolutions(module):
    return sum(node.target in CONVOLUTIONS for node in module.graph.nodes)


def joined(module):
    join_convolutions(module.graph, lambda node: True)
    module.graph.lint()
    module.recompile()
    return module


def convolve(images, kernel, **settings):
    return torch.conv2d(images, kernel, **({"stride": 2, "padding": 1} | settings))


def backward(output, images, kernel, *, mask, stride=2):
    return aten.convolution_backward(output, images, kernel, None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1, mask)


def of_input(output, images, kernel):
    return backward(output, images, kernel, mask=[True, False, False])[0]


def of_weight(output, images, kernel):
    return backward(output, images, kernel, mask=[False, True, False])[1]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, k, m, o, p: convolve(x, k) + convolve(y, m),
        lambda x, y, k, m, o, p: of_input(o, x, k) + of_input(p, x, m),
        lambda x, y, k, m, o, p: of_weight(o, x, k) + of_weight(p, y, k),
        lambda x, y, k, m, o, p: convolve(x.float(), k.float()).double() + convolve(y.float(), m.float()).double(),
    ],
)
def test_two_become_one(function):
    inputs = (IMAGES, OTHER_IMAGES, KERNEL, OTHER_KERNEL, OUTPUT, OTHER_OUTPUT)
    module = traced(function, *inputs)
    assert convolutions(module) == 2
    assert convolutions(joined(module)) == 1
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, k, m, o, p: convolve(x, k) - convolve(y, m),
        lambda x, y, k, m, o, p: torch.add(convolve(x, k), convolve(y, m), alpha=2),
        lambda x, y, k, m, o, p: convolve(x, k, bias=k[:, 0, 0, 0]) + convolve(y, m),
        lambda x, y, k, m, o, p: convolve(x[:, :, ::2, ::2], k, stride=1) + convolve(y, m),
        lambda x, y, k, m, o, p: convolve(x, k[:3, :1], groups=3) + convolve(y, m[:3, :1], groups=3),
        lambda x, y, k, m, o, p: (lambda one: one + convolve(y, m) + one.sum())(convolve(x, k)),
        lambda x, y, k, m, o, p: convolve(x, k).relu() + convolve(y, m),
        lambda x, y, k, m, o, p: convolve(x, k) + o,
        lambda x, y, k, m, o, p: of_input(o, x, k) + of_weight(p, y, k).sum(),
        lambda x, y, k, m, o, p: sum(
            map(torch.sum, backward(o, x, k, mask=[True, True, False])[:2]),
            backward(p, y, k, mask=[True] * 2 + [False])[0],
        ),
    ],
)
def test_all_others_stay(function):
    inputs = (IMAGES, OTHER_IMAGES, KERNEL, OTHER_KERNEL, OUTPUT, OTHER_OUTPUT)
    module = traced(function, *inputs)
    before = convolutions(module)
    assert convolutions(joined(module)) == before
    torch.testing.assert_close(module(*inputs), function(*inputs))


def along(kernel, inner, direction, other, x):
    """The gradient of two convolutions, and its derivative along marked directions."""

    def loss(kernel, inner):
        return torch.conv2d(torch.conv2d(x, kernel).tanh(), inner, padding=1).tanh().square().sum()

    return jvp(grad(loss, argnums=(0, 1)), (kernel, inner), (mark(direction), mark(other)))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_product_with_the_hessian_needs_a_third_fewer(dtype):
    inner = torch.randn(2, 4, 4, 3, 3)
    inputs = (KERNEL.float(), inner[0], OTHER_KERNEL.float(), inner[1], IMAGES.float())
    expected = along(*inputs)
    module = traced(along, *inputs)
    TangentPass(dtype)(module.graph)
    module.graph.lint()
    module.graph.eliminate_dead_code()
    module.recompile()
    # Two convolutions, each with one node for its gradients; then the tangents of both, of what is between them, and of
    # the gradients of both kernels. Those of the second were two each.
    assert convolutions(module) == 4 + 5
    for found, right in zip(module(*inputs)[1], expected[1], strict=True):
        assert (found - right).norm() < (1e-5 if dtype is None else 2e-2) * right.norm()
    for found, right in zip(module(*inputs)[0], expected[0], strict=True):
        torch.testing.assert_close(found, right)
