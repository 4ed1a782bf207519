"""Probes: the right signs, and independent of each other in every respect."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from adahessian import AdaHessian
from adahessian.curvature import probes
from adahessian.curvature.probes import ProbeKey, rademacher, rademacher_like

CPU = torch.device("cpu")


def draw(count, seed=0, measurement=0, probe=0, parameter=0):
    return rademacher((count,), ProbeKey(seed, measurement, parameter), probe, dtype=torch.float64, device=CPU)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 300), st.integers(-(2**70), 2**70), st.integers(0, 10**6), st.integers(0, 50), st.integers(0, 10**4)
)
def test_signs_are_those_of_splitmix64(count, seed, measurement, probe, parameter):
    found = draw(count, seed, measurement, probe, parameter).numpy()
    np.testing.assert_array_equal(found, reference.signs(count, seed, measurement, probe, parameter))


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
    key = ProbeKey(3, 1, 4)
    param = torch.empty(7, 5, dtype=dtype)
    found = rademacher_like([param], [key], 2)[0]
    assert found.dtype == dtype
    assert torch.equal(found.double(), rademacher((7, 5), key, 2, dtype=torch.float64, device=CPU))


def test_the_memory_layout_does_not_change_the_signs():
    key = ProbeKey(3, 1, 4)
    param = torch.empty(4, 3, 3, 3)
    strided = param.contiguous(memory_format=torch.channels_last)
    assert torch.equal(rademacher_like([param], [key], 0)[0], rademacher_like([strided], [key], 0)[0])


def test_complex_parameters_get_a_sign_for_each_part():
    signs = rademacher_like([torch.empty(100, dtype=torch.complex64)], [ProbeKey(0, 0, 0)], 0)[0]
    assert {(int(sign.real), int(sign.imag)) for sign in signs} == {(1, 1), (1, -1), (-1, 1), (-1, -1)}


def test_the_optimizer_draws_anew_for_every_measurement_probe_and_tensor():
    params = [torch.zeros(200, requires_grad=True) for _ in range(3)]
    optimizer = AdaHessian([{"params": params[:2]}, {"params": params[2:]}], num_probes=2)
    drawn = []
    for _ in range(3):
        drawn += [signs for probe in range(2) for signs in optimizer.draw_probes(probe)]
        optimizer.zero_grad()
        sum((param**2).sum() for param in params).backward(create_graph=True)
        optimizer.step()
    for i, first in enumerate(drawn):
        for second in drawn[i + 1 :]:
            assert abs((first * second).mean()) < 5 / np.sqrt(200)


def test_no_generator_is_read_or_advanced():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = draw(100)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(draw(100), first)
