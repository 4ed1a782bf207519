"""GELU written out: the same values and derivatives as torch's own."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from adahessian import AdaHessian, Curvature
from adahessian.curvature import eager_gelu
from adahessian.curvature.replaced import keepers
from adahessian.curvature.ways import Problem, double_backward
from adahessian.curvature.written_out import Pass

# As in a pass that asks for no gradient but its own.
AT_GRADIENT = Pass()
AT_GRADIENT.is_at_gradient = True
gelu = partial(eager_gelu.gelu, AT_GRADIENT)
each_form = pytest.mark.parametrize("approximate", ["none", "tanh"])


@pytest.fixture
def applications(monkeypatch):
    """What it has been applied to."""
    seen = []

    def watched(function, *args):
        if function is eager_gelu._Gelu:
            seen.append(args)
        return function.apply(*args)

    monkeypatch.setattr(eager_gelu, "applied", watched)
    return seen


def twice(function, x, approximate):
    """The value, the gradient, and the gradient's gradients by both of its arguments."""
    x = x.clone().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    g, v = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(2))
    g.requires_grad_()
    y = function(x, approximate=approximate)
    (slope,) = torch.autograd.grad(y, x, g, create_graph=True)
    return y, slope, torch.autograd.grad(slope, (g, x), v)


@each_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_both_derivatives_are_those_of_torch(approximate, dtype):
    x = torch.linspace(-9, 9, 721, dtype=dtype).view(7, 103)
    close = partial(torch.testing.assert_close, **({} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}))
    close(twice(gelu, x, approximate), twice(F.gelu, x, approximate))


@each_form
def test_far_out_there_is_no_curvature(approximate):
    x = torch.tensor([50.0, -50.0, 1e4, -1e4, 1e8, -1e8])
    assert not twice(gelu, x, approximate)[2][1].any()


@each_form
def test_what_is_not_finite_is_not_hidden(approximate):
    assert twice(gelu, torch.tensor([torch.nan]), approximate)[2][1].isnan().all()


class Functional(nn.Module):
    def __init__(self, approximate):
        super().__init__()
        self.approximate = approximate
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.second(F.gelu(self.first(x), approximate=self.approximate))


class Checkpointed(Functional):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Keeper(Functional):
    """As transformers do, and torch's own layers."""

    def __init__(self, approximate):
        super().__init__(approximate)
        self.activation = F.gelu

    def forward(self, x):
        return self.second(self.activation(self.first(x), approximate=self.approximate))


def module(approximate):
    return nn.Sequential(nn.Linear(3, 8), nn.GELU(approximate), nn.Linear(8, 1))


def squares(model, x):
    return model(x).square().mean()


def with_penalty(model, x):
    x = x.detach().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + slope.square().mean()


def found_by(loss, model, *, written_out):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    problem = Problem(model, loss, AdaHessian(model.parameters()))
    return double_backward(problem, written_out=written_out)(x, problem.draw, False)


@each_form
@pytest.mark.parametrize("make", [Functional, Checkpointed, Keeper, module])
def test_a_pass_finds_the_same_whoever_calls_it(make, approximate, applications):
    torch.manual_seed(0)
    model = make(approximate).double()
    torchs = found_by(squares, model, written_out=False)
    assert not applications
    torch.testing.assert_close(found_by(squares, model, written_out=True), torchs)
    assert applications


def test_a_gradient_within_the_loss_can_be_differentiated_twice_more(applications):
    """As in a gradient penalty. What is written out cannot."""
    torch.manual_seed(0)
    model = Functional("tanh").double()
    torch.testing.assert_close(*(found_by(with_penalty, model, written_out=way) for way in (True, False)))
    assert applications


def test_the_output_may_be_written_to():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.ReLU(inplace=True), nn.Linear(8, 1)).double()
    torch.testing.assert_close(*(found_by(squares, model, written_out=way) for way in (True, False)))


def test_everything_is_as_it_was_afterwards():
    model = Keeper("none")
    Curvature(model, squares, AdaHessian(model.parameters())).measure(torch.randn(5, 3))
    assert model.activation is F.gelu is eager_gelu.TORCHS_OWN
    assert keepers(model, F.gelu) == [(model, "activation")]


@pytest.mark.parametrize("kind", ["low precision", "autocast"])
def test_the_rest_is_torchs_own(kind, applications):
    x = torch.randn(5, 3, dtype=torch.bfloat16 if kind == "low precision" else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        assert torch.equal(gelu(x), F.gelu(x))
    assert not applications


def test_an_unknown_approximation_is_refused_in_torchs_words():
    with pytest.raises(RuntimeError, match="approximate"):
        gelu(torch.zeros(3), approximate="erf")
