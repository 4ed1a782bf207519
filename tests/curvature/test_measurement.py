"""The curvature pass: it measures what it should, where it should, and leaves no trace."""

import random
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from adahessian import AdaHessian, Curvature, CurvatureError
from adahessian.curvature.batches import slice_batch
from cases import ATTENTION, BATCH_NORM, MLP, flat_parameters


class Everything(nn.Module):
    """Batch norm, dropout, and randomness from Python and NumPy."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.calls += 1
        scale = 1 + random.random() + np.random.rand()
        return scale * self.linear(self.dropout(self.norm(x)))


def loss_of(model, batch):
    return model(batch).square().mean()


def snapshot(model):
    return (
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        {name: id(buffer) for name, buffer in model.named_buffers()},
        {name: buffer._version for name, buffer in model.named_buffers()},
        [int(module.training) for module in model.modules()],
        [param.grad.clone() for param in model.parameters() if param.grad is not None],
        flat_parameters(model),
        torch.get_rng_state(),
        list(random.getstate()[1]),
        np.random.get_state()[1].copy(),
    )


def assert_same(before, after):
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_pass_leaves_no_trace():
    model = Everything()
    model.dropout.eval()  # a mode of its own
    x = torch.randn(16, 4)
    loss_of(model, x).backward()
    optimizer = AdaHessian(model.parameters())

    def meddling_loss(model, batch):
        model.train()
        return loss_of(model, batch)

    before = snapshot(model)
    assert Curvature(model, meddling_loss, optimizer).measure(x)
    assert_same(before, snapshot(model))


def test_a_pass_that_fails_leaves_no_trace_either():
    model = Everything()
    optimizer = AdaHessian(model.parameters())

    def failing_loss(model, batch):
        loss_of(model.eval(), batch)
        raise KeyError("the user's own")

    x = torch.randn(16, 4)
    before = snapshot(model)
    with pytest.raises(KeyError, match="the user's own"):
        Curvature(model, failing_loss, optimizer).measure(x)
    assert_same(before, snapshot(model))
    assert optimizer.curvature_due


def test_a_graph_that_waits_for_its_backward_is_not_disturbed():
    for mode in (True, False):
        model = BATCH_NORM.model().train(mode)
        batch = BATCH_NORM.batch()
        optimizer = AdaHessian(model.parameters())
        loss = BATCH_NORM.loss(model, batch)
        assert Curvature(model, BATCH_NORM.loss, optimizer).measure(batch)
        loss.backward()
        optimizer.step()


def test_buffers_that_modules_share_stay_shared_in_the_pass():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[1].running_mean = model[0].running_mean
    seen = []

    def loss_fn(model, batch):
        seen.append(model[0].running_mean is model[1].running_mean)
        return loss_of(model, batch)

    Curvature(model, loss_fn, AdaHessian(model.parameters())).measure(torch.randn(8, 2))
    assert seen == [True]
    assert model[0].running_mean is model[1].running_mean


def test_the_pass_sees_the_dropout_that_the_gradient_will_see():
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    masks = []

    def loss_fn(model, batch):
        output = model(batch)
        masks.append(output == 0)
        return output.square().mean()

    x = torch.randn(8, 4)
    optimizer = AdaHessian(model.parameters())
    Curvature(model, loss_fn, optimizer).measure(x)
    loss_fn(model, x)
    assert torch.equal(*masks)


def test_it_measures_only_when_due_and_says_so():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), update_every=3)
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        return MLP.loss(model, batch)

    curvature = Curvature(model, loss_fn, optimizer)
    for measured in (True, False, False, True, False):
        assert curvature.measure(batch) is measured
        assert not curvature.measure(batch), "the step has its measurement"
        optimizer.zero_grad()
        MLP.loss(model, batch).backward()
        optimizer.step()
    assert len(calls) == 2


def test_it_works_where_gradients_are_disabled():
    model, batch = MLP.model(), MLP.batch()
    with torch.no_grad():
        assert Curvature(model, MLP.loss, AdaHessian(model.parameters())).measure(batch)


def test_fused_attention_is_measured_by_itself():
    model, batch = ATTENTION.model(torch.float32), ATTENTION.batch(torch.float32)
    optimizer = AdaHessian(model.parameters())
    assert Curvature(model, ATTENTION.loss, optimizer).measure(batch)


def test_batch_fraction_measures_on_the_first_examples():
    model, (x, y) = MLP.model(), MLP.batch()
    fed = []
    for fraction, batch in ((0.25, (x, y)), (1.0, (x[:4], y[:4]))):
        optimizer = AdaHessian(model.parameters())
        optimizer.feed_curvature = fed.append
        Curvature(model, MLP.loss, optimizer, batch_fraction=fraction).measure(batch)
    for param in model.parameters():
        assert torch.equal(fed[0][param], fed[1][param])


Pair = namedtuple("Pair", ["x", "rest"])


def test_slices_of_batches_of_all_kinds():
    x = torch.arange(10.0).view(10, 1)
    scalar = torch.tensor(3.0)
    assert len(slice_batch(x, 0.25)) == 3
    assert len(slice_batch(x, 0.01)) == 1
    assert slice_batch(x, 1.0) is x
    assert slice_batch([x, "name", 7], 0.5)[1:] == ["name", 7]
    named = slice_batch(Pair(x, {"y": (x, scalar)}), 0.5)
    assert isinstance(named, Pair)
    assert named.rest["y"][0].shape == (5, 1)
    assert named.rest["y"][1] is scalar
    assert slice_batch(UserDict(x=x), 0.5)["x"].shape == (5, 1)
    assert slice_batch(torch.zeros(3, 10), 0.5, dim=1).shape == (3, 5)


@pytest.mark.parametrize("batch", ["text", (torch.zeros(8), torch.zeros(6)), torch.tensor(1.0), []], ids=str)
def test_batches_that_cannot_be_sliced(batch):
    with pytest.raises(ValueError, match=r"cannot take a slice.*batch_fraction=1.0"):
        slice_batch(batch, 0.5)


@pytest.mark.parametrize("arguments", [{"batch_fraction": 0}, {"batch_fraction": 1.5}, {"batch_dim": -1}], ids=str)
def test_wrong_arguments(arguments):
    model = MLP.model()
    with pytest.raises(ValueError, match=f"Invalid {next(iter(arguments))}"):
        Curvature(model, MLP.loss, AdaHessian(model.parameters()), **arguments)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda model, x: model(x), r"scalar, but returned a tensor of shape \(16, 3\): reduce it with .mean"),
        (lambda model, x: 3.0, "scalar, but returned a float"),
        (lambda model, x: model(x).mean().detach(), "the loss has no graph"),
        (lambda model, x: torch.ones((), requires_grad=True) * 2, "depends on none of the optimizer's parameters"),
    ],
)
def test_wrong_losses(loss_fn, message):
    model, (x, _) = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(CurvatureError, match=message):
        Curvature(model, loss_fn, optimizer).measure(x)
    assert optimizer.curvature_due


class Once(torch.autograd.Function):
    """A square whose backward cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


