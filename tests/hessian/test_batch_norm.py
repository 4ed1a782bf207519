"""Batch norm in few sums: torch's values, derivatives and statistics."""

import pytest
import torch
from requested import request_for, squares
from torch import nn
from torch.func import grad, jvp

from adahessian.hessian import batch_norm
from adahessian.hessian.batch_norm import batch_norm_forward, normalize
from adahessian.hessian.engine import Engine


def inputs(shape, dtype=torch.float64, offset=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in (shape, shape[1], shape[1])
    )
    return x.to(dtype) * 2 + offset, weight.to(dtype), bias.to(dtype)


def ours(x, weight, bias, eps):
    return normalize(x, weight, bias, eps)[0]


def torchs(x, weight, bias, eps):
    return nn.functional.batch_norm(x, None, None, weight, bias, training=True, eps=eps)


def products(function, values):
    """Gradient and Hessian-vector product of a loss that bends."""
    along = tuple(torch.cos(torch.arange(each.numel(), dtype=each.dtype)).view_as(each) for each in values)
    loss = grad(lambda *args: function(*args, 1e-3).sin().square().sum(), argnums=(0, 1, 2))
    return jvp(loss, values, along)


@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 5), (4, 3, 5, 2)])
def test_values_and_both_derivatives_are_torchs(shape):
    values = inputs(shape)
    torch.testing.assert_close(ours(*values, 1e-3), torchs(*values, 1e-3))
    torch.testing.assert_close(products(ours, values), products(torchs, values))


def test_without_scale_and_shift():
    x, *_ = inputs((8, 3))
    torch.testing.assert_close(ours(x, None, None, 1e-5), torchs(x, None, None, 1e-5))


@pytest.mark.parametrize("seed", range(10))
def test_a_large_mean_costs_no_digits(seed):
    values = inputs((64, 3, 4, 4), torch.float32, offset=1e3, seed=seed)
    exact = torchs(*(each.double() for each in values), 1e-5)
    error, usual = (f(*values, 1e-5).double().sub(exact).norm().item() for f in (ours, torchs))
    assert error < 1.1 * usual


SETTINGS = [{}, {"momentum": 0.3}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_running_statistics_and_evaluation_are_torchs(kind, settings):
    layer, usual = kind(3, dtype=torch.float64, **settings), nn.BatchNorm2d(3, dtype=torch.float64, **settings)
    for seed in range(3):
        x, *_ = inputs((8, 3, 2, 2), seed=seed)
        outputs = [batch_norm_forward(layer.train(), x), batch_norm_forward(layer.eval(), x)]
        torch.testing.assert_close(outputs, [usual.train()(x), usual.eval()(x)])
        torch.testing.assert_close(layer.state_dict(), usual.state_dict())


def test_a_layer_whose_statistics_were_removed():
    layer = nn.BatchNorm1d(3)
    layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    x, *_ = inputs((8, 3), torch.float32)
    torch.testing.assert_close(batch_norm_forward(layer, x), layer(x))


def with_a_weight_of_one():
    layer = nn.BatchNorm1d(3)
    layer.weight = nn.Parameter(torch.ones(1))
    return layer


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.BatchNorm1d(3), (1, 3)),
        (lambda: nn.BatchNorm2d(3), (8, 3)),
        (lambda: nn.BatchNorm1d(3), (3,)),
        (with_a_weight_of_one, (8, 3)),
    ],
)
def test_torchs_errors_are_raised(make, shape):
    with pytest.raises((ValueError, RuntimeError)) as torchs_own:
        make()(torch.ones(shape))
    with pytest.raises(type(torchs_own.value)) as error:
        batch_norm_forward(make(), torch.ones(shape))
    assert str(error.value) == str(torchs_own.value)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("factor", "is_compiled"), [(1.0, True), (1.3, False)])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
@pytest.mark.usefixtures("quick_compiler")
def test_the_compiled_pass_uses_it_and_is_compared_with_it(monkeypatch, dropout, factor, is_compiled, kind):
    """If it were wrong, the comparison with double backward would tell."""
    monkeypatch.setattr(batch_norm, "normalize", lambda *args: (factor * ours(*args), *normalize(*args)[1:]))
    model = nn.Sequential(nn.Linear(4, 8), kind(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))
    engine = Engine(model, squares, compile=True, product_dtype=None)
    engine.measure(torch.randn(16, 4), request_for(model.parameters()))
    assert engine.description.startswith("compiled") is is_compiled, engine.description
