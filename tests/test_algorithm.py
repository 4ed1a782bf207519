"""The optimizer against an independent float64 reference of Algorithm 1, step by step, by all three ways in."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import reference
from adahessian import AdaHessian, averaging
from cases import CONVOLUTION, CONVOLUTION_1D, CONVOLUTION_3D, MLP, Case, exact_derivatives, flat_parameters, train

WAYS = ["object", "graph", "closure"]
STEPS = 50

SETTINGS: list[tuple[Case, dict[str, Any]]] = [
    (MLP, {}),
    (MLP, {"lr": 0.15, "eps": 1e-4, "num_probes": 8}),
    (MLP, {"block_size": 2}),
    (MLP, {"block_size": 3}),
    (MLP, {"block_size": 5}),
    (MLP, {"block_size": 64}),
    (MLP, {"block_size": 3, "averaging": "signed"}),
    (MLP, {"blocks": "none", "block_size": 3}),
    (CONVOLUTION, {}),
    (CONVOLUTION, {"averaging": "signed"}),
    (CONVOLUTION, {"blocks": "row", "block_size": 2}),
    (CONVOLUTION, {"blocks": "none"}),
    (CONVOLUTION, {"blocks": "kernel", "block_size": 4}),
    (CONVOLUTION_1D, {"block_size": 4}),
    (CONVOLUTION_3D, {"block_size": 4}),
    (MLP, {"hessian_power": 0.5, "lr": 0.05}),
    (MLP, {"hessian_power": 0.3, "lr": 0.05}),
    (MLP, {"hessian_power": 0.0, "lr": 0.05}),
    (MLP, {"weight_decay": 0.1, "maximize": True, "lr": 0.01}),
    (MLP, {"num_probes": 3, "seed": 2**63 + 11}),
    (MLP, {"update_every": 4, "warmup_steps": 6, "seed": -5}),
    (MLP, {"update_every": 4, "warmup_steps": 6, "beta2_per": "step", "betas": (0.8, 0.95)}),
    (MLP, {"betas": (0.0, 0.0), "eps": 0.1}),
    (MLP, {"steady_start": True, "block_size": 3, "update_every": 4}),
    (CONVOLUTION, {"steady_start": True, "averaging": "signed", "beta2_per": "step", "update_every": 2}),
]


def expected(case: Case, settings: dict[str, Any], steps: int) -> torch.Tensor:
    model = case.model()
    start = [param.detach().numpy().copy() for param in model.parameters()]
    settings = {"blocks_layout" if name == "blocks" else name: value for name, value in settings.items()}
    result = reference.adahessian(start, exact_derivatives(case, model, case.batch()), steps, **settings)
    return torch.from_numpy(np.concatenate([value.ravel() for value in result]))


def relative_error(found: torch.Tensor, true: torch.Tensor) -> float:
    return ((found - true).norm() / true.norm()).item()


@pytest.mark.parametrize(("case", "settings"), SETTINGS, ids=lambda value: str(value))
def test_agrees_with_the_reference(case: Case, settings: dict[str, Any]) -> None:
    settings = {"lr": 0.02, "eps": 1e-2, **settings}
    true = expected(case, settings, STEPS)
    assert relative_error(flat_parameters(case.model()), true) > 1e-2, (
        "the reference must move for this to mean anything"
    )
    for way in WAYS:
        for foreach in (False, True):
            for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
                model = case.model(dtype)
                optimizer = AdaHessian(model.parameters(), foreach=foreach, **settings)
                train(case, model, optimizer, case.batch(dtype), STEPS, way)
                assert relative_error(flat_parameters(model), true) < tolerance, (way, foreach, dtype)


@pytest.mark.parametrize("settings", [{}, {"block_size": 3}, {"update_every": 4}], ids=str)
def test_the_three_ways_are_one(settings: dict[str, Any]) -> None:
    finals = []
    for way in WAYS:
        model = MLP.model(torch.float32)
        train(MLP, model, AdaHessian(model.parameters(), **settings), MLP.batch(torch.float32), STEPS, way)
        finals.append(flat_parameters(model))
    assert torch.equal(finals[0], finals[1])
    assert torch.equal(finals[0], finals[2])


def test_foreach_equals_plain_bit_by_bit() -> None:
    for settings in ({"block_size": 3, "weight_decay": 0.1}, {"hessian_power": 0.5}, {"capturable": True}):
        finals = []
        for foreach in (False, True):
            model = CONVOLUTION.model(torch.float32)
            optimizer = AdaHessian(model.parameters(), foreach=foreach, **settings)
            train(CONVOLUTION, model, optimizer, CONVOLUTION.batch(torch.float32), 20, "object")
            finals.append(flat_parameters(model))
        assert torch.equal(*finals), settings


def test_capturable_and_tensor_lr_equal_the_ordinary_step() -> None:
    finals = []
    for settings in ({"lr": 0.05}, {"lr": torch.tensor(0.05)}, {"lr": torch.tensor([0.05]), "capturable": True}):
        model = MLP.model()
        train(MLP, model, AdaHessian(model.parameters(), weight_decay=0.1, **settings), MLP.batch(), 20, "object")
        finals.append(flat_parameters(model))
    for final in finals[1:]:
        assert relative_error(final, finals[0]) < 1e-6


def test_mixed_dtypes_in_one_foreach_group() -> None:
    finals = []
    for foreach in (False, True):
        torch.manual_seed(0)
        params = [torch.randn(4, 3, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.float64) * 2]
        optimizer = AdaHessian(params, foreach=foreach)
        for _ in range(5):
            optimizer.zero_grad()
            sum((param**4).sum().double() for param in params).backward(create_graph=True)
            optimizer.step()
        finals.append([param.detach() for param in params])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


def test_a_parameter_that_joins_late_has_its_own_bias_correction() -> None:
    finals = []
    for settings in ({"foreach": False}, {"foreach": True}, {"foreach": True, "capturable": True}):
        torch.manual_seed(0)
        params = [torch.randn(4, 7, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        optimizer = AdaHessian(params, block_size=3, **settings)
        for step in range(4):
            optimizer.zero_grad()
            sum((param**4).sum() for param in params[: 1 + step // 2]).backward(create_graph=True)
            optimizer.step()
        finals.append(torch.cat([param.detach() for param in params]))
    torch.testing.assert_close(finals[1], finals[0], rtol=0, atol=0)
    torch.testing.assert_close(finals[2], finals[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_tensor_lr_of_one_element_moves_scalars(foreach):
    param = nn.Parameter(torch.tensor(1.0))
    optimizer = AdaHessian([param], lr=torch.tensor([0.5]), eps=0.0, capturable=True, foreach=foreach)
    param.square().backward(create_graph=True)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.tensor(0.5))


def test_a_beta2_close_to_one_keeps_its_digits_in_float32():
    param = nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([param], betas=(0.9, 1 - 1e-8))
    for value in (1.0, 3.0):
        param.grad = torch.ones(2)
        optimizer.feed_curvature({param: torch.full((2,), value)})
        optimizer.step()
    torch.testing.assert_close(optimizer.state[param]["hessian_rms"], torch.full((2,), math.sqrt(5)))


@pytest.mark.parametrize("block_size", [4, 7])
def test_large_tensors_take_the_step_of_small_ones(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are updated through views instead of copies."""
    finals = []
    for small in (0, 1 << 16):
        monkeypatch.setattr(averaging, "SMALL", small)
        averaging.blocks_of.cache_clear()
        for foreach in (False, True):
            model = CONVOLUTION.model()
            optimizer = AdaHessian(model.parameters(), block_size=block_size, blocks="row", foreach=foreach)
            train(CONVOLUTION, model, optimizer, CONVOLUTION.batch(), 5, "object")
            finals.append(flat_parameters(model))
    averaging.blocks_of.cache_clear()
    for final in finals[1:]:
        torch.testing.assert_close(final, finals[0], rtol=1e-12, atol=1e-12)
