"""Blocks against lists of element numbers, rows and columns against their formula, for shapes of every rank."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from adahessian import AdaHessian
from adahessian.algorithm.shapes import UNTOUCHED, as_real, shape_for

shapes = st.lists(st.integers(1, 6), max_size=5).map(tuple)


def make(shape, averaging="auto", block_size=1, parts=1):
    return shape_for(shape, averaging, block_size, parts)


def brought_back(of, values, shape):
    """The values of the elements, by the very views that a step uses."""
    found = torch.empty(shape, dtype=values[0].dtype)
    of.view(found).copy_(of.denominator(values, 1.0, 0.0))
    return found


@settings(max_examples=300, deadline=None)
@given(
    shapes,
    st.sampled_from(["auto", "kernel", "row", "none", "factored"]),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 2**31),
)
def test_values_are_those_of_the_reference(shape, averaging, size, signed, dtype, seed):
    diagonal = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    of = make(shape, averaging, size)
    estimate = of.reduce(None, [diagonal], None, signed=signed)
    assert [tuple(each.shape) for each in estimate.values] == list(of.stored.values())
    assert not estimate.not_finite
    flat = diagonal.double().numpy().ravel()
    true = reference.squares(flat, shape, averaging, size, signed=signed)
    assert [each.numel() for each in estimate.values] == [len(each) for each in true]
    np.testing.assert_allclose(
        brought_back(of, estimate.values, shape).numpy().ravel(),
        reference.root(true, shape, averaging, size),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("shape", "averaging", "size", "stored"),
    [
        ((16, 3, 3, 3), "auto", 1, (16, 3, 1, 1)),
        ((16, 3, 2, 2, 2), "auto", 1, (16, 3, 1, 1, 1)),
        ((16, 3, 5), "auto", 4, (16, 3, 2)),  # three dimensions: a stack of matrices, unless the group says kernel
        ((16, 3, 5), "kernel", 4, (16, 3, 1)),
        ((2, 2, 2, 2, 2, 6), "auto", 4, (2, 2, 2, 2, 2, 2)),
        ((4, 10), "auto", 4, (4, 3)),
        ((4, 10), "auto", 10, (4, 1)),
        ((4, 10), "auto", 99, (4, 1)),
        ((4, 10), "kernel", 4, (4, 10)),
        ((2, 4, 10), "row", 5, (2, 4, 2)),
        ((2, 4, 10), "row", 4, (2, 4, 3)),
        ((2, 4, 10), "none", 5, (2, 4, 10)),
        ((10,), "row", 5, (10,)),
        ((10,), "factored", 5, (10,)),
        ((), "auto", 5, ()),
        ((5, 0), "row", 2, (5, 0)),
        ((3, 2, 0, 3), "auto", 2, (3, 2, 0, 3)),
    ],
)
def test_shape_of_what_is_stored(shape, averaging, size, stored):
    assert make(shape, averaging, size).stored == {"hessian_rms": stored}


def test_factored_stores_rows_and_columns():
    assert {key: math.prod(shape) for key, shape in make((4, 10), "factored").stored.items()} == {
        "hessian_row": 4,
        "hessian_column": 10,
    }
    assert {key: math.prod(shape) for key, shape in make((4, 3, 2, 2), "factored").stored.items()} == {
        "hessian_row": 4,
        "hessian_column": 12,
    }


@pytest.mark.parametrize("averaging", ["auto", "kernel", "factored"])
@pytest.mark.parametrize("rest", [(6,), (3, 2, 2)])
def test_an_empty_shard_stores_what_the_others_do(averaging, rest):
    """A rank with no rows of a parameter needs a shard of the same state."""
    whole, empty = make((4, *rest), averaging, 4).stored, make((0, *rest), averaging, 4).stored
    rows = {key: (0, *shape[1:]) for key, shape in whole.items() if key != "hessian_column"}
    assert {key: shape for key, shape in empty.items() if key != "hessian_column"} == rows
    assert whole.keys() == empty.keys()


def test_values_do_not_depend_on_memory_layout():
    weight = torch.randn(4, 3, 3, 3)
    strided = weight.contiguous(memory_format=torch.channels_last)
    transposed = torch.randn(7, 4).t()
    for averaging, tensor, same in (
        ("auto", strided, weight),
        ("row", transposed, transposed.contiguous()),
        ("factored", transposed, transposed.contiguous()),
    ):
        of = make(tensor.shape, averaging, 3)
        first, second = (of.reduce(None, [each], None, signed=False).values for each in (tensor, same))
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("signed", [False, True])
def test_probes_are_averaged_before_magnitudes(signed):
    probes = [torch.randn(4, 6).sign() for _ in range(3)]
    products = [torch.randn(4, 6) for _ in range(3)]
    diagonal = sum(z * product for z, product in zip(probes, products, strict=True)) / 3
    of = make((4, 6), "row", 3)
    expected = of.reduce(None, [diagonal], None, signed=signed)
    torch.testing.assert_close(of.reduce(probes, products, None, signed=signed), expected)


@pytest.mark.parametrize("averaging", ["none", "row", "factored"])
def test_what_took_no_part_is_marked(averaging):
    product, gradient = torch.zeros(4, 6), torch.zeros(4, 6)
    product[0, 0], gradient[1, 5] = 2.0, 1.0  # curved; linear, with a curvature of zero
    of = make((4, 6), averaging, 6)
    values = of.reduce(None, [product], gradient, signed=False).values[0]
    untouched = values.eq(UNTOUCHED).expand(4, 6)
    assert untouched.all(1).tolist() == [False, False, True, True]
    if averaging == "none":
        assert untouched.sum() == 4 * 6 - 2
    assert of.reduce(None, [product], None, signed=False).values[0].ge(0).all(), "without a gradient all of it counts"
    marks = of.touched(product, gradient)
    spread = of.spread(marks.float())
    assert spread.shape == (4, 6)
    assert torch.equal(spread.ne(0), untouched.logical_not())


@pytest.mark.parametrize("averaging", ["none", "row", "factored"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_value_that_is_not_finite_is_noticed(averaging, value):
    """1e30 is finite, but its square is not in float32."""
    product = torch.ones(4, 6)
    product[2, 3] = value
    assert make((4, 6), averaging, 3).reduce(None, [product], torch.ones(4, 6), signed=False).not_finite


def test_a_complex_parameter_has_the_blocks_of_two_real_ones():
    assert make((4, 6), "row", 3, parts=2).stored == {"hessian_rms": (2, 4, 2)}
    assert make((6,), "row", 3, parts=2).stored == {"hessian_rms": (2, 6)}
    assert make((4, 3, 2, 2), "auto", 3, parts=2).stored == {"hessian_rms": (2, 4, 3, 1, 1)}


def test_state_is_one_value_per_block():
    assert math.prod(make((128, 1024), "auto", 32).stored["hessian_rms"]) * 32 == 128 * 1024


def test_a_steady_start_leaves_nothing_far_below_the_rest():
    values = torch.tensor([0.0, 1e-6, 1.0, 3.0, UNTOUCHED], dtype=torch.float64)
    (steady,) = make((5,)).steady((values,))
    mean = 10 / 4  # of squares, over what took part
    torch.testing.assert_close(steady[:4], ((values[:4].square() + mean) / 2).sqrt())
    assert steady[4] == UNTOUCHED
    assert values.tolist() == [0.0, 1e-6, 1.0, 3.0, UNTOUCHED], "the measured values are not written into"


def test_a_steady_start_of_what_took_no_part():
    assert make((3,)).steady((torch.full((3,), UNTOUCHED),))[0].tolist() == [UNTOUCHED] * 3
    assert make((0,)).steady((torch.zeros(0),))[0].shape == (0,)


def test_only_the_first_measurement_is_steadied():
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = AdaHessian([param], steady_start=True, betas=(0.9, 0.0))
    for first in (True, False):
        diagonal = torch.tensor([0.0, 1.0, 2.0])
        optimizer.set_curvature({param: diagonal})
        param.grad = torch.ones(3)
        optimizer.step()
        expected = ((diagonal.square() + 5 / 3) / 2).sqrt() if first else diagonal
        torch.testing.assert_close(optimizer.state[param]["hessian_rms"], expected)


def test_complex_tensors_are_viewed():
    x = torch.zeros(2, 3, dtype=torch.complex64)
    as_real(x)[1] += 2
    assert x.eq(2j).all()
    real = torch.zeros(2)
    assert as_real(real) is real
