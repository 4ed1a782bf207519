"""GELU and SiLU written out: the same values and derivatives as torch's own."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from adahessian import AdaHessian, Curvature
from adahessian.curvature import eager_activations
from adahessian.curvature.ways import Problem, double_backward
from adahessian.curvature.written_out import Pass

# As in a pass that asks for no gradient but its own.
AT_GRADIENT = Pass()
AT_GRADIENT.is_at_gradient = True
gelu, silu = (partial(each, AT_GRADIENT) for each in (eager_activations.gelu, eager_activations.silu))
# Ours and torch's.
PAIRS = {
    "gelu": (gelu, F.gelu),
    "approximate gelu": (partial(gelu, approximate="tanh"), partial(F.gelu, approximate="tanh")),
    "silu": (silu, F.silu),
}
each_pair = pytest.mark.parametrize(("ours", "torchs"), PAIRS.values(), ids=PAIRS)


@pytest.fixture
def applications(monkeypatch):
    """What it has been applied to."""
    seen = []

    def watched(function, *args):
        if function is eager_activations._Activated:
            seen.append(args)
        return function.apply(*args)

    monkeypatch.setattr(eager_activations, "applied", watched)
    return seen


def twice(function, x):
    """The value, the gradient, and the gradient's gradients by both of its arguments."""
    x = x.clone().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    g, v = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(2))
    g.requires_grad_()
    y = function(x)
    (slope,) = torch.autograd.grad(y, x, g, create_graph=True)
    return y, slope, torch.autograd.grad(slope, (g, x), v)


@each_pair
def test_values_and_both_derivatives_are_those_of_torch(ours, torchs):
    x = torch.linspace(-9, 9, 721, dtype=torch.float64).view(7, 103)
    torch.testing.assert_close(twice(ours, x), twice(torchs, x))


@each_pair
def test_they_keep_their_digits_in_single_precision(ours, torchs):
    x = torch.linspace(-9, 9, 721)
    _, slope, by_both = twice(ours, x)
    exact = twice(lambda x: torchs(x.double()), x)
    torch.testing.assert_close((slope, by_both), exact[1:], rtol=1e-4, atol=1e-5)


@each_pair
def test_far_out_there_is_no_curvature(ours, torchs):
    x = torch.tensor([200.0, -200.0, 1e4, -1e4, 1e8, -1e8])
    assert not twice(ours, x)[2][1].any()


@each_pair
def test_what_is_not_finite_is_not_hidden(ours, torchs):
    assert twice(ours, torch.tensor([torch.nan]))[2][1].isnan().all()


class Model(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.activation = activation
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.second(self.activation(self.first(x)))


class Checkpointed(Model):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


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


ACTIVATIONS = {
    "module": nn.GELU(),
    "approximate module": nn.GELU("tanh"),
    "module of silu": nn.SiLU(),
    "called by name": lambda x: F.gelu(x, approximate="tanh"),
    "silu called by name": lambda x: F.silu(x),
}


@pytest.mark.parametrize("make", [Model, Checkpointed])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_a_pass_finds_the_same_whoever_calls_it(make, activation, applications):
    torch.manual_seed(0)
    model = make(activation).double()
    torchs = found_by(squares, model, written_out=False)
    assert not applications
    torch.testing.assert_close(found_by(squares, model, written_out=True), torchs)
    assert applications


@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.SiLU()], ids=str)
def test_a_gradient_within_the_loss_can_be_differentiated_twice_more(activation, applications):
    """As in a gradient penalty. What is written out cannot."""
    torch.manual_seed(0)
    model = Model(activation).double()
    torch.testing.assert_close(*(found_by(with_penalty, model, written_out=way) for way in (True, False)))
    assert applications


@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU(), nn.SiLU(inplace=True)], ids=str)
def test_inputs_and_outputs_may_be_written_to(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), activation, nn.ReLU(inplace=True), nn.Linear(8, 1)).double()
    torch.testing.assert_close(*(found_by(squares, model, written_out=way) for way in (True, False)))


class Kept(nn.Module):
    """Looks its activation up when it is first called."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.activation = nn.Linear(3, 8), nn.Linear(8, 1), None

    def forward(self, x):
        self.activation = self.activation or F.silu
        return self.second(self.activation(self.first(x)))


def test_everything_is_as_it_was_afterwards(applications):
    gelu, silu = F.gelu, F.silu
    model = Kept()
    Curvature(model, squares, AdaHessian(model.parameters())).measure(torch.randn(5, 3))
    assert F.gelu is gelu
    assert F.silu is silu
    assert len(applications) == 1
    x = torch.randn(5, 3)
    torch.testing.assert_close(model.activation(x), F.silu(x))
    assert len(applications) == 1, "what has been kept is torch's own, when the pass is over"


@pytest.mark.parametrize("kind", ["low precision", "autocast"])
@each_pair
def test_the_rest_is_torchs_own(ours, torchs, kind, applications):
    x = torch.randn(5, 3, dtype=torch.bfloat16 if kind == "low precision" else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        assert torch.equal(ours(x), torchs(x))
    assert not applications


def test_in_place_it_is_in_place():
    x = torch.randn(5, 3)
    assert silu(x, inplace=True) is x


def test_an_unknown_approximation_is_refused_in_torchs_words():
    with pytest.raises(RuntimeError, match="approximate"):
        gelu(torch.zeros(3), approximate="erf")
