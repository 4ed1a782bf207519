"""The numbers of twelve trainings are those that were recorded."""

import numpy as np
import pytest
import torch

import golden


@pytest.mark.parametrize("name", golden.TRAININGS)
def test_training_gives_the_recorded_numbers(name: str) -> None:
    found = golden.run(name)
    with np.load(golden.STORED) as stored:
        expected = {key: stored[key] for key in stored if key.startswith(f"{name}/")}
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        if name == "bfloat16":
            ulps = [torch.from_numpy(each).bfloat16().view(torch.int16).int() for each in (found[key], values)]
            assert (ulps[0] - ulps[1]).abs().max() <= 1, key
        else:
            np.testing.assert_allclose(found[key], values, rtol=1e-12, atol=1e-12 * np.abs(values).max(), err_msg=key)
