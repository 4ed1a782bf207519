"""LSTM layers: torch's values and derivatives, to any order."""

import re
from contextlib import nullcontext

import pytest
import torch
from requested import assert_alike, derivatives, squares
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from adahessian.base.errors import CurvatureError
from adahessian.hessian import lstm
from adahessian.hessian.engine import SUBSTITUTES
from adahessian.hessian.isolation import isolated

STEPS, BATCH, INPUTS, HIDDEN = 5, 2, 3, 4


@pytest.fixture
def applications(monkeypatch):
    """How often a layer is computed by the recurrence of ours."""
    seen, original = [], lstm._layers
    monkeypatch.setattr(lstm, "_layers", lambda *args: (seen.append(args), original(*args))[1])
    return seen


def twice(model, x, state, substitutes):
    """All results, gradients and a product with the Hessian, of a loss that weighs every element."""
    leaves = [each.detach().clone().requires_grad_() for each in (x, *state)]
    values = [*leaves, *model.parameters()]
    generator = torch.Generator().manual_seed(1)
    along = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in values]
    torch.manual_seed(2)
    with isolated(model, substitutes):
        output, (h, c) = model(leaves[0], tuple(leaves[1:]) or None)
        weights = torch.arange(output.numel()).view_as(output)
        loss = (output.sin().square() * weights).sum() + 3 * h.sin().square().sum() + c.cos().square().sum()
        gradients = torch.autograd.grad(loss, values, create_graph=True)
        return output, h, c, gradients, torch.autograd.grad(gradients, values, along)


def inputs(model, steps=STEPS, given=True):
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, steps, INPUTS) if model.batch_first else (steps, BATCH, INPUTS)
    layers = model.num_layers * (2 if model.bidirectional else 1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    state = torch.randn(2, layers, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    return x, state.unbind() if given else ()


@pytest.mark.parametrize("given", [True, False], ids=["with a state", "from zero"])
@pytest.mark.parametrize("steps", [STEPS, 1])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_layers": 2},
        {"bidirectional": True},
        {"num_layers": 3, "bidirectional": True, "batch_first": True},
        {"bias": False},
        {"num_layers": 2, "dropout": 0.5},
    ],
    ids=str,
)
def test_values_and_both_derivatives_are_torchs(settings, steps, given, applications):
    model = nn.LSTM(INPUTS, HIDDEN, dtype=torch.float64, **settings)
    x, state = inputs(model, steps, given)
    expected = twice(model, x, state, {})
    assert not applications
    torch.testing.assert_close(twice(model, x, state, SUBSTITUTES), expected)
    assert applications


@pytest.mark.parametrize("results", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_derivatives_of_the_third_order_are_right(results):
    shapes = (2, 1, 8), (8, 2), (1, 2), (1, 2)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def function(*args):
        found = lstm._Recurrence.apply(*args)
        return tuple(found[i] for i in results)

    def gradients(*args):
        return torch.autograd.grad(sum(each.sin().sum() for each in function(*args)), args, create_graph=True)

    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves)
    assert gradgradcheck(gradients, leaves)


@pytest.mark.parametrize("part", ["output", "h", "c"])
def test_a_loss_of_one_result_alone(part, applications):
    def loss(model, x):
        output, (h, c) = model(x)
        return {"output": output, "h": h, "c": c}[part].exp().sum()

    model = nn.LSTM(INPUTS, HIDDEN, dtype=torch.float64)
    x, _ = inputs(model)
    assert_alike(derivatives(model, loss, x), derivatives(model, loss, x, substitutes={}))
    assert applications