def attention_loss(model, x):
    q = model(x).view(1, 1, 16, 3)
    return nn.functional.scaled_dot_product_attention(q, q, q).sum()


def test_operations_without_a_second_derivative_are_named_with_their_remedy():
    model, (x, _) = MLP.model(torch.float32), MLP.batch(torch.float32)
    before = flat_parameters(model)
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(CurvatureError, match=r"Once cannot be differentiated twice.*Remedy: write that backward"):
        Curvature(model, lambda model, x: Once.apply(model(x)).sum(), optimizer).measure(x)

    Once.apply(model(x)).square().sum().backward(create_graph=True)
    with pytest.raises(
        CurvatureError, match=r"autograd function cannot be differentiated twice.*Remedy: write that backward"
    ):
        optimizer.step()

    optimizer.zero_grad()
    attention_loss(model, x).backward(create_graph=True)
    with pytest.raises(CurvatureError, match=r"scaled_dot_product\w* cannot be differentiated twice.*SDPBackend.MATH"):
        optimizer.step()
    assert torch.equal(flat_parameters(model), before)
    assert all(not group["steps"] for group in optimizer.param_groups)


def test_an_error_of_another_kind_is_left_alone():
    model, batch = MLP.model(), MLP.batch()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        Curvature(model, MLP.loss, AdaHessian(model.parameters())).measure((batch[0][:, :2], batch[1]))
    assert not isinstance(caught.value, CurvatureError)
