"""Kronecker factors: what they converge to, their inverse roots, and what must leave them alone."""

import copy
import io
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from adahessian import AdaHessianKron, Curvature, diagnose, param_groups
from adahessian.algorithm import roots
from adahessian.algorithm.kronecker import (
    families_of,
    fold_rotations,
    reduce_rotations,
    rotated_update,
    rotation_for,
)
from adahessian.algorithm.roots import inverse_roots, root_refreshes
from adahessian.algorithm.state import shape_of
from cases import ATTENTION, CONVOLUTION, MLP, flat_parameters, train
from kron_reference import adahessian_kron

MANY, FINITE = torch.tensor([math.inf]), torch.tensor([False])  # measurements, which make the damping the least one


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def orthogonal(size, seed=0):
    return torch.linalg.qr(normal(size, size, seed=seed))[0]


def with_spectrum(values, seed=0):
    q = orthogonal(len(values), seed)
    return (q * values) @ q.T


def rotation(*shape, block_size=256, kind="kernel", groups=1):
    return rotation_for(shape, block_size, kind, groups)


def state_of(shape, dtype=torch.float64):
    return [torch.zeros(size, dtype=dtype) for size in shape.stored.values()]


def fold(shape, stored, products, gradient, weight):
    families = families_of([shape])
    estimates = reduce_rotations(families, [[y] for y in products], None if gradient is None else [gradient])
    fold_rotations(families, [stored], estimates, torch.tensor([weight], dtype=stored[0].dtype), FINITE)


def refresh(*args):
    for refresh_some in root_refreshes(*args):
        refresh_some()


def folded(shape, products, least=1e-16):
    stored = state_of(shape)
    fold(shape, stored, products, None, 1.0)
    refresh(families_of([shape]), [stored], MANY.double(), least)
    return stored


def rotate(shape, momentum, stored):
    (family,) = families_of([shape])
    curvature = [family.read([stored], key) for key in range(2, len(stored) - 1)]
    return family.unstack(family.form.rotate(family.stack([momentum]), curvature))[0]


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
    shape, momentum = rotation(m, n), normal(m, n, seed=3)
    stored = folded(shape, [a @ z.view(m, n) @ b for z in hadamard(m * n)])
    for found, matrix in zip(stored[2:4], (a, b), strict=True):
        torch.testing.assert_close(unit(found), unit(torch.linalg.inv(matrix)), rtol=0, atol=1e-8)
    newton = unit(torch.linalg.solve(a, momentum) @ torch.linalg.inv(b))
    torch.testing.assert_close(unit(rotate(shape, momentum, stored)), newton, rtol=0, atol=1e-8)


def test_blocks_of_one_are_factored_mean_squares():
    y, momentum = normal(5, 7), normal(5, 7, seed=1)
    shape = rotation(5, 7, block_size=1)
    direction = rotate(shape, momentum, folded(shape, [y]))
    expected = momentum / (y.square().mean(1, keepdim=True) * y.square().mean(0)).sqrt() * y.square().mean()
    torch.testing.assert_close(direction, expected, rtol=1e-10, atol=0)


