"""Kronecker factors: what they converge to, their inverse roots, and what must leave them alone."""

import copy
import math

import pytest
import torch
from torch import nn

from adahessian import AdaHessianKron
from adahessian.algorithm.kronecker import Elementwise, Matrix, inverse_roots, refresh_roots, rotated_update
from cases import ATTENTION, CONVOLUTION, MLP, flat_parameters, train

MANY, FINITE = torch.tensor([math.inf]), torch.tensor([False])  # measurements, which make the damping the least one


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def orthogonal(size, seed=0):
    return torch.linalg.qr(normal(size, size, seed=seed))[0]


def with_spectrum(values, seed=0):
    q = orthogonal(len(values), seed)
    return (q * values) @ q.T


def state_of(shape, dtype=torch.float64):
    zeros = [torch.zeros(size, dtype=dtype) for size in shape.stored.values()]
    return zeros[:2] + [root + torch.eye(root.shape[-1], dtype=dtype) for root in zeros[2:]]


def folded(shape, products, least=1e-16):
    stored = state_of(shape)
    shape.fold(stored, shape.reduce(None, products, None), torch.ones((), dtype=torch.float64))
    refresh_roots([shape], [stored], MANY.double(), least, FINITE)
    return stored


def root_by_eigh(matrix, added):
    values, vectors = torch.linalg.eigh(matrix.double())
    return (vectors * (values.clamp(min=0) + added) ** -0.5) @ vectors.T


def unit(tensor):
    return tensor / tensor.norm()


