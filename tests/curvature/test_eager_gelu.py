"""GELU written out: the same values and derivatives as torch's own."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from second_derivatives import AtGradient, assert_found_alike, found_by, squares, watched_applications
from torch import nn
from torch.utils.checkpoint import checkpoint

from adahessian import AdaHessian, Curvature
from adahessian.curvature import eager_gelu

gelu = partial(eager_gelu.gelu, AtGradient())
ours, torchs = partial(gelu, approximate="tanh"), partial(F.gelu, approximate="tanh")


@pytest.fixture
def applications(monkeypatch):
    return watched_applications(monkeypatch, eager_gelu._Gelu)


def twice(function, x):
    """The value, the gradient, and the gradient's gradients by both of its arguments."""
    x = x.clone().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    g, v = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(2))
    g.requires_grad_()
    y = function(x)
    (slope,) = torch.autograd.grad(y, x, g, create_graph=True)
    return y, slope, torch.autograd.grad(slope, (g, x), v)


def test_values_and_both_derivatives_are_those_of_torch():
    x = torch.linspace(-9, 9, 721, dtype=torch.float64).view(7, 103)
    torch.testing.assert_close(twice(ours, x), twice(torchs, x))


def test_it_keeps_its_digits_in_single_precision():
    x = torch.linspace(-9, 9, 721)
    exact = twice(lambda x: torchs(x.double()), x)
    torch.testing.assert_close(twice(ours, x)[1:], exact[1:], rtol=1e-4, atol=1e-5)


def test_far_out_there_is_no_curvature():
    assert not twice(ours, torch.tensor([50.0, -50.0, 1e4, -1e4, 1e8, -1e8]))[2][1].any()


def test_what_is_not_finite_is_not_hidden():
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


@pytest.mark.parametrize("make", [Model, Checkpointed])
@pytest.mark.parametrize(
    "activation", [nn.GELU("tanh"), lambda x: F.gelu(x, approximate="tanh")], ids=["module", "called by name"]
)
def test_a_pass_finds_the_same_whoever_calls_it(make, activation, applications):
    model = make(activation).double()
    assert_found_alike(model, 5, 3, applications=applications)


def test_the_output_may_be_written_to():
    model = nn.Sequential(nn.Linear(3, 8), nn.GELU("tanh"), nn.ReLU(inplace=True), nn.Linear(8, 1)).double()
    torch.testing.assert_close(*(found_by(model, 5, 3, written_out=way) for way in (True, False)))


class Kept(Model):
    """Looks its activation up when it is first called."""

    def forward(self, x):
        self.activation = self.activation or F.gelu
        return self.second(self.activation(self.first(x), approximate="tanh"))


def test_everything_is_as_it_was_afterwards(applications):
    before = F.gelu
    model = Kept(None)
    Curvature(model, squares, AdaHessian(model.parameters())).measure(torch.randn(5, 3))
    assert F.gelu is before
    assert len(applications) == 1
    model(torch.randn(5, 3))
    assert len(applications) == 1, "what has been kept is torch's own, when the pass is over"


@pytest.mark.parametrize("kind", ["exact", "low precision", "autocast"])
def test_the_rest_is_torchs_own(kind, applications):
    x = torch.randn(5, 3, dtype=torch.bfloat16 if kind == "low precision" else torch.float32)
    approximate = "none" if kind == "exact" else "tanh"
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        assert torch.equal(gelu(x, approximate=approximate), F.gelu(x, approximate=approximate))
    assert not applications


def test_an_unknown_approximation_is_refused_in_torchs_words():
    with pytest.raises(RuntimeError, match="approximate"):
        gelu(torch.zeros(3), approximate="erf")
