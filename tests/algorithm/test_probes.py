"""Probes: the right signs, and independent of each other in every respect."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from adahessian.algorithm import probes
from adahessian.algorithm.probes import as_int64, draw_like, probe_key, rademacher

CPU = torch.device("cpu")


def draw(count, seed=0, measurement=0, probe=0, parameter=0):
    return rademacher((count,), probe_key(seed, measurement, probe), parameter, dtype=torch.float64, device=CPU)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 300), st.integers(-(2**70), 2**70), st.integers(0, 10**6), st.integers(0, 50), st.integers(0, 10**4)
)
def test_signs_are_those_of_splitmix64(count, seed, measurement, probe, parameter):
    drawn = draw(count, seed, measurement, probe, parameter).numpy()
    np.testing.assert_array_equal(drawn, reference.signs(count, seed, measurement, probe, parameter))


def test_long_draws_are_the_same_as_short_ones(monkeypatch):
    whole = draw(10_000)
    monkeypatch.setattr(probes, "_CHUNK", 64 * 3)
    assert torch.equal(draw(10_000), whole)
    assert torch.equal(draw(5_000), whole[:5_000])


def test_both_signs_with_equal_odds():
    signs = draw(1_000_000)
    assert torch.equal(signs.abs(), torch.ones_like(signs))
    assert abs(signs.mean()) < 5e-3  # five standard deviations


@pytest.mark.parametrize("what", ["seed", "measurement", "probe", "parameter"])
def test_independent_across_everything_it_depends_on(what):
    """Neighbours in any argument are uncorrelated, also at every shift up to 130 elements."""
    count = 100_000
    first = draw(count)
    for value in (1, 2, 64, 1000):
        other = draw(count, **{what: value})
        for shift in (0, 1, 2, 3, 7, 63, 64, 65, 130):
            correlation = (first[: count - shift] * other[shift:]).mean()
            assert abs(correlation) < 5 / np.sqrt(count), (value, shift)


def test_independent_within_a_tensor():
    count = 100_000
    signs = draw(count)
    for shift in (1, 2, 3, 8, 32, 63, 64, 65, 128):
        assert abs((signs[shift:] * signs[: count - shift]).mean()) < 5 / np.sqrt(count), shift
    for place in range(64):  # every bit of the word is fair
        assert abs(signs[place::64].mean()) < 5 / np.sqrt(count / 64), place


def test_swapped_arguments_are_different_draws():
    assert not torch.equal(draw(64, measurement=1, probe=2), draw(64, measurement=2, probe=1))
    assert not torch.equal(draw(64, probe=1, parameter=0), draw(64, probe=0, parameter=1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_does_not_change_the_signs(dtype):
    key = probe_key(3, 1, 2)
    drawn = draw_like(torch.empty(7, 5, dtype=dtype), key, 4)
    assert drawn.dtype == dtype
    assert torch.equal(drawn.double(), rademacher((7, 5), key, 4, dtype=torch.float64, device=CPU))


def test_the_memory_order_does_not_change_the_signs():
    param = torch.empty(4, 3, 3, 3)
    strided = param.contiguous(memory_format=torch.channels_last)
    assert torch.equal(draw_like(param, 5, 0), draw_like(strided, 5, 0))
    assert torch.equal(draw_like(param, 5, 0, out=strided), draw_like(param, 5, 0))


def test_signs_are_drawn_into_a_given_tensor():
    for param in (torch.empty(70), torch.empty(0, 3), torch.empty((), dtype=torch.complex64)):
        out = torch.zeros_like(param)
        assert draw_like(param, 5, 1, out) is out
        assert torch.equal(out, draw_like(param, 5, 1))


def test_complex_parameters_take_two_positions():
    signs = draw_like(torch.empty(100, dtype=torch.complex64), 5, 7)
    assert torch.equal(signs.real, draw_like(signs.real, 5, 7))
    assert torch.equal(signs.imag, draw_like(signs.imag, 5, 8))


def test_words_become_the_int64_of_the_same_bits():
    assert [as_int64(word) for word in (0, 2**63 - 1, 2**63, 2**64 - 1)] == [0, 2**63 - 1, -(2**63), -1]


def test_no_generator_is_read_or_advanced():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = draw(100)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(draw(100), first)