def test_layers_before_and_after_and_computed_again(applications):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.recurrent = nn.Linear(3, 3), nn.LSTM(3, 4, num_layers=2, batch_first=True)
            self.after = nn.Linear(4, 1)

        def forward(self, x):
            hidden = checkpoint(lambda y: self.recurrent(y)[0], self.before(x), use_reentrant=False)
            return self.after(hidden)

    model, x = Model().double(), torch.randn(6, 5, 3, dtype=torch.float64)
    expected = derivatives(model, squares, x, substitutes={}, num_probes=2)
    assert_alike(derivatives(model, squares, x, num_probes=2), expected)
    assert len(applications) > 1


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kind", ["packed", "projected", "one sequence", "no sequence", "low precision", "autocast"])
def test_the_rest_is_torchs_own(kind, applications):
    model = nn.LSTM(INPUTS, HIDDEN, proj_size=2 if kind == "projected" else 0)
    x = torch.randn(STEPS, BATCH, INPUTS)
    if kind == "packed":
        x = pack_padded_sequence(x, torch.tensor([STEPS, 2]))
    x = {"one sequence": x[:, 0], "no sequence": x[:, :0]}.get(kind, x) if kind != "packed" else x
    if kind == "low precision":
        model, x = model.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else nullcontext():
        try:
            expected, _ = model(x)
        except RuntimeError as error:  # not every processor has recurrent layers in low precision, and none for nothing
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                lstm.lstm_forward(model, x)
        else:
            found, _ = lstm.lstm_forward(model, x)
            assert torch.equal(found[0], expected[0]) if kind == "packed" else torch.equal(found, expected)
    assert not applications


@pytest.mark.parametrize("state", [(3, 1), (1, 3), (1, 1, 1), None], ids=str)
def test_torchs_errors_are_raised(state):
    model = nn.LSTM(INPUTS, HIDDEN)
    given = None if state is None else tuple(torch.zeros(layers, BATCH, HIDDEN) for layers in state)
    x = torch.randn(STEPS, BATCH, INPUTS + (state is None))
    with pytest.raises(RuntimeError) as torchs_own:
        model(x, given)
    with pytest.raises(type(torchs_own.value)) as error:
        lstm.lstm_forward(model, x, given)
    assert str(error.value) == str(torchs_own.value)


class Around(nn.Module):
    """An LSTM, and what is done with its output."""

    def __init__(self, then):
        super().__init__()
        self.recurrent, self.then = nn.LSTM(INPUTS, HIDDEN, dtype=torch.float64), then

    def forward(self, x):
        return self.then(self.recurrent(x)[0])


def half_in_place(y):
    y *= 0.5
    return y


def first_steps_in_place(y):
    y[:2] = 0
    return y


@pytest.mark.parametrize("then", [half_in_place, first_steps_in_place, nn.ReLU(inplace=True)])
def test_the_output_may_be_written_to(then, applications):
    model = Around(then)
    x, _ = inputs(model.recurrent)
    assert_alike(derivatives(model, squares, x), derivatives(model, squares, x, substitutes={}))
    assert applications


@pytest.mark.filterwarnings("ignore:.*autocast")
def test_an_island_of_full_precision_under_autocast(applications):
    class Island(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.recurrent = nn.Linear(INPUTS, INPUTS), nn.LSTM(INPUTS, HIDDEN)

        def forward(self, x):
            x = self.before(x).float()
            with torch.autocast("cpu", enabled=False):
                return self.recurrent(x)[0]

    model, x = Island(), torch.randn(STEPS, BATCH, INPUTS)
    with torch.autocast("cpu", torch.bfloat16):
        ours, torchs = (derivatives(model, squares, x, substitutes=each) for each in (SUBSTITUTES, {}))
    assert_alike(ours, torchs, rtol=0.1, atol=1e-3)
    assert ours.products[0][-1].dtype == torch.float32
    assert applications


def test_several_gradients_at_once_are_rejected():
    """A custom function would lose their graph without an error."""

    def jacobian(model, x):
        x = x.detach().requires_grad_()
        y = model(x)[0].sum((0, 1))
        return torch.autograd.grad(y, x, torch.eye(HIDDEN).double(), is_grads_batched=True, create_graph=True)[0].sum()

    model = nn.LSTM(INPUTS, HIDDEN, dtype=torch.float64)
    with pytest.raises(CurvatureError, match="is_grads_batched"):
        derivatives(model, jacobian, inputs(model)[0])


def test_weights_that_were_replaced_are_used():
    model = nn.LSTM(INPUTS, HIDDEN, dtype=torch.float64)
    x, _ = inputs(model)
    params = {name: torch.randn_like(param) for name, param in model.named_parameters()}
    with isolated(model, SUBSTITUTES):
        found, _ = torch.func.functional_call(model, params, (x,))
    torch.testing.assert_close(found, torch.func.functional_call(model, params, (x,))[0])
