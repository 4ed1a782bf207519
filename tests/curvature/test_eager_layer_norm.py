"""Layer norm written out: the same values and derivatives as torch's own."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from second_derivatives import (
    NEEDED_AND_ALONG,
    AtGradient,
    assert_found_alike,
    found_by,
    squares,
    twice,
    watched_applications,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from adahessian import AdaHessian
from adahessian.curvature import eager_layer_norm
from adahessian.curvature.ways import Problem, double_backward

ours = partial(eager_layer_norm.layer_norm, AtGradient())


def over_features(way, **how):
    """A norm over the last dimension, as a function of tensors alone."""
    return lambda x, *affine: way(x, x.shape[-1:], *affine, **how)


@pytest.fixture
def applications(monkeypatch):
    return watched_applications(monkeypatch, eager_layer_norm._LayerNorm)


def some(*shape, bias=True):
    generator = torch.Generator().manual_seed(1)
    shapes = [shape, shape[-1:], shape[-1:]]
    return [torch.randn(each, generator=generator, dtype=torch.float64) + 0.5 for each in shapes[: 2 + bias]]


@pytest.mark.parametrize("eps", [1e-5, 0.3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 7), (7,), (2, 3, 4, 6), (4, 1)], ids=str)
def test_values_and_both_derivatives_are_those_of_torch(shape, bias, eps):
    inputs = some(*shape, bias=bias)
    found, expected = (
        twice(over_features(way, eps=eps), inputs, [True] * len(inputs), range(len(inputs)))
        for way in (ours, F.layer_norm)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("needed", "along"), NEEDED_AND_ALONG, ids=str)
def test_what_is_not_asked_for_is_left_out(needed, along):
    found, expected = (twice(over_features(way), some(5, 7), needed, along) for way in (ours, F.layer_norm))
    torch.testing.assert_close(found, expected)


def test_it_keeps_its_digits_in_single_precision():
    inputs = some(64, 256)
    inputs[0] = inputs[0] + 30  # whose mean is not near zero
    exact = twice(over_features(F.layer_norm), inputs)[2]
    found = twice(over_features(ours), [each.float() for each in inputs])[2]
    for of_ours, of_exact in zip(found, exact, strict=True):
        assert (of_ours.double() - of_exact).norm() <= 1e-5 * of_exact.norm()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.second(self.norm(self.first(x)).tanh())


class Mixing(Model):
    """Its norm's gradient lies in memory in another order."""

    def forward(self, x):
        return self.second(self.norm(self.first(x)).transpose(0, 1).flatten(1).unflatten(1, (-1, 8)).tanh())


class Checkpointed(Model):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("make", [Model, Mixing, Checkpointed])
def test_a_pass_finds_the_same(make, applications):
    model = make().double()
    assert_found_alike(model, 5, 2, 3, applications=applications)


def test_it_is_in_full_precision_where_the_loss_is():
    def precisely(model, x):
        with torch.autocast("cpu", enabled=False):
            return squares(model, x)

    model, x = Model(), torch.randn(5, 2, 3)
    problem = Problem(model, precisely, AdaHessian(model.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        ours, torchs = (double_backward(problem, written_out=way)(x, problem.draw, False) for way in (True, False))
    torch.testing.assert_close(ours, torchs)


def test_everything_is_as_it_was_afterwards():
    before = F.layer_norm
    found_by(Model().double(), 5, 2, 3, written_out=True)
    assert F.layer_norm is before


@pytest.mark.parametrize("kind", ["two dimensions", "no weights", "no samples", "low precision", "autocast"])
def test_the_rest_is_torchs_own(kind, applications):
    x, weight, bias = (each.to(torch.bfloat16 if kind == "low precision" else torch.float32) for each in some(5, 7))
    shape = x.shape if kind == "two dimensions" else x.shape[1:]
    affine = () if kind in ("two dimensions", "no weights") else (weight, bias)
    x = x[:0] if kind == "no samples" else x
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        assert torch.equal(ours(x, shape, *affine), F.layer_norm(x, shape, *affine))
    assert not applications


@pytest.mark.parametrize("shape", [(6,), 7, ()], ids=str)
def test_what_torch_refuses_is_refused_in_its_words(shape):
    x, weight, bias = some(5, 7)
    with pytest.raises((RuntimeError, TypeError)) as torchs_own:
        F.layer_norm(x, shape, weight, bias)
    with pytest.raises(torchs_own.type) as error:
        ours(x, shape, weight, bias)
    assert str(error.value) == str(torchs_own.value)
