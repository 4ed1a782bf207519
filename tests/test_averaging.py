"""Blocks against lists of element numbers, for shapes of every rank."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reference
from adahessian import averaging as averaging_module
from adahessian.averaging import blocks_of

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=5).map(tuple)
layouts = st.sampled_from(["auto", "kernel", "row", "none"])
dtypes = st.sampled_from([torch.float32, torch.float64])


@pytest.mark.parametrize("small", [0, 1 << 16])
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes, layouts, st.integers(1, 8), st.sampled_from(["magnitude", "signed"]), dtypes, st.integers(0, 2**31))
def test_average_is_the_mean_of_each_block(monkeypatch, small, shape, layout, size, averaging, dtype, seed):
    monkeypatch.setattr(averaging_module, "_SMALL", small)
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
