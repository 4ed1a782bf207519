"""Products by double backward against the exact Hessian of small networks."""

import gc
import weakref

import numpy as np
import pytest
import torch
from requested import derivatives, request_for, squares
from torch import nn

from adahessian.base.errors import CurvatureError
from adahessian.hessian.double_backward import Request, products_of
from cases import BATCH_NORM, CASES, MLP, RECURRENT, exact_derivatives


def flat(tensors):
    return np.concatenate([each.detach().numpy().ravel() for each in tensors])


@pytest.mark.parametrize("case", [*CASES, RECURRENT], ids=str)
def test_products_are_those_of_the_exact_hessian(case):
    model, batch = case.model(), case.batch()
    gradient, hessian = exact_derivatives(case, model, batch)(flat(model.parameters()))
    found = derivatives(model, case.loss, batch, num_probes=3)
    torch.testing.assert_close(found.loss, case.loss(model, batch).detach())
    np.testing.assert_allclose(flat(found.gradients), gradient, rtol=1e-9, atol=1e-12)
    assert len(found.probes) == len(found.products) == 3
    assert not np.array_equal(flat(found.probes[0]), flat(found.probes[1]))
    for z, product in zip(found.probes, found.products, strict=True):
        np.testing.assert_allclose(flat(product), hessian @ flat(z), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", [MLP, BATCH_NORM], ids=str)
def test_the_mean_over_probes_approaches_the_exact_diagonal(case):
    model, batch = case.model(), case.batch()
    _, hessian = exact_derivatives(case, model, batch)(flat(model.parameters()))
    probes = 400
    found = derivatives(model, case.loss, batch, num_probes=probes)
    terms = [flat(z) * flat(product) for z, product in zip(found.probes, found.products, strict=True)]
    # The variance of one probe at element i is the squared norm of row i without its diagonal.
    deviation = np.sqrt(np.maximum((hessian**2).sum(1) - np.diag(hessian) ** 2, 0) / probes)
    assert np.all(np.abs(np.mean(terms, 0) - np.diag(hessian)) < 5 * deviation + 1e-9)


def test_the_oracle_itself_against_differences_of_gradients():
    """Batch norm is where vmap over second derivatives goes wrong (torch 2.13, the rows of its weight)."""
    model, batch = BATCH_NORM.model(), BATCH_NORM.batch()
    exact = exact_derivatives(BATCH_NORM, model, batch)
    place = flat(model.parameters())
    _, hessian = exact(place)
    step = 1e-5
    for i in range(0, len(place), 7):
        unit = np.eye(len(place))[i]
        column = (exact(place + step * unit)[0] - exact(place - step * unit)[0]) / (2 * step)
        np.testing.assert_allclose(hessian[:, i], column, atol=1e-6)


def test_complex_parameters_are_pairs_of_real_ones():
    start, weights = torch.randn(3, dtype=torch.complex128), torch.randn(5, 6, dtype=torch.float64)

    def product(param, z):
        parts = torch.view_as_real(param) if param.is_complex() else param
        loss = (torch.tanh(weights @ parts.flatten()) ** 2).sum()
        gradients = torch.autograd.grad(loss, param, create_graph=True)
        return products_of(gradients, Request([param], 1, lambda probe: [z]))[1][0][0]

    signs = torch.tensor([[1, -1], [-1, -1], [1, 1]]).double()
    found = product(start.clone().requires_grad_(), torch.view_as_complex(signs))
    expected = product(torch.view_as_real(start).clone().requires_grad_(), signs)
    torch.testing.assert_close(torch.view_as_real(found), expected)


def test_products_are_at_least_in_float32():
    for dtype, expected in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        model = nn.Linear(3, 2).to(dtype)
        model.bias.requires_grad_(False)
        x = torch.randn(4, 3, dtype=dtype)
        request = request_for([model.weight])
        (gradient,) = torch.autograd.grad(squares(model, x), request.params, create_graph=True)
        assert products_of([gradient], request)[1][0][0].dtype == expected


def test_linear_unused_and_curved_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.curved, self.linear, self.unused = (nn.Parameter(torch.ones(2)) for _ in range(3))

    model = Model()
    found = derivatives(model, lambda model, _: (model.curved**2 + model.linear).sum(), None, num_probes=2)
    assert [None if each is None else each.tolist() for each in found.gradients] == [[2, 2], [1, 1], None]
    for z, product in zip(found.probes, found.products, strict=True):
        assert [None if each is None else each.tolist() for each in product] == [(2 * z[0]).tolist(), [0, 0], None]
    assert not any(each.requires_grad for each in (found.loss, *found.gradients[:2], *found.products[0][:2]))
    only_linear = derivatives(model, lambda model, _: model.linear.sum(), None)
    assert only_linear.products[0][1].tolist() == [0, 0]
    assert len(only_linear.probes[0]) == 3


def test_a_product_that_one_probe_has_and_another_has_not():
    """As for a function that gives torch no derivative where it is zero."""

    class Sometimes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gradient):
            return gradient.clone()

        @staticmethod
        def backward(ctx, along):
            return along if along[0] > 0 else None

    param = torch.tensor([3.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(param.square().sum(), param, create_graph=True)
    probes = [[torch.tensor([-1.0])], [torch.tensor([1.0])]]
    _, products = products_of([Sometimes.apply(gradient)], Request([param], 2, probes.__getitem__))
    assert [each[0].tolist() for each in products] == [[0.0], [2.0]]


def test_the_graph_is_freed_with_the_last_product():
    param = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad((param**4).sum(), param, create_graph=True)
    request = request_for([param], 3)
    products_of([gradient], request)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(gradient.sum(), param)


def test_no_graph_is_left_behind():
    class Kept(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append(weakref.ref(y))
            return y

    seen = []
    gc.disable()
    try:
        derivatives(Kept(3, 2), squares, torch.randn(4, 3))
        assert seen[0]() is None
    finally:
        gc.enable()


def test_sparse_gradients_are_rejected():
    model = nn.Embedding(5, 2, sparse=True)
    with pytest.raises(RuntimeError, match="sparse"):
        derivatives(model, squares, torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (lambda model, x: model(x).mean().item(), "float"),
        (lambda model, x: (model(x).mean(), None), "tuple"),
        (lambda model, x: model(x).mean(0), "shape"),
        (lambda model, x: model(x).mean() * 1j, "complex"),
        (lambda model, x: model(x).mean().detach(), "graph"),
        (lambda model, x: (x.requires_grad_() ** 2).mean(), "depends on none"),
        (lambda model, x: Once.apply(model(x)).mean(), "once_differentiable"),
        (lambda model, x: Failing.apply(model(x)).mean(), "not twice"),
    ],
)
def test_losses_that_cannot_be_differentiated_twice(loss, named):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with pytest.raises(CurvatureError, match=named):
        derivatives(model, loss, x)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise RuntimeError("not twice")


def test_a_loss_under_inference_mode_still_has_a_graph_if_it_can():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with torch.no_grad():
        assert derivatives(model, squares, x).gradients[0] is not None
    with torch.inference_mode(), pytest.raises(CurvatureError, match="inference_mode"):
        derivatives(model, squares, x)
