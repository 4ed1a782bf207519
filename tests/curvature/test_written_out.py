"""What is written out, in losses that take gradients themselves."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adahessian import AdaHessian, Curvature, CurvatureError
from adahessian.curvature import eager_layer_norm
from adahessian.curvature.agreement import reference
from adahessian.curvature.ways import Problem, double_backward
from adahessian.curvature.written_out import Pass


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


class Attention(nn.Module):
    def forward(self, x):
        query, key, value = x.view(3, 1, 2, 4).unbind()
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum() * x


class PlainNorm(nn.Module):
    """A norm in ordinary operations: torch differentiates the gradients of its own wrongly."""

    def __init__(self, over):
        super().__init__()
        self.over, self.weight, self.bias = over, nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        centred = x - x.mean(self.over, keepdim=True)
        return centred / (centred.square().mean(self.over, keepdim=True) + 1e-5).sqrt() * self.weight + self.bias


PLAIN = {nn.BatchNorm1d: 0, nn.LayerNorm: -1}


def with_plain_norms(model):
    plain = {each: PlainNorm(PLAIN[type(each)]) for each in model if type(each) in PLAIN}
    return nn.Sequential(*(plain.get(each, each) for each in model))


LAYERS = {
    "convolution": Convolution,
    "gelu": lambda: nn.GELU("tanh"),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "layer norm": lambda: nn.LayerNorm(4),
    "attention": Attention,
    "lstm": LSTM,
}


def energy(model, x):
    return model(x).square().sum()


def slope(model, x):
    return torch.autograd.grad(energy(model, x), x, create_graph=True)[0]


def of_slope(model, x):
    x = x.detach().requires_grad_()
    return slope(model, x).square().mean()


def of_slope_recomputed(model, x):
    """As energies and forces are, of molecules that take much memory."""
    x = x.detach().requires_grad_()
    return checkpoint(lambda x: slope(model, x), x, use_reentrant=False).square().mean()


class Adjoint(torch.autograd.Function):
    """The energy, whose gradient is computed anew where it is asked for."""

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
            # A gradient within the gradient: it is to be differentiated as often as that is.
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


def with_slope_as_a_constant(model, x):
    y = energy(model, x)
    slopes = torch.autograd.grad(y, list(model.parameters()), retain_graph=True)
    return y + sum((each * param).sum() for each, param in zip(slopes, model.parameters(), strict=True))


LOSSES = [energy, of_slope, of_slope_recomputed, of_adjoint, of_slope_by_parameters, with_slope_as_a_constant]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("times", [1, 2], ids=["used once", "used twice"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_gradients_within_the_loss_and_within_its_gradient(layer, loss, times, monkeypatch):
    """As in a gradient penalty, too. What is written out can be differentiated only once more."""
    taken, takes = [], Pass.takes

    def watched(of_pass, *tensors):
        taken.append(takes(of_pass, *tensors))
        return taken[-1]

    monkeypatch.setattr(Pass, "takes", watched)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), *[layer()] * times, nn.Linear(4, 2)).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    problem = Problem(model, loss, AdaHessian(model.parameters()))
    ours = double_backward(problem)(x, problem.draw, False)
    assert any(taken)
    plain = with_plain_norms(model).double()
    problem = Problem(plain, loss, AdaHessian(plain.parameters()))
    torchs = double_backward(problem, written_out=False)(x, problem.draw, False)
    torch.testing.assert_close(ours, torchs)
    assert any(each is not None and each.any() for each in torchs.diagonal)


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.BatchNorm1d(4)], ids=["layer norm", "batch norm"])
@pytest.mark.parametrize("way", ["double_backward", "forward_over_reverse"])
def test_gradients_of_norms_are_refused_where_they_are_torchs_own(norm, way):
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 2)).to(torch.bfloat16)
    curvature = Curvature(model, of_slope, AdaHessian(model.parameters()), product=way)
    with pytest.raises(CurvatureError, match=r"gradient penalty.*Remedy: .*group_norm"):
        curvature.measure(torch.randn(6, 3, dtype=torch.bfloat16))


def test_gradients_of_a_norm_that_is_frozen_are_not_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    curvature = Curvature(model, of_slope, AdaHessian(model.parameters()))
    assert curvature.measure(torch.randn(6, 3, dtype=torch.float64))


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_first_measurement_has_the_bits_of_any_other(layer):
    """Who goes on from a checkpoint measures for the first time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), layer(), nn.Linear(4, 2))
    x = torch.randn(6, 3)
    engine = Curvature(model, energy, AdaHessian(model.parameters())).engine
    first, second = (engine.measure(x).diagonal for _ in range(2))
    assert all(map(torch.equal, first, second))


