"""float16 with a GradScaler: the curvature does not depend on the scale, and skipped steps leave it alone."""

import copy

import pytest
import torch
from torch import nn

from adahessian import AdaHessian, CapturedStep, Curvature
from adahessian.curvature import loss_scale
from adahessian.curvature.ways import Found
from cases import MLP

SETTINGS = {"lr": 0.05, "eps": 1e-2}


def scaler_of(scale, **settings):
    return torch.amp.GradScaler("cpu", init_scale=scale, **settings)


def train(way, scale, *, clip=False, steps=4):
    """A loop with a scaler, in one of two ways; the parameters after it."""
    model, scaler = MLP.model(), scaler_of(scale or 1.0, enabled=scale is not None)
    optimizer = AdaHessian(model.parameters(), **SETTINGS, update_every=2)
    curvature = Curvature(model, MLP.loss, optimizer, scaler=scaler)
    for number in range(steps):
        batch = MLP.batch(seed=number)
        optimizer.zero_grad()
        if way == "object":
            curvature.measure(batch)
        loss = scaler.scale(MLP.loss(model, batch))
        loss.backward(create_graph=way == "graph" and optimizer.curvature_due)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("way", ["object", "graph"])
@pytest.mark.parametrize("scale", [2.0**8, 2.0**16])
def test_the_curvature_does_not_depend_on_the_scale(way, scale, clip):
    """A power of two changes no digit."""
    assert torch.equal(train(way, scale, clip=clip), train(way, None, clip=clip))


def small_loss(model, batch):
    """So small that its derivatives vanish in float16."""
    with torch.autocast("cpu", torch.float16):
        output = model(batch)
    return 1e-6 * output.float().square().mean()


def exact_loss(model, batch):
    return 1e-6 * model(batch).square().mean()


def measured(loss_fn, scaler=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = AdaHessian(model.parameters())
    caught = []
    optimizer.feed_curvature = lambda diagonal, gradients: caught.extend(diagonal.values())
    Curvature(model, loss_fn, optimizer, scaler=scaler).measure(torch.randn(32, 6))
    return torch.cat([each.flatten() for each in caught])


def test_small_derivatives_survive_float16_by_the_scale_alone():
    exact = measured(exact_loss)
    for scale in (2.0**8, 2.0**16):
        found = measured(small_loss, scaler_of(scale))
        assert (found - exact).norm() < 0.01 * exact.norm(), scale
    lost = measured(small_loss)
    assert (lost - exact).norm() > 0.2 * exact.norm()


@pytest.mark.parametrize("way", ["object", "graph"])
def test_a_skipped_step_skips_the_update_of_the_curvature_too(way):
    model, scaler = MLP.model(), scaler_of(2.0**8)
    optimizer = AdaHessian(model.parameters(), **SETTINGS)
    curvature = Curvature(model, MLP.loss, optimizer, scaler=scaler)
    states = []
    for number in range(3):
        batch = MLP.batch(seed=number)
        optimizer.zero_grad()
        if way == "object":
            curvature.measure(batch)
        loss = MLP.loss(model, batch) * (torch.inf if number == 1 else 1.0)
        scaler.scale(loss).backward(create_graph=way == "graph" and optimizer.curvature_due)
        scaler.step(optimizer)
        scaler.update()
        states.append(copy.deepcopy((optimizer.state_dict()["state"], model.state_dict())))
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    assert optimizer.param_groups[0]["measurements"] == 2
    assert optimizer.dropped_measurements == 0


def test_a_scaler_that_is_none_is_refused():
    model = MLP.model()
    with pytest.raises(TypeError, match=r"torch\.amp\.GradScaler"):
        Curvature(model, MLP.loss, AdaHessian(model.parameters()), scaler=1024.0)


def test_a_captured_step_does_not_scale():
    model = MLP.model()
    curvature = Curvature(model, MLP.loss, AdaHessian(model.parameters()), scaler=scaler_of(2.0))
    with pytest.raises(ValueError, match="GradScaler"):
        CapturedStep(curvature)


def test_second_derivatives_that_overflow_are_measured_again_with_a_smaller_scale():
    """Of a scale at which gradients are finite."""
    exact = measured(exact_loss)
    for scale in (2.0**30, 2.0**40):
        found = measured(small_loss, scaler_of(scale))
        assert (found - exact).norm() < 0.01 * exact.norm(), scale


def test_activations_that_overflow_along_a_probe_are_measured_again_with_a_smaller_one():
    """They do so whatever the loss is multiplied by."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    large = 3e4 * torch.randn(32, 6).clamp(-2, 2)
    with torch.no_grad():
        model[0].weight /= 3e4
    found = {}
    for dtype in (torch.float32, torch.float16):
        optimizer = AdaHessian(model.parameters())
        caught = []
        optimizer.feed_curvature = lambda diagonal, gradients, to=caught: to.extend(diagonal.values())

        def loss_fn(model, batch, dtype=dtype):
            with torch.autocast("cpu", torch.float16, enabled=dtype is torch.float16):
                return model(batch).float().square().mean()

        Curvature(model, loss_fn, optimizer, scaler=scaler_of(1.0)).measure(large)
        found[dtype] = torch.cat([each.flatten() for each in caught])
    exact = found[torch.float32]
    assert (found[torch.float16] - exact).norm() < 0.01 * exact.norm()


def pretend_pass(overflows):
    """A loss that is its batch, and a pass that knows when a gradient and a product overflow; the scales it saw."""
    loss = loss_scale.ScaledLoss(lambda model, batch: batch, scaler_of(2.0**10))
    scales = []

    def measure(of_probe):
        of_loss = float(loss(None, torch.ones(())))
        scales.append((of_loss, of_probe))
        of_gradient, of_product = overflows(*scales[-1])
        gradient = torch.full((2,), torch.inf if of_gradient else 1.0)
        product = torch.full((2,), torch.inf if of_product else of_loss * of_probe**2)
        return Found(torch.ones(()), [gradient, None], [product, None])

    return (lambda: loss.unscaled(measure, torch.device("cpu"), None).diagonal[0].tolist()), scales


def test_the_scales_of_a_pass_back_off_and_grow_again(monkeypatch):
    monkeypatch.setattr(loss_scale, "_GROWTH_INTERVAL", 2)
    measure, scales = pretend_pass(lambda of_loss, of_probe: (of_loss >= 2.0**8, of_probe >= 2.0**-2))
    for _ in range(5):
        assert measure() == [1.0, 1.0]
    assert scales == [
        (2.0**10, 1.0),
        (2.0**6, 1.0),  # the gradient is finite now
        (2.0**6, 2.0**-4),
        (2.0**6, 2.0**-4),
        (2.0**6, 2.0**-3),  # probes grow first
        (2.0**6, 2.0**-3),
        (2.0**6, 2.0**-2),
        (2.0**6, 2.0**-6),
    ]
    measure, scales = pretend_pass(lambda of_loss, of_probe: (of_loss >= 2.0**8, False))
    for _ in range(3):
        assert measure() == [1.0, 1.0]
    assert scales == [(2.0**10, 1.0), (2.0**6, 1.0), (2.0**6, 1.0), (2.0**7, 1.0)]


@pytest.mark.parametrize("of_gradient", [True, False])
def test_what_is_not_finite_at_any_scale_is_let_go_and_costs_no_range(of_gradient):
    is_bad = [True]
    measure, scales = pretend_pass(lambda *_: (of_gradient and is_bad[0], is_bad[0]))
    assert measure() == [torch.inf, torch.inf]
    is_bad[0] = False
    assert measure() == [1.0, 1.0]
    assert scales[-1] == scales[0]
