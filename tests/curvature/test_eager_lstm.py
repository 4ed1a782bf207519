"""LSTMs written out: the same values and derivatives as torch's own."""

import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from second_derivatives import AtGradient
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from adahessian import AdaHessian, Curvature
from adahessian.curvature import eager_lstm
from adahessian.curvature.backends import twice_differentiable
from adahessian.curvature.replaced import replaced_by_name
from adahessian.curvature.ways import Problem, double_backward
from adahessian.curvature.written_out import Pass

WRITTEN_OUT = [(torch._VF, "lstm", partial(eager_lstm.lstm, AtGradient()))]
STEPS, BATCH, INPUTS, HIDDEN = 5, 2, 3, 4


def twice(model, x, state, replacements):
    """All results, gradients and Hessian-vector products by double backward, of a loss that weighs every element."""
    leaves = [each.detach().clone().requires_grad_() for each in (x, *state)]
    values = [*leaves, *model.parameters()]
    generator = torch.Generator().manual_seed(1)
    along = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in values]
    torch.manual_seed(2)
    with replaced_by_name(replacements), twice_differentiable(model):
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
def test_values_and_both_derivatives_are_those_of_torch(settings, given):
    model = nn.LSTM(INPUTS, HIDDEN, dtype=torch.float64, **settings)
    x, state = inputs(model, given=given)
    torch.testing.assert_close(twice(model, x, state, WRITTEN_OUT), twice(model, x, state, []))


def test_a_sequence_of_one():
    model = nn.LSTM(INPUTS, HIDDEN, dtype=torch.float64)
    x, state = inputs(model, steps=1)
    torch.testing.assert_close(twice(model, x, state, WRITTEN_OUT), twice(model, x, state, []))


def test_a_single_sequence_without_a_batch():
    model = nn.LSTM(INPUTS, HIDDEN, dtype=torch.float64)
    x = inputs(model)[0][:, 0]
    torch.testing.assert_close(twice(model, x, (), WRITTEN_OUT), twice(model, x, (), []))


@pytest.mark.parametrize("part", ["output", "state"])
def test_a_loss_of_one_result_alone(part):
    model = nn.LSTM(INPUTS, HIDDEN, dtype=torch.float64)
    x, _ = inputs(model)

    def curvature_of(replacements):
        with replaced_by_name(replacements), twice_differentiable(model):
            output, (_, c) = model(x)
            loss = (output if part == "output" else c).exp().sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            return torch.autograd.grad(gradients, list(model.parameters()), gradients)

    torch.testing.assert_close(curvature_of(WRITTEN_OUT), curvature_of([]))


def test_an_optimizer_is_fed_the_same(monkeypatch):
    """By the engine, in a model with layers before and after, and recomputed in the backward pass."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.recurrent = nn.Linear(3, 3), nn.LSTM(3, 4, num_layers=2, batch_first=True)
            self.after = nn.Linear(4, 1)

        def forward(self, x):
            hidden = checkpoint(lambda y: self.recurrent(y)[0], self.before(x), use_reentrant=False)
            return self.after(hidden)

    torch.manual_seed(0)
    model = Model().double()
    x = torch.randn(6, 5, 3, dtype=torch.float64)
    found = []
    for is_written_out in (True, False):
        with monkeypatch.context() if not is_written_out else nullcontext() as patch:
            if patch is not None:
                patch.setattr(Pass, "takes", lambda self, *tensors: False)
            optimizer = AdaHessian(model.parameters())
            Curvature(model, lambda m, batch: m(batch).cos().mean(), optimizer).measure(x)
            found.append([estimate.values for estimate in optimizer._measurement.values()])
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kind", ["packed", "projected", "low precision", "autocast"])
def test_the_rest_is_torchs_own(monkeypatch, kind):
    def refuse(*args):
        raise AssertionError

    monkeypatch.setattr(eager_lstm._Recurrence, "apply", refuse)
    model = nn.LSTM(INPUTS, HIDDEN, proj_size=2 if kind == "projected" else 0)
    x = torch.randn(STEPS, BATCH, INPUTS)
    if kind == "packed":
        x = pack_padded_sequence(x, torch.tensor([STEPS, 2]))
    if kind == "low precision":
        model, x = model.bfloat16(), x.bfloat16()
    autocast = torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else nullcontext()
    with autocast:
        try:
            expected, _ = model(x)
        except RuntimeError as refusal:
            # Not every processor has recurrent layers in low precision.
            assert kind in ("low precision", "autocast")
            with replaced_by_name(WRITTEN_OUT), pytest.raises(RuntimeError, match=re.escape(str(refusal))):
                model(x)
            return
        with replaced_by_name(WRITTEN_OUT):
            found, _ = model(x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shapes", [(3, 1), (1, 3)])
def test_a_state_that_does_not_fit_is_refused_in_torchs_words(shapes):
    h, c = (torch.zeros(layers, BATCH, HIDDEN) for layers in shapes)
    with replaced_by_name(WRITTEN_OUT), pytest.raises(RuntimeError, match="hidden"):
        nn.LSTM(INPUTS, HIDDEN)(torch.randn(STEPS, BATCH, INPUTS), (h, c))


def test_states_for_more_layers_than_there_are_are_refused():
    model = nn.LSTM(INPUTS, HIDDEN)
    state = torch.zeros(3, BATCH, HIDDEN)
    arguments = (
        torch.randn(STEPS, BATCH, INPUTS),
        (state, state),
        model._flat_weights,
        True,
        1,
        0.0,
        True,
        False,
        False,
    )
    with replaced_by_name(WRITTEN_OUT), twice_differentiable(model), pytest.raises(RuntimeError, match="hidden states"):
        torch._VF.lstm(*arguments)


class Around(nn.Module):
    """An LSTM, and what is done with its output."""

    def __init__(self, then):
        super().__init__()
        self.recurrent, self.then = nn.LSTM(INPUTS, HIDDEN, dtype=torch.float64), then

    def forward(self, x):
        return self.then(self.recurrent(x)[0])


def found_by(loss, model, x, *, written_out):
    problem = Problem(model, loss, AdaHessian(model.parameters()))
    return double_backward(problem, written_out=written_out)(x, problem.draw, False)


def half_in_place(y):
    y *= 0.5
    return y


def first_steps_in_place(y):
    y[:2] = 0
    return y


@pytest.mark.parametrize("then", [half_in_place, first_steps_in_place, nn.ReLU(inplace=True)])
def test_the_output_may_be_written_to(then):
    torch.manual_seed(0)
    model = Around(then)
    x, _ = inputs(model.recurrent)
    torch.testing.assert_close(*(found_by(squares, model, x, written_out=way) for way in (True, False)))


def squares(model, x):
    return model(x).square().mean()


@pytest.mark.filterwarnings("ignore:.*autocast")
def test_an_island_of_full_precision_under_autocast():
    class Island(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.recurrent = nn.Linear(INPUTS, INPUTS), nn.LSTM(INPUTS, HIDDEN)

        def forward(self, x):
            x = self.before(x).float()
            with torch.autocast("cpu", enabled=False):
                return self.recurrent(x)[0]

    torch.manual_seed(0)
    model = Island()
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(STEPS, BATCH, INPUTS)
        ours, torchs = (found_by(squares, model, x, written_out=way) for way in (True, False))
    torch.testing.assert_close(ours.diagonal, torchs.diagonal, rtol=0.1, atol=1e-4)
