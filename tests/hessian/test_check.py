"""The check of the compiled product: its bounds and errors."""

import pytest
import torch

from adahessian.hessian.check import bounds_for, errors


def of(*values):
    return [torch.tensor(value) for value in values]


def test_errors_are_relative_to_all_parameters_and_to_each():
    expected = of([3.0, 4.0], [12.0])
    assert errors(expected, expected) == (0, 0)
    assert errors(of([3.0, 4.0], [25.0]), expected) == pytest.approx((1.0, 13 / 12))
    assert errors(of([3.0, 5.0], [12.0]), expected) == pytest.approx((1 / 13, 1 / 5))
    shards = of([3.0, 4.0], []), of([3.0, 4.0], [])
    assert errors(*shards, sum_=lambda own: own + torch.tensor([[0, 0, 0], [169, 144, 1]])) == pytest.approx(
        (1.0, 13 / 12)
    )
    assert errors([None, *of([13.0])], expected) == pytest.approx((1 / 12, 1 / 12)), "one took no part"
    assert errors([*of([3.0, 4.0]), torch.zeros(0)], [*of([3.0, 4.0]), torch.zeros(0)]) == (0, 0)

    zeros = of([0.0, 0.0], [0.0])
    assert errors(zeros, zeros) == (0, 0)
    assert errors(of([0.0, 0.0], [1e-9]), zeros) == (torch.inf, torch.inf)


def test_what_is_expected_to_be_infinite_does_not_count_but_what_is_found_to_be_does():
    assert errors(of([3.0], [5.0]), of([3.0], [torch.inf])) == (0, 0)
    assert not errors(of([3.0], [torch.nan]), of([3.0], [5.0]))[0] <= 1


def test_a_parameter_with_next_to_no_curvature_is_measured_by_a_thousandth_of_the_average():
    expected = [torch.full((100,), 2.0), torch.full((100,), 1e-9)]
    average = (2.0**2 / 2) ** 0.5
    overall, worst = errors([expected[0], torch.full((100,), 1e-4 * average)], expected)
    assert worst == pytest.approx(0.1, rel=1e-3)
    assert overall < 1e-4


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([torch.float64], (1e-6, 1e-5, 1e-3)),
        ([torch.float32], (1e-2, 5e-2, 1e-3)),
        ([torch.bfloat16], (0.25, 0.5, 3e-2)),
        ([torch.float32, torch.bfloat16], (0.25, 0.5, 3e-2)),
    ],
    ids=str,
)
def test_bounds_go_by_the_precision_of_the_parameters(dtypes, expected):
    assert bounds_for([torch.zeros(1, dtype=dtype) for dtype in dtypes]) == expected
    elsewhere = [torch.zeros(1, dtype=dtype, device="meta") for dtype in dtypes]
    assert bounds_for(elsewhere) == (expected if dtypes == [torch.float64] else (0.25, 0.5, 3e-2))