def test_the_direction_rotates_with_the_coordinates():
    products, momentum = [normal(5, 7, seed=seed) for seed in range(9)], normal(5, 7, seed=10)
    u, v, shape = orthogonal(5, 11), orthogonal(7, 12), rotation(5, 7)
    there = rotate(shape, u @ momentum @ v.T, folded(shape, [u @ y @ v.T for y in products], least=1e-4))
    expected = u @ rotate(shape, momentum, folded(shape, products, least=1e-4)) @ v.T
    torch.testing.assert_close(there, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(("shape", "block_size"), [((5, 7), 3), ((7, 4), 2), ((10, 3), 4), ((2, 9, 3), 5), ((3, 1), 2)])
def test_padding_is_as_blocks_of_unequal_size(shape, block_size):
    products, momentum, damping = [normal(*shape, seed=seed) for seed in range(3)], normal(*shape, seed=5), 1e-2
    matrix = rotation(*shape, block_size=block_size)
    found = rotate(matrix, momentum, folded(matrix, products, least=damping))
    flat = [y.flatten(1) for y in products]
    roots = []
    for of in (flat, [y.T for y in flat]):
        length, other = of[0].shape
        factor = sum(y @ y.T for y in of) / (other * len(of))
        root, size = torch.zeros_like(factor), math.ceil(length / math.ceil(length / block_size))
        for start in range(0, length, size):
            block = slice(start, start + size)
            root[block, block] = root_by_eigh(factor[block, block], damping * factor.trace() / length)
        roots.append(root * (factor.trace() / length).sqrt())
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
        expected = root_by_eigh(factor / max(mean.item(), 1e-30), damping)
        assert (root - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("share", [1.0, 0.01])  # of all blocks of a dimension, whose mean the damping is relative to
@pytest.mark.parametrize("size", [1, 64, 256, 1024])
@pytest.mark.parametrize("rank", [1, 8])
def test_no_damping_is_too_small_for_a_low_rank(size, rank, share):
    y = normal(size, rank)
    factor = (y @ y.T).float()[None]
    mean, values = share * factor[0].trace().view(1) / size, torch.linalg.eigvalsh(factor[0].double())
    for damping in (1e-2, 1e-4, 1e-6, 1e-10, 1e-45):
        (root,) = inverse_roots(factor, mean, torch.tensor([damping]), condition=1.01 * size / share / damping + 1)
        added = max(damping, 8 * torch.finfo(torch.float32).eps * size * max(1 / share, 1))
        expected = ((values.clamp(min=0) / mean + added) ** -0.5).sort()[0]
        assert (torch.linalg.eigvalsh(root.double()) - expected).norm() <= 0.02 * expected.norm()


def test_a_root_that_is_not_finite_is_not_stored(monkeypatch):
    shapes = [rotation(5, 4, block_size=3), rotation(2, 4)]
    stored, families = [folded(shape, [normal(*shape.shape)]) for shape in shapes], families_of(shapes)
    before = copy.deepcopy(stored)

    def broken(factors, *args, **kwargs):
        roots = inverse_roots(factors, *args, **kwargs)
        roots[0, 0, 1 % len(roots[0])] = math.nan  # of the first parameter's first block in each size
        return roots

    monkeypatch.setattr(roots, "inverse_roots", broken)
    refresh(families, stored, torch.full((2,), math.inf).double(), 0.5)
    assert all(root.isfinite().all() for own in stored for root in own)
    assert torch.equal(stored[0][2][:3], before[0][2][:3])
    assert not torch.equal(stored[0][2][3:], before[0][2][3:])


@pytest.mark.parametrize("enable", ["old", "new", "inherited", None])
def test_roots_are_computed_without_reduced_precision(enable, monkeypatch):
    matmul, seen = torch.backends.mkldnn.matmul, []
    # torch's own test tools, which other tests import, forbid to set these flags.
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)
    monkeypatch.setattr(roots, "inverse_roots", lambda *args, **_: seen.append(matmul.fp32_precision) or args[0])
    try:
        if enable == "old":
            torch.set_float32_matmul_precision("medium")
        elif enable:
            (matmul if enable == "new" else torch.backends).fp32_precision = "tf32"
        before = matmul.fp32_precision
        folded(rotation(5, 4), [normal(5, 4)])
        assert matmul.fp32_precision == before == {"old": "bf16", None: "none"}.get(enable, "tf32")
        assert set(seen) == ({"ieee"} if enable else {"none"})
        torch.backends.fp32_precision = "ieee"
        assert matmul.fp32_precision == ("ieee" if enable in ("inherited", None) else before)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"


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
    shape = rotation(6, 4, block_size=block_size)
    stored = state_of(shape)
    for number in range(1, 200):
        y = normal(1, 4, seed=number) * torch.linspace(0.1, 3, 6)[:, None] / number  # rows that go together
        away, before = normal(6, seed=1000 + number) > 0, stored[0].clone()
        y[away] = 0.0
        fold(shape, stored, [y], y.clone(), max(0.3, 1 / number))
        was, now = (shape.form.rows.split(each).diagonal(dim1=-2, dim2=-1).flatten() for each in (before, stored[0]))
        torch.testing.assert_close(now[away], was[away], rtol=0, atol=0)
        for factor in (shape.form.rows.split(stored[0]), shape.form.columns.split(stored[1])):
            assert torch.equal(factor, factor.mT)
            assert torch.linalg.eigvalsh(factor).min() >= -1e-13 * factor.max()
    refresh(families_of([shape]), [stored], MANY.double(), 1e-2)
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
        # Matrices that are measured together share a number of iterations, which changes how roots are rounded.
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if i == 1 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close([state, param], [expected, twin], **tolerance)


@pytest.mark.parametrize("shape", [rotation(6), rotation(3, 2)], ids=["vector", "matrix"])
@pytest.mark.parametrize("curvature", [0.0, 1e-12, 1.0, 1e8])
@pytest.mark.parametrize("size", [1e-10, 1e-4, 1.0, 1e4])
def test_the_first_step_is_as_long_as_adamws_whatever_the_units(shape, curvature, size):
    stored = state_of(shape, torch.float32)
    momentum = size * normal(*shape.shape, dtype=torch.float32)
    product = curvature * torch.ones(shape.shape)
    fold(shape, stored, [product], momentum, 1.0)
    refresh(families_of([shape]), [stored], torch.ones(1), 1e-2)
    stored[-1] += 0.01 * momentum.square().sum()
    update = rotated_update(0.1 * momentum, shape, stored, 1, 0.9)
    rms = update.square().mean().sqrt()
    assert 0.5 < rms <= 1.0001, rms


@pytest.mark.parametrize("soft", [1.0, 2e3, 1e4])
def test_no_update_is_longer_than_twice_adamws(soft):
    """Directions without curvature would need a far longer step for AdamW's gain."""
    shape, momenta = rotation(2, 100), torch.full((2, 100), 1e-3, dtype=torch.float64)
    momenta[0, 0], momenta[1] = 1.0, 1.0
    stored = state_of(shape)
    stored[2].copy_(torch.eye(2))
    stored[3].copy_(torch.diag(torch.tensor([1.0] + [soft] * 99)))
    stored[-1].copy_(0.01 * momenta.square().sum(1))
    update = rotated_update(0.1 * momenta, shape, stored, 1, 0.9)
    u = rotate(shape, momenta, stored)
    wanted = momenta[0].sum() * u[0].square().mean().sqrt() / (momenta * u)[0].sum()
    lengths = update.square().mean(1).sqrt()
    assert lengths[0] == pytest.approx(max(1.0, min(wanted.item(), 2.0)))
    assert 1 <= lengths[1] < 1.1  # rows are scaled separately
    assert (wanted > 2, wanted > 1) == (soft > 2e3, soft > 1)


@pytest.mark.parametrize("damping", [1e-2, 1e-30])
@pytest.mark.parametrize("slope", [1e7, 1e16])
@pytest.mark.parametrize("curvature", [0.0, 1e-14])
def test_steep_gradients_without_curvature_take_adamws_steps(slope, curvature, damping):
    params = made([(4, 4), (5,), (3, 2, 2)], dtype=torch.float32)
    start = {i: param.detach().clone() for i, param in params.items()}
    optimizer = AdaHessianKron(params.values(), lr=0.01, weight_decay=0.0, damping=damping)
    for _ in range(40):
        products = [torch.full_like(param, curvature) for param in params.values()]
        for param in params.values():
            param.grad = torch.full_like(param, slope)
        optimizer._accept([*params.values()], None, [products], [param.grad for param in params.values()])
        optimizer.step()
    for i, param in params.items():
        torch.testing.assert_close(param.detach(), start[i] - 0.4, rtol=1e-4, atol=1e-3)


def test_a_row_whose_squares_underflow_does_not_jump():
    param = nn.Parameter(torch.zeros(2, 4))
    optimizer = AdaHessianKron([param], lr=1e-3, weight_decay=0.0)
    for step in range(30):
        param.grad = normal(2, 4, seed=step, dtype=torch.float32) * torch.tensor([[1.0], [1e-22]])
        optimizer._accept([param], None, [[normal(2, 4, seed=step + 99, dtype=torch.float32)]], [param.grad])
        optimizer.step()
    assert param.detach().abs().max() < 1


def test_rows_whose_momentum_has_vanished_do_not_lengthen_the_step():
    """The rows of a table were all visited once. From then on only one row moves, as in a table of a single row."""
    rows, lengths = 64, []
    for visited in (rows, 1):
        param = nn.Parameter(torch.zeros(rows, 4))
        optimizer = AdaHessianKron([{"params": [param], "kind": "table"}], lr=0.01, weight_decay=0.0)
        for step in range(300):
            param.grad = torch.zeros(rows, 4)
            param.grad[: visited if step == 0 else 1] = normal(1, 4, seed=step, dtype=torch.float32) + 0.1
            optimizer._accept([param], None, [[param.grad.clone()]], [param.grad])
            before = param.detach().clone()
            optimizer.step()
        lengths.append((param.detach() - before)[0].norm().item())
    assert lengths[0] == pytest.approx(lengths[1], rel=0.1)


# Parameters together -------------------------------------------------------------------------------------------------

SHAPES = [(6, 4), (5,), (4, 6), (6, 4), (4, 2, 3), (3, 4, 6), (5,), (), (7, 1), (6, 4), (0, 3)]


def made(shapes, device="cpu", dtype=torch.float64):
    return {i: nn.Parameter(normal(*shape, seed=i, dtype=dtype).to(device)) for i, shape in enumerate(shapes)}


def drive(optimizer, params, is_present=lambda step, i: True, steps=9):
    """Every parameter has gradients and products of its own, the latter at every second step."""
    for step in range(steps):
        here = {i: param for i, param in params.items() if is_present(step, i)}
        for i, param in params.items():
            param.grad = normal(*param.shape, seed=1000 * step + i).to(param) if i in here else None
        if step % 2 == 0 and here:
            of_probes = [
                [normal(*param.shape, seed=1000 * step + 100 * probe + i).to(param) * 2**i for i, param in here.items()]
                for probe in (1, 2)
            ]
            optimizer._accept([*here.values()], None, of_probes, [param.grad for param in here.values()])
        if here:
            optimizer.step()


@pytest.mark.parametrize("limit", [1, 2**24])
@pytest.mark.parametrize("is_present", [lambda *_: True, lambda step, i: step >= 2 * (i % 3)], ids=["", "late"])
@pytest.mark.parametrize(
    "own", [{}, {"maximize": True, "lr": torch.tensor([0.01], dtype=torch.float64)}, {"capturable": True}], ids=str
)
def test_parameters_together_step_as_each_would_alone(own, is_present, limit, monkeypatch):
    monkeypatch.setattr(roots, "_ENOUGH", limit)  # of factors, whose roots are computed at once
    options = {"lr": 0.01, "block_size": 4, "weight_decay": 0.1, "curvature_every": 2}
    params, others = made(SHAPES), made(SHAPES)
    drive(AdaHessianKron(params.values(), **{**options, **own}), params, is_present)
    for i, other in others.items():
        drive(AdaHessianKron([other], **options, maximize="maximize" in own), {i: other}, is_present)
    tolerance = 1e-5 if "capturable" in own else 1e-12  # counts are in float32
    torch.testing.assert_close(params, others, rtol=tolerance, atol=tolerance)


def test_many_parameters_of_few_forms_step_by_the_equations():
    shapes = [(6, 4), (5,), (4, 6), (6, 4), (5,), (7, 1), (6, 4)]
    params = made(shapes)
    start = [param.detach().numpy().copy() for param in params.values()]
    theta = torch.cat([param.detach().flatten() for param in params.values()])
    hessian = with_spectrum(torch.logspace(-2, 1, len(theta), dtype=torch.float64))
    options = {"lr": 0.02, "block_size": 4, "curvature_every": 3, "curvature_warmup": 2, "seed": 7, "weight_decay": 0.1}

    def loss(own, _):
        flat = torch.cat([param.flatten() for param in own])
        return (flat - theta / 2) @ hessian @ (flat - theta / 2) / 2

    gradient = (hessian @ theta / 2).numpy()
    expected, _ = adahessian_kron(
        start,
        lambda at: hessian.numpy() @ at - gradient,
        lambda at: hessian.numpy(),
        10, damping=1e-2, num_probes=1, **options,
    )  # fmt: skip
    model = nn.ParameterList(params.values())
    optimizer = AdaHessianKron(model.parameters(), **options)
    curvature = Curvature(model, loss, optimizer, batch_fraction=1)
    for _ in range(10):
        curvature.measure(None)
        optimizer.zero_grad()
        loss(model, None).backward()
        optimizer.step()
    np.testing.assert_allclose(flat_parameters(model).numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_bit(dtype):
    ends = []
    for enabled in (False, True):
        params = made(SHAPES, dtype=torch.float32)
        optimizer = AdaHessianKron(params.values(), lr=0.01, block_size=4, curvature_every=2)
        with torch.autocast("cpu", dtype, enabled=enabled):
            drive(optimizer, params)
            numbers = diagnose(optimizer)
        ends.append((params, optimizer.state_dict()["state"], numbers))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


class Launches(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01, device="meta")], ids=["float", "tensor"])
def test_a_deep_network_needs_as_many_launches_and_no_step_waits_for_the_device(capturable, lr):
    """Reading a tensor on the meta device raises an error."""
    launches = []
    for depth in (2, 6):
        params = made([(6, 4), (4, 6), (4,), (3, 4, 6)] * depth, "meta", torch.float32)
        options = {"block_size": 4, "weight_decay": 0.0}  # no foreach function on this device takes a tensor
        optimizer = AdaHessianKron(params.values(), lr=0.01, capturable=capturable, **options)
        drive(optimizer, params, steps=2)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()  # makes a new plan
        for products in ([], [list(params.values())]):
            with Launches() as mode:
                optimizer._accept(list(params.values()), None, products, [param.grad for param in params.values()])
                optimizer.step()
            launches.append(mode.count)
    assert launches[:2] == launches[2:]
    assert launches[0] < 250


