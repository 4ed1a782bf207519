"""Batch norm in plain operations: the same values, derivatives and running statistics as torch's own."""

import pytest
import torch
from torch import nn
from torch.func import grad, jvp

from adahessian import AdaHessian, Curvature
from adahessian.curvature import batch_norm as module
from adahessian.curvature.batch_norm import PlainBatchNorm, batch_norm


def inputs(shape, dtype=torch.float64, offset=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in (shape, shape[1], shape[1])
    )
    return x.to(dtype) * 2 + offset, weight.to(dtype), bias.to(dtype)


def plain(x, weight, bias, eps):
    return batch_norm(x, weight, bias, eps)[0]


def own(x, weight, bias, eps):
    return nn.functional.batch_norm(x, None, None, weight, bias, training=True, eps=eps)


def curvature(function, values):
    """Gradient and Hessian-vector product of a loss that bends."""
    along = tuple(torch.cos(torch.arange(each.numel(), dtype=each.dtype)).view_as(each) for each in values)
    loss = grad(lambda *args: function(*args, 1e-3).sin().square().sum(), argnums=(0, 1, 2))
    return jvp(loss, values, along)


@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 5), (4, 3, 5, 2)])
def test_values_and_both_derivatives_are_those_of_torch(shape):
    values = inputs(shape)
    torch.testing.assert_close(plain(*values, 1e-3), own(*values, 1e-3))
    torch.testing.assert_close(curvature(plain, values), curvature(own, values))


def test_without_scale_and_shift():
    x, *_ = inputs((8, 3))
    torch.testing.assert_close(plain(x, None, None, 1e-5), own(x, None, None, 1e-5))


@pytest.mark.parametrize("seed", range(10))
def test_a_large_mean_costs_no_digits(seed):
    values = inputs((64, 3, 4, 4), torch.float32, offset=1e3, seed=seed)
    exact = own(*(each.double() for each in values), 1e-5)
    ours, torchs = (f(*values, 1e-5).double().sub(exact).norm().item() for f in (plain, own))
    assert ours < 1.1 * torchs


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.3}, {"momentum": None}, {"track_running_stats": False}])
def test_running_statistics_and_evaluation_are_those_of_torch(settings):
    plain, usual = (nn.BatchNorm2d(3, dtype=torch.float64, **settings) for _ in range(2))
    for seed in range(3):
        x, *_ = inputs((8, 3, 2, 2), seed=seed)
        with PlainBatchNorm():
            outputs = [plain.train()(x), plain.eval()(x)]
        torch.testing.assert_close(outputs, [usual.train()(x), usual.eval()(x)])
        torch.testing.assert_close(plain.state_dict(), usual.state_dict())


def test_what_torch_refuses_is_refused():
    with PlainBatchNorm(), pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm1d(3)(torch.ones(1, 3))


def test_no_values_at_all_are_left_to_torch():
    weight = torch.ones(3, requires_grad=True)
    with PlainBatchNorm():
        nn.functional.batch_norm(torch.ones(0, 3, 2), None, None, weight, None, training=True).sum().backward()
    assert weight.grad.tolist() == [0.0, 0.0, 0.0]


def test_a_weight_that_does_not_fit_is_refused():
    with PlainBatchNorm(), pytest.raises(RuntimeError, match="weight should contain 3 elements"):
        nn.functional.batch_norm(torch.randn(8, 3), None, None, torch.ones(1), None, training=True)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_compiled_pass_computes_by_it_and_is_compared_with_it(quick_compiler, monkeypatch, said, dropout):
    """If it were wrong, the comparison with double backward would tell."""
    for factor, is_compiled in ((1.0, True), (1.3, False)):
        monkeypatch.setattr(module, "batch_norm", lambda *args, by=factor: (by * plain(*args), *batch_norm(*args)[1:]))
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))
        curvature = Curvature(model, lambda m, x: m(x).square().mean(), AdaHessian(model.parameters()), compile=True)
        assert curvature.engine.choice(torch.randn(16, 4)).is_compiled is is_compiled, said.messages
