"""The diagonal against the exact Hessian of small networks."""

import numpy as np
import pytest
import torch
from torch import nn

from adahessian import AdaHessian, Curvature
from adahessian.curvature import hutchinson
from cases import BATCH_NORM, CASES, exact_derivatives


def measured_diagonal(case, model, optimizer, batch):
    """The signed diagonal of one measurement, caught on its way into the optimizer."""
    caught = {}
    optimizer.feed_curvature = lambda diagonal, gradients: caught.update(diagonal)
    Curvature(model, case.loss, optimizer).measure(batch)
    return np.concatenate([caught[param].numpy().ravel() for param in model.parameters()])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_equal_those_of_the_exact_hessian(case):
    model, batch = case.model(), case.batch()
    optimizer = AdaHessian(model.parameters(), num_probes=3)
    flat = np.concatenate([param.detach().numpy().ravel() for param in model.parameters()])
    _, hessian = exact_derivatives(case, model, batch)(flat)
    true = np.zeros_like(flat)
    for probe in range(3):
        z = np.concatenate([signs.numpy().ravel() for signs in optimizer.draw_probes(probe)])
        true += z * (hessian @ z) / 3
    np.testing.assert_allclose(measured_diagonal(case, model, optimizer, batch), true, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_mean_over_probes_approaches_the_exact_diagonal(case):
    model, batch = case.model(), case.batch()
    flat = np.concatenate([param.detach().numpy().ravel() for param in model.parameters()])
    _, hessian = exact_derivatives(case, model, batch)(flat)
    probes = 400
    found = measured_diagonal(case, model, AdaHessian(model.parameters(), num_probes=probes), batch)
    # The variance of one probe at element i is the squared norm of row i without its diagonal.
    deviation = np.sqrt(np.maximum((hessian**2).sum(1) - np.diag(hessian) ** 2, 0) / probes)
    assert np.all(np.abs(found - np.diag(hessian)) < 5 * deviation + 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_a_diagonal_hessian_is_exact_with_any_probe(seed):
    torch.manual_seed(seed)
    params = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)]
    params[1].requires_grad_()
    optimizer = AdaHessian(params, seed=seed)
    sum((param**4).sum() for param in params).backward(create_graph=True)
    exact = [12 * param.detach() ** 2 for param in params]
    optimizer.step()
    for param, diagonal in zip(params, exact, strict=True):
        torch.testing.assert_close(optimizer.state[param]["hessian_rms"], diagonal, rtol=1e-13, atol=0)


def test_complex_parameters_are_pairs_of_real_ones():
    torch.manual_seed(0)
    start = torch.randn(6, dtype=torch.complex128)
    before, after = (torch.randn(2, dtype=torch.float64) for _ in range(2))
    weights = torch.randn(5, 12, dtype=torch.float64)

    def loss_of(real, imaginary):
        return (torch.tanh(weights @ torch.cat([real, imaginary])) ** 2).sum() + (real**4).sum()

    finals = []
    for split in (False, True):
        parts = [start.real.clone(), start.imag.clone()] if split else [start.clone()]
        params = [tensor.clone().requires_grad_() for tensor in (before, *parts, after)]
        optimizer = AdaHessian(params)
        for _ in range(10):
            optimizer.zero_grad()
            first, *middle, last = params
            real, imaginary = middle if split else torch.view_as_real(middle[0]).unbind(-1)
            (loss_of(real, imaginary) * (first.sum() + last.prod())).backward(create_graph=True)
            optimizer.step()
        first, *middle, last = (param.detach() for param in params)
        finals.append(torch.cat([first, *(middle if split else [middle[0].real, middle[0].imag]), last]))
    torch.testing.assert_close(*finals, rtol=1e-12, atol=1e-12)


def test_complex_matrices_have_the_blocks_of_their_parts():
    param = torch.randn(3, 7, dtype=torch.complex64, requires_grad=True)
    optimizer = AdaHessian([param], block_size=4)
    torch.view_as_real(param).pow(4).sum().backward(create_graph=True)
    curvature = 12 * torch.view_as_real(param.detach()).movedim(-1, 0) ** 2
    optimizer.step()
    true = torch.stack([curvature[..., :4].mean(-1), curvature[..., 4:].mean(-1)], dim=-1)
    torch.testing.assert_close(optimizer.state[param]["hessian_rms"], true)


def test_the_oracle_itself_against_differences_of_gradients():
    """Batch norm is where vmap over second derivatives goes wrong (torch 2.13, the rows of its weight)."""
    model, batch = BATCH_NORM.model(), BATCH_NORM.batch()
    derivatives = exact_derivatives(BATCH_NORM, model, batch)
    flat = np.concatenate([param.detach().numpy().ravel() for param in model.parameters()])
    _, hessian = derivatives(flat)
    step = 1e-5
    for i in (29, 31, 34):  # a bias of the convolution, a weight and a bias of batch norm
        unit = np.zeros_like(flat)
        unit[i] = step
        column = (derivatives(flat + unit)[0] - derivatives(flat - unit)[0]) / (2 * step)
        np.testing.assert_allclose(hessian[:, i], column, atol=1e-7)


def test_the_graph_is_kept_between_probes_and_freed_with_the_last(monkeypatch):
    kept, original = [], hutchinson.hessian_vector_product

    def watched(*args, retain_graph):
        kept.append(retain_graph)
        return original(*args, retain_graph=retain_graph)

    monkeypatch.setattr(hutchinson, "hessian_vector_product", watched)
    param = nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([param], num_probes=3)
    (param**4).sum().backward(create_graph=True)
    optimizer.step()
    assert kept == [True, True, False]


def test_a_product_that_one_probe_has_and_another_has_not():
    """As of a function that tells torch of no derivative where that is zero."""

    class Sometimes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gradient):
            return gradient.clone()

        @staticmethod
        def backward(ctx, along):
            return along if along[0] > 0 else None

    parameter = torch.tensor([3.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(parameter.square().sum(), parameter, create_graph=True)
    probes = [[torch.tensor([-1.0])], [torch.tensor([1.0])]]
    diagonal = hutchinson.hessian_diagonal([Sometimes.apply(gradient)], [parameter], probes.__getitem__, 2)
    assert diagonal[0].tolist() == [1.0]  # the mean of 0 and 2
