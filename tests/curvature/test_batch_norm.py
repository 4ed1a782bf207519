"""Batch norm, in plain operations and written out: the same values, derivatives and statistics as torch's own."""

import threading
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from second_derivatives import AtGradient, watched_applications
from torch import nn
from torch.func import grad, jvp
from torch.utils.checkpoint import checkpoint

from adahessian import AdaHessian, Curvature
from adahessian.curvature import batch_norm as module
from adahessian.curvature import eager_batch_norm
from adahessian.curvature.batch_norm import by_batch
from adahessian.curvature.replaced import Replaced, replaced_by_name

written_out_batch_norm = partial(eager_batch_norm.batch_norm, AtGradient())


def in_plain_operations():
    return Replaced({module.TORCHS_OWN: module.batch_norm})


def in_written_out_form():
    return replaced_by_name([(nn.functional, "batch_norm", written_out_batch_norm)])


each_way = pytest.mark.parametrize("replacement", [in_plain_operations, in_written_out_form])


def inputs(shape, dtype=torch.float64, offset=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in (shape, shape[1], shape[1])
    )
    return x.to(dtype) * 2 + offset, weight.to(dtype), bias.to(dtype)


def plain(x, weight, bias, eps):
    return by_batch(x, weight, bias, eps)[0]


def own(x, weight, bias, eps):
    return nn.functional.batch_norm(x, None, None, weight, bias, training=True, eps=eps)


def curvature(function, values):
    """Gradient and Hessian-vector product of a loss that bends."""
    along = tuple(torch.cos(torch.arange(each.numel(), dtype=each.dtype)).view_as(each) for each in values)
    loss = grad(lambda *args: function(*args, 1e-3).sin().square().sum(), argnums=(0, 1, 2))
    return jvp(loss, values, along)


@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 5), (4, 3, 5, 2)])
def test_values_and_both_derivatives_are_those_of_torch(shape):
    values = inputs(shape)
    torch.testing.assert_close(plain(*values, 1e-3), own(*values, 1e-3))
    torch.testing.assert_close(curvature(plain, values), curvature(own, values))


def test_without_scale_and_shift():
    x, *_ = inputs((8, 3))
    torch.testing.assert_close(plain(x, None, None, 1e-5), own(x, None, None, 1e-5))


@pytest.mark.parametrize("seed", range(10))
def test_a_large_mean_costs_no_digits(seed):
    values = inputs((64, 3, 4, 4), torch.float32, offset=1e3, seed=seed)
    exact = own(*(each.double() for each in values), 1e-5)
    ours, torchs = (f(*values, 1e-5).double().sub(exact).norm().item() for f in (plain, own))
    assert ours < 1.1 * torchs


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.3}, {"momentum": None}, {"track_running_stats": False}])
@each_way
def test_running_statistics_and_evaluation_are_those_of_torch(replacement, settings):
    plain, usual = (nn.BatchNorm2d(3, dtype=torch.float64, **settings) for _ in range(2))
    for seed in range(3):
        x, *_ = inputs((8, 3, 2, 2), seed=seed)
        with replacement():
            outputs = [plain.train()(x), plain.eval()(x)]
        torch.testing.assert_close(outputs, [usual.train()(x), usual.eval()(x)])
        torch.testing.assert_close(plain.state_dict(), usual.state_dict())


@each_way
def test_what_torch_refuses_is_refused(replacement):
    with replacement(), pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm1d(3)(torch.ones(1, 3))


@each_way
def test_no_values_at_all_are_left_to_torch(replacement):
    weight = torch.ones(3, requires_grad=True)
    with replacement():
        nn.functional.batch_norm(torch.ones(0, 3, 2), None, None, weight, None, training=True).sum().backward()
    assert weight.grad.tolist() == [0.0, 0.0, 0.0]


@each_way
def test_a_weight_that_does_not_fit_is_refused(replacement):
    with replacement(), pytest.raises(RuntimeError, match="weight should contain 3 elements"):
        nn.functional.batch_norm(torch.randn(8, 3), None, None, torch.ones(1), None, training=True)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_compiled_pass_computes_by_it_and_is_compared_with_it(quick_compiler, monkeypatch, said, dropout):
    """If it were wrong, the comparison with double backward would tell."""
    for factor, is_compiled in ((1.0, True), (1.3, False)):
        monkeypatch.setattr(module, "by_batch", lambda *args, by=factor: (by * plain(*args), *by_batch(*args)[1:]))
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2))
        curvature = Curvature(model, lambda m, x: m(x).square().mean(), AdaHessian(model.parameters()), compile=True)
        assert curvature.engine.choice(torch.randn(16, 4)).is_compiled is is_compiled, said.messages


# Written out ---------------------------------------------------------------------------------------------------------


def twice(function, values, eps=1e-3):
    """Loss, gradient and Hessian-vector product by double backward, of a loss that bends and weighs all elements."""
    values = [each.detach().requires_grad_() for each in values]
    along = [torch.cos(torch.arange(each.numel(), dtype=each.dtype)).view_as(each) for each in values]
    output = function(*values, eps)
    loss = (output.sin().square() * torch.arange(output.numel()).view_as(output)).sum()
    gradients = torch.autograd.grad(loss, values, create_graph=True)
    return loss, gradients, torch.autograd.grad(gradients, values, along)


def written_out(x, weight, bias, eps):
    output = written_out_batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    assert "_BatchNorm" in output.grad_fn.name()
    return output


@pytest.mark.parametrize("shape", [(8, 3), (4, 3, 5), (4, 3, 5, 2), (2, 3, 2, 2, 3)])
def test_written_out_it_has_torchs_derivatives(shape):
    values = inputs(shape)
    torch.testing.assert_close(twice(written_out, values), twice(own, values))