class Auxiliary(nn.Module):
    """Returns a pair when it trains, as some networks for images do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten(), nn.Dropout(), nn.Linear(4, 1))

    def forward(self, x):
        y = self.layers(x)
        return (y, 2 * y) if self.training else y


def of_both(model, x):
    y, z = model(x)
    return (y + z).square().mean()


def first_and_later(model, loss, x):
    """What a step finds and leaves behind, in a new process and in one that has measured before."""
    for has_measured in (False, True):
        mine = copy.deepcopy(model)
        engine = Curvature(mine, loss, AdaHessian(mine.parameters())).engine
        if has_measured:
            engine.measure(x)
        torch.manual_seed(1)
        found = engine.compute(x, engine._problem.draw, keep_buffers=True)
        yield found, list(mine.buffers()), torch.rand(3)


def test_a_model_that_cannot_be_compared_goes_on_as_ever(said):
    x = torch.randn(6, 1, 4)
    torch.testing.assert_close(*first_and_later(Auxiliary(), of_both, x), rtol=0, atol=0)
    assert not any("left to torch" in message for message in said.messages)


def wrong(monkeypatch, module, name):
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: right(*args) * 1.5)


def test_what_is_wrong_leaves_no_trace(monkeypatch, said):
    wrong(monkeypatch, eager_layer_norm, "_projected")
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Dropout(), nn.Linear(4, 2))
    torch.testing.assert_close(*first_and_later(model, energy, torch.randn(6, 3)), rtol=0, atol=0)
    assert any("all is left to torch" in message for message in said.messages)


def test_it_is_compared_again_when_parameters_are_frozen(monkeypatch):
    wrong(monkeypatch, eager_layer_norm, "_projected")
    model, x = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double(), torch.randn(6, 3).double()
    engine = Curvature(model, energy, AdaHessian(model.parameters())).engine
    for _ in range(2):
        torch.testing.assert_close(engine.measure(x).diagonal, reference(engine._problem, x).diagonal)
        model[0].bias.requires_grad_(False)


class Later(nn.Module):
    """A layer that takes part from the second batch on."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        y = self.first(x)
        return self.last(self.norm(y) if len(x) > 6 else y.tanh())


def test_what_takes_part_later_is_compared_then(monkeypatch, said):
    wrong(monkeypatch, eager_layer_norm, "_projected")
    model = Later().double()
    engine = Curvature(model, energy, AdaHessian(model.parameters())).engine
    for rows in (6, 8):
        assert not said.messages or "left to torch" not in said.messages[-1]
        x = torch.randn(rows, 3, dtype=torch.float64)
        torch.testing.assert_close(engine.measure(x).diagonal, reference(engine._problem, x).diagonal)
    assert any("all is left to torch" in message for message in said.messages)


class Failing(nn.Conv1d):
    """A convolution that finds out that it is not torch's."""

    def forward(self, x):
        if nn.functional.conv1d is not TORCHS_CONVOLUTION:
            raise RuntimeError("not by me")
        return super().forward(x)


TORCHS_CONVOLUTION = nn.functional.conv1d


def test_what_stumbles_over_it_is_left_to_torch(said):
    model = nn.Sequential(Failing(1, 2, 3), nn.Flatten(), nn.Linear(4, 2))
    optimizer = AdaHessian(model.parameters())
    Curvature(model, energy, optimizer).measure(torch.randn(6, 1, 4))
    optimizer.step()
    assert any("all is left to torch" in message and "not by me" in message for message in said.messages)
