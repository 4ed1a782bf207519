"""Blocks against lists of element numbers, for shapes of every rank."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reference
from adahessian import AdaHessian
from adahessian import averaging as averaging_module
from adahessian import update as update_module
from adahessian.averaging import UNTOUCHED, Estimate, blocks_of, estimate_all, steadied
from adahessian.update import update_hessian_rms, update_parameters

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=5).map(tuple)
layouts = st.sampled_from(["auto", "kernel", "row", "none"])
dtypes = st.sampled_from([torch.float32, torch.float64])


@pytest.mark.parametrize("small", [0, 1 << 16])
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes, layouts, st.integers(1, 8), st.sampled_from(["magnitude", "signed"]), dtypes, st.integers(0, 2**31))
def test_average_is_the_mean_of_each_block(monkeypatch, small, shape, layout, size, averaging, dtype, seed):
    monkeypatch.setattr(averaging_module, "SMALL", small)
    averaging_module.blocks_of.cache_clear()
    diagonal = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    of = blocks_of(diagonal.shape, layout, size)
    average = of.average(diagonal, averaging)
    assert tuple(average.shape) == of.block_shape
    # Brought back to the elements by the very views that the update uses.
    found = torch.empty_like(diagonal)
    of.view(found).copy_(of.expand(average))
    flat = diagonal.double().numpy().ravel()
    true = reference.average(flat, reference.blocks(shape, layout, size), averaging).reshape(shape)
    np.testing.assert_allclose(found.numpy(), true, rtol=1e-5, atol=1e-6)
    assert average.numel() == len(reference.blocks(shape, layout, size))


@pytest.mark.parametrize(
    ("shape", "layout", "size", "block_shape"),
    [
        ((16, 3, 3, 3), "auto", 1, (16, 3, 1, 1)),
        ((16, 3, 5), "auto", 4, (16, 3, 1)),
        ((16, 3, 2, 2, 2), "auto", 1, (16, 3, 1, 1, 1)),
        ((4, 10), "auto", 4, (4, 3)),
        ((4, 10), "auto", 10, (4, 1)),
        ((4, 10), "auto", 99, (4, 1)),
        ((4, 10), "kernel", 4, (4, 10)),
        ((2, 4, 10), "row", 5, (2, 4, 2)),
        ((2, 4, 10), "row", 4, (2, 4, 3)),
        ((2, 4, 10), "none", 5, (2, 4, 10)),
        ((10,), "row", 5, (10,)),
        ((), "auto", 5, ()),
        ((0, 5), "auto", 2, (0, 3)),
        ((5, 0), "row", 2, (5, 0)),
        ((3, 2, 0, 3), "auto", 2, (3, 2, 0, 3)),
    ],
)
def test_block_shape(shape, layout, size, block_shape):
    assert blocks_of(torch.Size(shape), layout, size).block_shape == block_shape


def test_blocks_do_not_depend_on_memory_layout():
    weight = torch.randn(4, 3, 3, 3)
    of = blocks_of(weight.shape, "auto", 1)
    strided = weight.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(of.average(strided, "signed"), of.average(weight, "signed"))
    transposed = torch.randn(7, 4).t()
    of = blocks_of(transposed.shape, "row", 3)
    torch.testing.assert_close(of.average(transposed, "signed"), of.average(transposed.contiguous(), "signed"))


def test_state_is_one_value_a_block():
    of = blocks_of(torch.Size([128, 1024]), "auto", 32)
    assert math.prod(of.block_shape) * 32 == 128 * 1024


@pytest.mark.parametrize("averaging", ["magnitude", "signed"])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_many_tensors_at_once_are_each_by_itself(averaging, with_gradients):
    shapes = [(3,), (4, 6), (4, 7), (2, 3, 3, 3), (5, 2, 3, 3), (2, 3, 2), (), (0, 3), (300, 300)]
    blocks = [blocks_of(torch.Size(shape), "auto", 3) for shape in shapes]
    torch.manual_seed(0)
    diagonals = [torch.randn(shape) * (torch.rand(shape) < 0.5) for shape in shapes]
    diagonals[3][0, 0] = torch.inf
    gradients = [torch.randn(shape) * (torch.rand(shape) < 0.3) for shape in shapes] if with_gradients else None
    found = estimate_all(blocks, diagonals, gradients, [averaging] * len(shapes))
    for i, (of, diagonal) in enumerate(zip(blocks, diagonals, strict=True)):
        alone = of.estimate(diagonal, None if gradients is None else gradients[i], averaging)
        torch.testing.assert_close(found[i].values, alone.values)
        assert found[i].values.shape == of.block_shape
        assert found[i].not_finite == alone.not_finite == (i == 3)


@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.999])
def test_averages_that_are_updated_together_are_each_by_itself(beta2):
    torch.manual_seed(0)
    shapes = [(3,), (4, 2), (2, 3, 1, 1), (300, 300), ()]

    def states():
        torch.manual_seed(1)
        rms = [torch.rand(shape) for shape in shapes]
        rms[0][1] = torch.inf
        return rms, [torch.tensor(float(i)) for i in range(len(shapes))], [torch.tensor(0) for _ in shapes]

    estimates = [Estimate(torch.randn(shape), torch.tensor(i == 1)) for i, shape in enumerate(shapes)]
    together, apart = states(), states()
    update_hessian_rms(*together, estimates, [age + 1 for age in together[1]], beta2=beta2)
    for i, estimate in enumerate(estimates):
        one = [part[i : i + 1] for part in apart]
        update_hessian_rms(*one, [estimate], [one[1][0] + 1], beta2=beta2)
    for some, others in zip(together, apart, strict=True):
        for a, b in zip(some, others, strict=True):
            torch.testing.assert_close(a, b)
    assert [int(count) for count in together[2]] == [0, 1, 0, 0, 0]
    assert [float(age) for age in together[1]] == [1.0, 1.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("hessian_power", [1.0, 0.5])
def test_a_step_in_parts_is_the_step(monkeypatch, hessian_power, capturable):
    shapes = [(7,), (5, 10), (6, 3, 3, 3), (9, 8), (2, 64), (), (0, 3)]
    sizes = [32, 4, 32, 1, 4, 32, 32]
    blocks = [blocks_of(torch.Size(shape), "auto", size) for shape, size in zip(shapes, sizes, strict=True)]
    settings = {
        "lr": 0.1,
        "beta1": 0.9,
        "eps": 1e-4,
        "weight_decay": 0.01,
        "hessian_power": hessian_power,
        "maximize": False,
        "capturable": capturable,
        "foreach": False,
    }

    def stepped():
        generator = torch.Generator().manual_seed(0)
        params, grads, exp_avgs = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3))
        rms = [torch.rand(of.block_shape, generator=generator) for of in blocks]
        update_parameters(params, grads, exp_avgs, rms, [torch.tensor(3.0)] * len(shapes), blocks, **settings)
        return params, exp_avgs

    whole = stepped()
    splits = []
    original = torch.Tensor.split

    def watched(tensor, rows):
        splits.append(rows)
        return original(tensor, rows)

    monkeypatch.setattr(update_module, "AT_A_TIME", 6)
    monkeypatch.setattr(torch.Tensor, "split", watched)
    torch.testing.assert_close(stepped(), whole)
    assert set(splits) == {6, 2, 1}


def test_a_steady_start_leaves_nothing_far_below_the_rest():
    values = torch.tensor([0.0, 1e-6, 1.0, 3.0, UNTOUCHED], dtype=torch.float64)
    steady = steadied(values, lambda found: found)
    mean = 10 / 4  # of squares, over what took part
    torch.testing.assert_close(steady[:4], ((values[:4].square() + mean) / 2).sqrt())
    assert steady[4] == UNTOUCHED
    assert values.tolist() == [0.0, 1e-6, 1.0, 3.0, UNTOUCHED], "what was measured is not written to"


def test_a_steady_start_of_what_took_no_part():
    assert steadied(torch.full((3,), UNTOUCHED), lambda found: found).tolist() == [UNTOUCHED] * 3
    assert steadied(torch.zeros(0), lambda found: found).shape == (0,)


def test_only_the_first_measurement_is_steadied():
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = AdaHessian([param], steady_start=True, betas=(0.9, 0.0))
    for first in (True, False):
        diagonal = torch.tensor([0.0, 1.0, 2.0])
        optimizer.feed_curvature({param: diagonal})
        param.grad = torch.ones(3)
        optimizer.step()
        expected = ((diagonal.square() + 5 / 3) / 2).sqrt() if first else diagonal
        torch.testing.assert_close(optimizer.state[param]["hessian_rms"], expected)