def test_written_out_with_channels_last():
    x, weight, bias = inputs((4, 3, 5, 2))
    values = x.to(memory_format=torch.channels_last), weight, bias
    torch.testing.assert_close(twice(written_out, values), twice(own, values))


def test_written_out_where_a_scale_is_zero():
    """As at the end of the blocks of many ResNets."""
    x, _, bias = inputs((4, 3, 5))
    values = x, torch.tensor([0.0, 1.0, 0.0], dtype=x.dtype), bias
    torch.testing.assert_close(twice(written_out, values), twice(own, values))


def test_written_out_a_large_mean_costs_no_digits():
    values = inputs((64, 3, 4, 4), torch.float32, offset=1e3)
    exact = twice(own, [each.double() for each in values])[2]
    for ours, torchs, wanted in zip(twice(written_out, values)[2], twice(own, values)[2], exact, strict=True):
        assert (ours - wanted).norm() < 2 * (torchs - wanted).norm()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, b: written_out_batch_norm(x, torch.zeros(3), torch.ones(3), w, b, training=False),
        lambda x, w, b: written_out_batch_norm(x, None, None, None, None, training=True),
        lambda x, w, b: written_out_batch_norm(x.bfloat16(), None, None, w, b, training=True),
        lambda x, w, b: torch.func.vmap(lambda y: written_out_batch_norm(y, None, None, w, b, training=True))(
            x.expand(2, *x.shape)
        ),
    ],
    ids=["evaluation", "no scale", "low precision", "transformed"],
)
def test_the_rest_is_torchs_own(call):
    output = call(*(each.requires_grad_() for each in inputs((8, 3), torch.float32)))
    assert "_BatchNorm" not in output.grad_fn.name()


def test_checkpointed_layers_are_recomputed_by_it():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    found = []
    for forward in (layers, lambda x: checkpoint(layers, x, use_reentrant=False)):
        optimizer = AdaHessian(layers.parameters())
        curvature = Curvature(layers, lambda m, x, forward=forward: forward(x).square().mean(), optimizer)
        assert curvature.measure(torch.linspace(-1, 1, 64).view(16, 4))
        found.append([estimate.values for estimate in optimizer._measurement.values()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("settings", [{"eps": 0.0}, {"eps": -1.0}])
def test_arguments_that_torch_refuses_are_refused(settings):
    with pytest.raises(ValueError, match="eps must be positive"):
        written_out_batch_norm(torch.randn(8, 3), None, None, torch.ones(3), torch.zeros(3), training=True, **settings)


def test_forward_differentiation_within_the_loss():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))

    def loss(model, x):
        with fwAD.dual_level():
            return fwAD.unpack_dual(model(fwAD.make_dual(x, torch.ones_like(x)))).tangent.square().mean()

    assert Curvature(model, loss, AdaHessian(model.parameters())).measure(torch.randn(16, 4))


def model_with_batch_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def test_double_backward_computes_by_it(monkeypatch):
    calls = watched_applications(monkeypatch, eager_batch_norm._BatchNorm)
    model = model_with_batch_norm()
    optimizer = AdaHessian(model.parameters())
    curvature = Curvature(model, lambda m, x: m(x).square().mean(), optimizer)
    assert curvature.measure(torch.randn(16, 4))
    assert len(calls) == 2  # once to be compared with torch's
    optimizer._measurement = None
    assert curvature.measure(torch.randn(16, 4))
    assert len(calls) == 3


def test_if_it_were_wrong_torchs_own_would_be_taken(monkeypatch, said):
    right = eager_batch_norm._native_gradient
    x = torch.linspace(-1, 1, 64, dtype=torch.float64).view(16, 4)
    found = []
    for factor in (1.0, 1.3):
        monkeypatch.setattr(
            eager_batch_norm,
            "_native_gradient",
            lambda *args, by=factor: [None if each is None else by * each for each in right(*args)],
        )
        model = model_with_batch_norm().double()
        optimizer = AdaHessian(model.parameters())
        Curvature(model, lambda m, x: m(x).square().mean(), optimizer).measure(x)
        found.append([estimate.values for estimate in optimizer._measurement.values()])
        assert any("left to torch" in message for message in said.messages) is (factor != 1)
    torch.testing.assert_close(*found)


def test_second_derivatives_that_are_not_finite_decide_nothing(said, monkeypatch):
    calls = watched_applications(monkeypatch, eager_batch_norm._BatchNorm)
    model = model_with_batch_norm()
    engine = Curvature(model, lambda m, x: m(x).square().mean(), AdaHessian(model.parameters())).engine
    x = torch.randn(16, 4)
    engine.measure(x * torch.inf)
    assert len(calls) == 1
    engine.measure(x)
    assert len(calls) == 3, "compared on a batch that it can be compared on"
    engine.measure(x)
    assert len(calls) == 4
    assert not any("left to torch" in message for message in said.messages)


def test_a_state_that_a_module_keeps_is_told_of(said):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.calls = model_with_batch_norm(), 0

        def forward(self, x):
            self.calls += 1
            return self.calls * self.layers(x)

    model = Keeps()
    curvature = Curvature(model, lambda m, x: m(x).square().mean(), AdaHessian(model.parameters()))
    assert curvature.measure(torch.randn(16, 4))
    assert any("does the model keep a state" in message for message in said.messages)
    assert not any("left to torch" in message for message in said.messages)


def test_threads_leave_torchs_functions_as_they_were():
    before = nn.functional.batch_norm
    inside = threading.Barrier(2, timeout=0.2)

    def enter():
        with in_written_out_form(), suppress(threading.BrokenBarrierError):
            inside.wait()  # the other one cannot come, being outside

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside.broken
    assert nn.functional.batch_norm is before
