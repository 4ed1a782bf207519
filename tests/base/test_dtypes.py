"""Dtypes of averages."""

import torch

from adahessian.base.dtypes import accumulation_dtype, as_real


def test_averages_are_at_least_as_wide_as_float32():
    wide = {torch.float16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64,
            torch.complex64: torch.complex64}  # fmt: skip
    assert {dtype: accumulation_dtype(dtype) for dtype in wide} == wide


def test_complex_tensors_are_viewed():
    x = torch.zeros(2, 3, dtype=torch.complex64)
    as_real(x)[1] += 2
    assert x.eq(2j).all()
    real = torch.zeros(2)
    assert as_real(real) is real