def test_each_matrix_of_a_stack_has_its_own_scale():
    """The second matrix has no curvature, the third one neither that nor a gradient."""
    scales, ends = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1), []
    start, gradient = normal(3, 4, 5), normal(3, 4, 5, seed=1) * torch.tensor([1.0, 1e-3, 0.0]).view(3, 1, 1)
    for kind in ("stack", "kernel"):
        params = [start.clone()] if kind == "stack" else list(start.clone())
        for param in params:
            param.requires_grad_()
        optimizer = AdaHessianKron([{"params": params, "kind": kind}], lr=0.01, weight_decay=0.0, block_size=3)
        for step in range(4):
            parts = [scales * normal(3, 4, 5, seed=step), gradient]
            products, grads = ([part] if kind == "stack" else list(part) for part in parts)
            optimizer._accept(params, None, [products], grads)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()
        ends.append(torch.cat([param.detach().view(-1, 4, 5) for param in params]))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-14)
    lengths = (ends[0] - start).flatten(1).norm(dim=1)
    assert lengths[2] == 0
    assert lengths[:2].min() > 0.3 * lengths[:2].max()


# Layouts -------------------------------------------------------------------------------------------------------------

CONVOLUTIONS = [  # and the number of matrices, their rows and columns
    (nn.Conv2d(4, 6, (3, 2)), (1, 6, 24)),
    (nn.Conv2d(4, 6, 3, groups=2), (2, 3, 18)),
    (nn.Conv1d(4, 4, 3, groups=4), (1, 4, 3)),
    (nn.Conv1d(4, 8, 3, groups=4), (4, 2, 3)),
    (nn.ConvTranspose1d(4, 6, 3), (1, 6, 12)),
    (nn.ConvTranspose2d(4, 6, (3, 2), groups=2), (2, 3, 12)),
    (nn.ConvTranspose1d(4, 4, 3, groups=4), (1, 4, 3)),
    (nn.ConvTranspose2d(4, 2, 3, groups=2), (1, 2, 18)),
]


