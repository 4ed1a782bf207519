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


def test_the_scale_of_the_pass_backs_off_and_grows_again(monkeypatch):
    monkeypatch.setattr(loss_scale, "_GROWTH_INTERVAL", 2)
    loss = loss_scale.ScaledLoss(lambda model, batch: batch, scaler_of(2.0**10))
    device, scales = torch.device("cpu"), []

    def measure():
        scales.append(float(loss(None, torch.ones(()))))
        return Found(torch.ones(()), [], [torch.full((2,), scales[-1] if scales[-1] < 2.0**8 else torch.inf)])

    for _ in range(3):
        (diagonal,) = loss.unscaled(measure, device, None).diagonal
        assert diagonal.tolist() == [1.0, 1.0]
    assert scales == [2.0**10, 2.0**6, 2.0**6, 2.0**7]


def test_what_is_not_a_number_at_any_scale_is_let_go():
    loss = loss_scale.ScaledLoss(lambda model, batch: batch, scaler_of(2.0**10))
    found = loss.unscaled(lambda: Found(torch.ones(()), [], [torch.full((2,), torch.nan)]), torch.device("cpu"), None)
    assert found.diagonal[0].isnan().all()
