"""The optimizer against an independent float64 reference of Algorithm 1, step by step, by all three ways in."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import reference
from adahessian import AdaHessian
from cases import CONVOLUTION, CONVOLUTION_1D, CONVOLUTION_3D, MLP, Case, exact_derivatives, flat_parameters, train

WAYS = ["object", "graph", "closure"]
STEPS = 50

OPTIONS: list[tuple[Case, dict[str, Any]]] = [
    (MLP, {}),
    (MLP, {"lr": 0.15, "eps": 1e-4, "num_probes": 8}),
    (MLP, {"block_size": 2}),
    (MLP, {"block_size": 3}),
    (MLP, {"block_size": 5}),
    (MLP, {"block_size": 64}),
    (MLP, {"block_size": 3, "signed": True}),
    (MLP, {"averaging": "none", "block_size": 3}),
    (MLP, {"averaging": "factored"}),
    (MLP, {"averaging": "factored", "num_probes": 2, "hessian_power": 0.5, "curvature_every": 3}),
    (MLP, {"averaging": "factored", "steady_start": True, "betas": (0.9, 0.5)}),
    (CONVOLUTION, {}),
    (CONVOLUTION, {"signed": True}),
    (CONVOLUTION, {"averaging": "row", "block_size": 2}),
    (CONVOLUTION, {"averaging": "none"}),
    (CONVOLUTION, {"averaging": "kernel", "block_size": 4}),
    (CONVOLUTION, {"averaging": "factored", "block_size": 4}),
    (CONVOLUTION_1D, {"block_size": 2}),
    (CONVOLUTION_1D, {"averaging": "kernel"}),
    (CONVOLUTION_1D, {"averaging": "factored"}),
    (CONVOLUTION_3D, {"block_size": 4}),
    (MLP, {"hessian_power": 0.5, "lr": 0.05}),
    (MLP, {"hessian_power": 0.3, "lr": 0.05}),
    (MLP, {"hessian_power": 0.0, "lr": 0.05}),
    (MLP, {"weight_decay": 0.1, "maximize": True, "lr": 0.01}),
    (MLP, {"num_probes": 3, "seed": 2**63 + 11}),
    (MLP, {"curvature_every": 4, "curvature_warmup": 6, "seed": -5}),
    (MLP, {"betas": (0.0, 0.0), "eps": 0.1}),
    (MLP, {"steady_start": True, "block_size": 3, "curvature_every": 4}),
    (CONVOLUTION, {"steady_start": True, "signed": True, "curvature_every": 2}),
]


def expected(case: Case, options: dict[str, Any], steps: int) -> Tensor:
    model = case.model()
    start = [param.detach().numpy().copy() for param in model.parameters()]
    result = reference.adahessian(start, exact_derivatives(case, model, case.batch()), steps, **options)
    return torch.from_numpy(np.concatenate([value.ravel() for value in result]))


def relative_error(found: Tensor, true: Tensor) -> float:
    return ((found - true).norm() / true.norm()).item()


@pytest.mark.parametrize(("case", "options"), OPTIONS, ids=str)
def test_agrees_with_the_reference(case: Case, options: dict[str, Any]) -> None:
    options = {"lr": 0.02, "eps": 1e-2, **options}
    true = expected(case, options, STEPS)
    assert relative_error(flat_parameters(case.model()), true) > 1e-2, "the reference must move"
    for way in WAYS:
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            model = case.model(dtype)
            train(case, model, AdaHessian(model.parameters(), **options), case.batch(dtype), STEPS, way)
            assert relative_error(flat_parameters(model), true) < tolerance, (way, dtype)


@pytest.mark.parametrize("options", [{}, {"block_size": 3}, {"curvature_every": 4}, {"num_probes": 3}], ids=str)
def test_the_three_ways_are_one(options: dict[str, Any]) -> None:
    finals = []
    for way in WAYS:
        model = MLP.model(torch.float32)
        train(MLP, model, AdaHessian(model.parameters(), **options), MLP.batch(torch.float32), STEPS, way)
        finals.append(flat_parameters(model))
    assert torch.equal(finals[0], finals[1])
    assert torch.equal(finals[0], finals[2])


def test_factored_curvature_of_a_product_is_exact() -> None:
    """A diagonal of rank one is what two factors can hold."""
    param = nn.Parameter(torch.ones(4, 5, dtype=torch.float64))
    diagonal = torch.linspace(1, 2, 4, dtype=torch.float64)[:, None] * torch.linspace(3, 1, 5, dtype=torch.float64)
    finals = []
    for averaging in ("factored", "none"):
        twin = nn.Parameter(param.detach().clone())
        optimizer = AdaHessian([twin], averaging=averaging)
        for _ in range(3):
            twin.grad = torch.ones_like(twin)
            optimizer.set_curvature({twin: diagonal})
            optimizer.step()
        finals.append(twin.detach())
    torch.testing.assert_close(*finals, rtol=1e-12, atol=0)


def test_capturable_and_tensor_lr_equal_the_ordinary_step() -> None:
    finals = []
    for options in ({"lr": 0.05}, {"lr": torch.tensor(0.05)}, {"lr": torch.tensor([0.05]), "capturable": True}):
        model = MLP.model()
        train(MLP, model, AdaHessian(model.parameters(), weight_decay=0.1, **options), MLP.batch(), 20, "object")
        finals.append(flat_parameters(model))
    for final in finals[1:]:
        assert relative_error(final, finals[0]) < 1e-6


def test_mixed_dtypes_in_one_group() -> None:
    dtypes = (torch.float32, torch.float64) * 2

    def trained(*chosen: int) -> list[Tensor]:
        torch.manual_seed(0)
        params = [torch.randn(4, 3, dtype=dtype, requires_grad=True) for dtype in dtypes]
        optimizer = AdaHessian([params[i] for i in chosen])
        for _ in range(5):
            optimizer.zero_grad()
            sum((params[i] ** 4).sum().double() for i in chosen).backward(create_graph=True)
            optimizer.step()
        return [params[i].detach() for i in chosen]

    for number, together in enumerate(trained(0, 1, 2, 3)):
        (alone,) = trained(number)
        torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_parameter_that_joins_late_has_its_own_bias_correction(capturable: bool) -> None:
    start = torch.randn(2, 4, 7, dtype=torch.float64)

    def trained(first_steps: dict[int, int]) -> Tensor:
        """Each parameter takes part from a step on; the last one is returned."""
        params = {number: start[number].clone().requires_grad_() for number in first_steps}
        optimizer = AdaHessian(params.values(), block_size=3, capturable=capturable)
        for step in range(4):
            optimizer.zero_grad()
            losses = [(param**4).sum() for number, param in params.items() if step >= first_steps[number]]
            if losses:
                sum(losses).backward(create_graph=True)
                optimizer.step()
        return params[1].detach()

    torch.testing.assert_close(trained({0: 0, 1: 2}), trained({1: 2}), rtol=1e-6 if capturable else 1e-12, atol=0)


def test_a_tensor_lr_of_one_element_moves_scalars() -> None:
    param = nn.Parameter(torch.tensor(1.0))
    optimizer = AdaHessian([param], lr=torch.tensor([0.5]), eps=0.0, capturable=True)
    param.square().backward(create_graph=True)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.tensor(0.5))


def test_a_beta2_close_to_one_keeps_its_digits_in_float32() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([param], betas=(0.9, 1 - 1e-8))
    for value in (1.0, 3.0):
        param.grad = torch.ones(2)
        optimizer.set_curvature({param: torch.full((2,), value)})
        optimizer.step()
    torch.testing.assert_close(optimizer.state[param]["hessian_rms"], torch.full((2,), math.sqrt(5)))
