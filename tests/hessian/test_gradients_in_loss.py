"""Losses that take gradients themselves: layers with derivatives of ours are as right in these as torch's."""

import pytest
import torch
from requested import assert_alike, derivatives
from torch import nn
from torch.utils.checkpoint import checkpoint

from adahessian.base.errors import CurvatureError
from adahessian.hessian import convolution, lstm


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(4, 4)

    def forward(self, x):
        return self.recurrent(x.unsqueeze(1))[0].squeeze(1)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(1, 2, 3, stride=2, padding=1)

    def forward(self, x):
        return self.convolution(x.unsqueeze(1)).flatten(1).tanh()


LAYERS = {"convolution": (Convolution, convolution, "_gradient"), "lstm": (LSTM, lstm, "_layers")}


def energy(model, x):
    return model(x).square().sum()


def slope(model, x):
    return torch.autograd.grad(energy(model, x), x, create_graph=True)[0]


def of_slope(model, x):
    x = x.detach().requires_grad_()
    return slope(model, x).square().mean()


def of_slope_recomputed(model, x):
    """As for energies and forces of molecules that take much memory."""
    x = x.detach().requires_grad_()
    return checkpoint(lambda x: slope(model, x), x, use_reentrant=False).square().mean()


class Adjoint(torch.autograd.Function):
    """The energy, whose gradient is computed anew when it is asked for."""

    @staticmethod
    def forward(ctx, model, x, *params):
        ctx.model = model
        ctx.save_for_backward(x)
        with torch.enable_grad():
            return energy(model, x.detach()).detach()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            params = list(ctx.model.parameters())
            # A gradient in the gradient.
            force = torch.autograd.grad(energy(ctx.model, x), x, create_graph=True)[0]
            by_params = torch.autograd.grad(
                energy(ctx.model, x) + force.square().sum(), params, create_graph=True, allow_unused=True
            )
        return None, None, *(None if each is None else g * each for each in by_params)


def of_adjoint(model, x):
    return Adjoint.apply(model, x, *model.parameters()) ** 2


def of_slope_by_parameters(model, x):
    slopes = torch.autograd.grad(energy(model, x), list(model.parameters()), create_graph=True)
    return sum(each.square().sum() for each in slopes)


def of_slope_of_slope(model, x):
    """With the product, a derivative of the fourth order."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(slope(model, x).square().sum(), x, create_graph=True)[0].square().mean()


def with_slope_as_a_constant(model, x):
    y = energy(model, x)
    slopes = torch.autograd.grad(y, list(model.parameters()), retain_graph=True)
    return y + sum((each * param).sum() for each, param in zip(slopes, model.parameters(), strict=True))


LOSSES = [
    energy,
    of_slope,
    of_slope_recomputed,
    of_adjoint,
    of_slope_by_parameters,
    of_slope_of_slope,
    with_slope_as_a_constant,
]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("times", [1, 2], ids=["used once", "used twice"])
@pytest.mark.parametrize(("layer", "module", "name"), LAYERS.values(), ids=LAYERS)
def test_gradients_within_the_loss_and_within_its_gradient(layer, module, name, loss, times, monkeypatch):
    calls, original = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: (calls.append(args), original(*args))[1])
    model = nn.Sequential(nn.Linear(3, 4), *[layer()] * times, nn.Linear(4, 2)).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    torchs = derivatives(model, loss, x, substitutes={})
    assert not calls
    assert_alike(derivatives(model, loss, x), torchs)
    assert calls


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.BatchNorm1d(4)], ids=["layer norm", "batch norm"])
def test_gradients_of_norms_are_rejected(norm):
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(CurvatureError, match="group_norm"):
        derivatives(model, of_slope, torch.randn(6, 3))