@pytest.mark.parametrize(("layer", "sizes"), CONVOLUTIONS, ids=str)
def test_each_output_of_a_convolution_is_a_row(layer, sizes):
    optimizer = AdaHessianKron(param_groups(layer))
    group = next(group for group in optimizer.param_groups if layer.weight in set(group["params"]))
    shape = shape_of(layer.weight, group)
    assert shape.split(layer.weight).shape == sizes
    assert torch.equal(shape.join(shape.split(layer.weight)), layer.weight)
    outputs = layer(torch.rand(1, layer.in_channels, *(5,) * len(layer.kernel_size)))[0].flatten(1).sum(1)
    for row, output in enumerate(outputs):
        (grad,) = torch.autograd.grad(output, layer.weight, retain_graph=True)
        of_rows = shape.split(grad).flatten(0, 1).ne(0)
        assert of_rows.any(1).nonzero().tolist() == [[row]]
        assert of_rows[row].all()


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.attention = nn.Embedding(7, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.experts, self.down = nn.Parameter(torch.randn(3, 4, 4)), nn.Conv1d(4, 6, 3, padding=1, groups=2)
        self.up, self.recurrent = nn.ConvTranspose1d(6, 4, 3, padding=1), nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, numbers):
        x = self.table(numbers)
        x = x + self.attention(x, x, x)[0] + torch.einsum("btc,kcd->btkd", x, self.experts).tanh().sum(2)
        x = x + self.up(self.down(x.mT).tanh()).mT
        return self.head(self.recurrent(x)[0][:, -1])