def hadamard(size):
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    return two if size == 2 else torch.kron(two, hadamard(size // 2))


@pytest.mark.parametrize("condition", [1.0, 30.0, 1e3])
@pytest.mark.parametrize(("m", "n"), [(4, 8), (8, 8), (1, 4), (16, 2)])
def test_a_kronecker_hessian_gives_newtons_direction(m, n, condition):
    a = with_spectrum(torch.logspace(0, math.log10(condition), m, dtype=torch.float64), 1)
    b = with_spectrum(3e-2 * torch.logspace(0, math.log10(condition), n, dtype=torch.float64), 2)
    shape, momentum = Matrix((m, n), 256), normal(m, n, seed=3)
    stored = folded(shape, [a @ z.view(m, n) @ b for z in hadamard(m * n)])
    for found, matrix in zip(stored[2:], (a, b), strict=True):
        torch.testing.assert_close(unit(found[0]), unit(torch.linalg.inv(matrix)), rtol=0, atol=1e-10)
    newton = unit(torch.linalg.solve(a, momentum) @ torch.linalg.inv(b))
    torch.testing.assert_close(unit(shape.rotate(momentum, stored)), newton, rtol=0, atol=1e-10)


def test_blocks_of_one_are_factored_mean_squares():
    y, momentum = normal(5, 7), normal(5, 7, seed=1)
    shape = Matrix((5, 7), 1)
    direction = shape.rotate(momentum, folded(shape, [y]))
    expected = momentum / (y.square().mean(1, keepdim=True) * y.square().mean(0)).sqrt()
    torch.testing.assert_close(direction, expected, rtol=1e-10, atol=0)


def test_a_stack_is_many_matrices():
    y, momentum = normal(3, 4, 5), normal(3, 4, 5, seed=1)
    stack, alone = Matrix((3, 4, 5), 3, is_stack=True), Matrix((4, 5), 3)
    found = stack.rotate(momentum, folded(stack, [y]))
    for i in range(3):
        expected = alone.rotate(momentum[i], folded(alone, [y[i]]))
        torch.testing.assert_close(unit(found[i]), unit(expected), rtol=0, atol=1e-6)


def test_the_direction_rotates_with_the_coordinates():
    products, momentum = [normal(5, 7, seed=seed) for seed in range(9)], normal(5, 7, seed=10)
    u, v, shape = orthogonal(5, 11), orthogonal(7, 12), Matrix((5, 7), 256)
    there = shape.rotate(u @ momentum @ v.T, folded(shape, [u @ y @ v.T for y in products], least=1e-4))
    expected = u @ shape.rotate(momentum, folded(shape, products, least=1e-4)) @ v.T
    torch.testing.assert_close(there, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(("shape", "block_size"), [((5, 7), 3), ((7, 4), 2), ((10, 3), 4), ((2, 9, 3), 5), ((3, 1), 2)])
def test_padding_is_as_blocks_of_unequal_size(shape, block_size):
    products, momentum, damping = [normal(*shape, seed=seed) for seed in range(3)], normal(*shape, seed=5), 1e-2
    matrix = Matrix(shape, block_size)
    found = matrix.rotate(momentum, folded(matrix, products, least=damping))
    flat = [y.flatten(1) for y in products]
    roots = []
    for of in (flat, [y.T for y in flat]):
        length, other = of[0].shape
        factor = sum(y @ y.T for y in of) / (other * len(of))
        root, size = torch.zeros_like(factor), math.ceil(length / math.ceil(length / block_size))
        for start in range(0, length, size):
            block = slice(start, start + size)
            root[block, block] = root_by_eigh(factor[block, block], damping * factor.trace() / length)
        roots.append(root)
    expected = (roots[0] @ momentum.flatten(1) @ roots[1]).view(shape)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("scale", [1e-14, 1.0, 1e14])
@pytest.mark.parametrize("size", [1, 2, 7, 64])
@pytest.mark.parametrize(("dtype", "damping", "tolerance"), [(torch.float32, 1e-2, 2e-3), (torch.float64, 1e-6, 1e-7)])
def test_inverse_roots_are_those_of_an_eigendecomposition(dtype, damping, tolerance, size, scale):
    spectra = [torch.logspace(-e, 0, size, dtype=torch.float64) for e in (0, 2, 8)]
    spectra += [torch.rand(size, dtype=torch.float64) for _ in range(5)]
    spectra += [torch.eye(size, dtype=torch.float64)[0], torch.zeros(size, dtype=torch.float64)]  # rank one, rank zero
    factors = torch.stack([scale * with_spectrum(values, i) for i, values in enumerate(spectra)]).to(dtype)
    means = factors.diagonal(dim1=-2, dim2=-1).mean(-1)
    roots = inverse_roots(factors, means, torch.full_like(means, damping), condition=size / damping)
    assert torch.equal(roots, roots.mT)
    for factor, mean, root in zip(factors, means, roots, strict=True):
        expected = root_by_eigh(factor, damping * max(mean.item(), 1e-30))
        assert (root - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("case", [MLP, CONVOLUTION, ATTENTION], ids=str)
@pytest.mark.parametrize("power", [-12, 9])
def test_a_power_of_two_times_the_loss_changes_no_bit(case, power):
    ends = []
    for factor in (1.0, 2.0**power):
        scaled, model = copy.copy(case), case.model(torch.float32)
        scaled.loss = lambda *args, factor=factor: factor * case.loss(*args)
        optimizer = AdaHessianKron(model.parameters(), lr=0.01, block_size=4, curvature_every=2, curvature_warmup=1)
        train(scaled, model, optimizer, case.batch(torch.float32), 8, "object")
        ends.append(flat_parameters(model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("block_size", [2, 256])
def test_rows_without_a_loss_keep_their_mean_and_the_factor_stays_semidefinite(block_size):
    shape = Matrix((6, 4), block_size)
    stored = state_of(shape)
    for number in range(1, 200):
        y = normal(1, 4, seed=number) * torch.linspace(0.1, 3, 6)[:, None] / number  # rows that go together
        away, before = normal(6, seed=1000 + number) > 0, stored[0].clone()
        y[away] = 0.0
        estimate = shape.reduce(None, [y], y.clone())
        shape.fold(stored, estimate, torch.tensor(max(0.3, 1 / number), dtype=torch.float64))
        was, now = (each.diagonal(dim1=-2, dim2=-1).flatten() for each in (before, stored[0]))
        torch.testing.assert_close(now[away], was[away], rtol=0, atol=0)
        for factor in stored[:2]:
            assert torch.equal(factor, factor.mT)
            assert torch.linalg.eigvalsh(factor).min() >= -1e-13 * factor.max()
    refresh_roots([shape], [stored], MANY.double(), 1e-2, FINITE)
    assert all(root.isfinite().all() for root in stored)


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e25])  # the square of the last one overflows
@pytest.mark.parametrize("measurements", [0, 3, 6])  # the least damping would be new at these
def test_products_that_are_not_finite_change_nothing_but_their_count(bad, measurements):
    params = [nn.Parameter(normal(*shape, dtype=torch.float32)) for shape in ((6, 4), (5, 4), (7,))]
    optimizer = AdaHessianKron(params, lr=0.01, block_size=3)

    def step(optimizer, value, reached=(0, 1, 2)):
        own = optimizer.param_groups[0]["params"]
        products = [normal(*param.shape, seed=i, dtype=torch.float32) for i, param in enumerate(own)]
        for i in (0, 2):
            products[i].view(-1)[1] *= value
        optimizer._accept([own[i] for i in reached], None, [[products[i] for i in reached]], None)
        for i, param in enumerate(own):
            param.grad = normal(*param.shape, seed=10 + i, dtype=torch.float32)
        optimizer.step()

    for _ in range(measurements):
        step(optimizer, 1.0)
    other = copy.deepcopy(optimizer)
    step(optimizer, bad)
    step(other, 1.0, reached=[1])
    for i, (param, twin) in enumerate(zip(params, other.param_groups[0]["params"], strict=True)):
        state, expected = optimizer.state[param], other.state[twin]
        assert [state.pop("dropped"), expected.pop("dropped")] == [i != 1, 0]
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
        assert torch.equal(param, twin)


@pytest.mark.parametrize("shape", [Elementwise((6,)), Matrix((3, 2), 8)], ids=["vector", "matrix"])
@pytest.mark.parametrize("curvature", [0.0, 1e-12, 1.0, 1e8])
@pytest.mark.parametrize("size", [1e-10, 1e-4, 1.0, 1e4])
def test_the_first_step_is_as_long_as_adamws_whatever_the_units(shape, curvature, size):
    stored = state_of(shape, torch.float32)
    momentum = size * normal(*shape.shape, dtype=torch.float32)
    product = curvature * torch.ones(shape.shape)
    shape.fold(stored, shape.reduce(None, [product], momentum), torch.tensor(1.0))
    refresh_roots([shape], [stored], torch.ones(1), 1e-2, FINITE)
    update = rotated_update(0.1 * momentum, 0.01 * momentum.square().sum(), shape, stored, 1, 0.9)
    rms = update.square().mean().sqrt()
    assert 0.5 < rms <= 1.0001, rms