def test_layers_have_the_factors_of_their_matrices():
    model, shapes = Layers(), {}
    for group in AdaHessianKron(param_groups(model)).param_groups:
        names = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
        shapes |= {names[id(param)]: shape_of(param, group).stored for param in group["params"]}
    assert [shapes["table.weight"][side] for side in ("left_factor", "right_factor")] == [(7, 1), (4, 4)]
    assert [shapes["experts"][side] for side in ("left_factor", "grad_square")] == [(3, 4, 4), (3, 4)]
    for name, rows in (("attention.in_proj_weight", 12), ("recurrent.weight_hh_l0", 16), ("up.weight", 4)):
        assert shapes[name]["left_factor"] == (rows, rows)
    assert shapes["down.weight"]["right_factor"] == (2, 6, 6)
    assert shapes["up.bias"]["hessian_square"] == (4,)


def test_layers_of_all_kinds_resume_exactly_and_in_any_unit():
    x = torch.randint(7, (6, 5), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    start, ends = Layers(), []

    def train_more(model, optimizer, factor, steps):
        curvature = Curvature(model, lambda m, x: factor * nn.functional.cross_entropy(m(x), x[:, 0]), optimizer)
        for _ in range(steps):
            curvature.measure(x)
            optimizer.zero_grad()
            (factor * nn.functional.cross_entropy(model(x), x[:, 0])).backward()
            optimizer.step()

    for factor, resumes in ((1.0, False), (1.0, True), (2.0**-9, False)):
        model = copy.deepcopy(start)
        optimizer = AdaHessianKron(param_groups(model), lr=0.01, block_size=3, curvature_every=3, curvature_warmup=1)
        train_more(model, optimizer, factor, 5)
        if resumes:
            torch.save(optimizer.state_dict(), file := io.BytesIO())
            optimizer = AdaHessianKron(param_groups(model))
            optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        train_more(model, optimizer, factor, 6)
        ends.append(flat_parameters(model))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
