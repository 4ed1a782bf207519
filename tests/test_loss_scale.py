"""float16 with a GradScaler: the curvature does not depend on the scale, and skipped steps do not change it."""

import copy

import pytest
import torch
from torch import nn

from adahessian import AdaHessian, Curvature, TrainingStep, diagnose, loss_scale
from adahessian.hessian.double_backward import Derivatives
from adahessian.loss_scale import LossScale
from cases import MLP

OPTIONS = {"lr": 0.05, "eps": 1e-2}


def scaler_of(scale, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def train(way, scale, *, clip=False, steps=4):
    """A loop with a scaler, and the curvature from an object or from the graph; the parameters after it."""
    model, scaler = MLP.model(), scaler_of(scale or 1.0, enabled=scale is not None)
    optimizer = AdaHessian(model.parameters(), **OPTIONS, curvature_every=2)
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


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def small_loss(model, batch):
    """So small that its derivatives vanish in float16."""
    with torch.autocast("cpu", torch.float16):
        output = model(batch)
    return 1e-6 * output.float().square().mean()


def exact_loss(model, batch):
    return 1e-6 * model(batch).square().mean()


def measured(model, loss_fn, scaler=None, **options):
    """The curvature that a step has used, by parameter."""
    optimizer = AdaHessian(model.parameters(), lr=0.0)
    curvature = Curvature(model, loss_fn, optimizer, scaler=scaler, **options)
    curvature.measure(torch.randn(32, 6, generator=torch.Generator().manual_seed(0)))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return {param: optimizer.state[param]["hessian_rms"] for param in model.parameters()}, curvature


def error_of(loss_fn, scaler=None):
    found, exact = (
        torch.cat([each.flatten() for each in measured(network(), *how)[0].values()])
        for how in ((loss_fn, scaler), (exact_loss,))
    )
    return ((found - exact).norm() / exact.norm()).item()


def test_small_derivatives_survive_float16_by_the_scale_alone():
    for scale in (2.0**8, 2.0**16):
        assert error_of(small_loss, scaler_of(scale)) < 0.01
    assert error_of(small_loss) > 0.2


def test_second_derivatives_that_overflow_are_measured_again_with_a_smaller_scale():
    """At these scales gradients are finite."""
    for scale in (2.0**30, 2.0**36):
        assert error_of(small_loss, scaler_of(scale)) < 0.01


@pytest.mark.parametrize("way", ["object", "graph"])
def test_a_skipped_step_skips_the_update_of_the_curvature_too(way):
    model, scaler = MLP.model(), scaler_of(2.0**8)
    optimizer = AdaHessian(model.parameters(), **OPTIONS)
    curvature = Curvature(model, MLP.loss, optimizer, scaler=scaler)
    states = []
    for number in range(3):
        batch = MLP.batch(seed=number)
        optimizer.zero_grad()
        if way == "object":
            assert curvature.measure(batch)  # goes on with the mean of a step that was skipped
        loss = MLP.loss(model, batch) * (torch.inf if number == 1 else 1.0)
        scaler.scale(loss).backward(create_graph=way == "graph" and optimizer.curvature_due)
        scaler.step(optimizer)
        scaler.update()
        states.append(copy.deepcopy((optimizer.state_dict()["state"], model.state_dict())))
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    assert optimizer.param_groups[0]["measurements"] == 2
    assert diagnose(optimizer)["dropped_measurements"] == 0


def test_a_scaler_that_is_not_one_is_rejected():
    model = MLP.model()
    with pytest.raises(TypeError, match="scaler"):
        Curvature(model, MLP.loss, AdaHessian(model.parameters()), scaler=1024.0)


def test_a_training_step_does_not_scale():
    model = MLP.model()
    curvature = Curvature(model, MLP.loss, AdaHessian(model.parameters()), scaler=scaler_of(2.0))
    with pytest.raises(ValueError, match="scaler"):
        TrainingStep(curvature)


def pretend_pass(overflows):
    """A loss that is its batch, and a pass whose loss, gradient and products overflow as told; the scales it saw."""
    loss = LossScale(lambda model, batch: batch, scaler_of(2.0**10))
    scales = []

    def measure():
        scale = float(loss(None, torch.ones(())))
        scales.append(scale)
        bad = overflows(scale)
        products = [torch.full((2,), torch.inf if each else scale) for each in bad.get("products", [False])]
        gradient = torch.full((2,), torch.inf if bad.get("gradient") else 1.0)
        value = torch.tensor(torch.nan if bad.get("loss") else scale)
        return Derivatives(value, [gradient, None], [[gradient, gradient]], [[*products, None]])

    def unscaled(**options):
        found = loss.unscaled(measure, [], None, **options)
        assert bool(found.loss == 1.0) is not bool(found.loss.isnan())
        return [values[0].item() for values in found.products[0] if values is not None]

    return unscaled, scales


def test_the_scale_backs_off_and_grows_again(monkeypatch):
    monkeypatch.setattr(loss_scale, "_GROWTH_INTERVAL", 2)
    unscaled, scales = pretend_pass(lambda scale: {"gradient": scale >= 2.0**8, "products": [scale >= 2.0**5]})
    for _ in range(5):
        assert unscaled() == [1.0]
    assert scales == [2.0**10, 2.0**6, 2.0**2, 2.0**2, 2.0**3, 2.0**3, 2.0**4]


def test_products_that_overflow_at_every_scale_are_left_out_alone_and_cost_one_pass_from_then_on(said):
    is_bad = [True]
    unscaled, scales = pretend_pass(lambda scale: {"products": [is_bad[0], scale >= 2.0**5]})
    assert unscaled() == [torch.inf, 1.0]
    assert scales == [2.0**10, 2.0**6, 2.0**2, 2.0**-2, 2.0**-6]
    assert len(said.messages) == 1
    assert unscaled() == [torch.inf, 1.0]
    assert scales[5:] == [2.0**2]
    is_bad[0] = False
    assert unscaled() == [1.0, 1.0]
    is_bad[0] = True
    unscaled()
    assert len(scales) == 12


def test_no_scale_is_to_blame_for_a_loss_that_is_not_finite():
    unscaled, scales = pretend_pass(lambda scale: {"loss": True, "gradient": True, "products": [True]})
    assert unscaled() == [torch.inf]
    assert unscaled() == [torch.inf]
    assert scales == [2.0**10] * 2


def test_a_pass_that_does_not_count_is_not_repeated():
    unscaled, scales = pretend_pass(lambda scale: {"gradient": True, "products": [True]})
    unscaled(counts=False)
    assert len(scales) == 1


def test_a_scaler_that_is_disabled_leaves_the_loss_alone():
    assert error_of(small_loss, scaler_of(2.0**16, enabled=False)) == error_of(small_loss) > 0.2


class Odd(nn.Module):
    """A parameter whose second derivative at 0 is infinite."""

    def __init__(self):
        super().__init__()
        self.body = network()
        self.odd = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.body(x).float().square().mean() + self.odd.abs().pow(1.5).sum()


def test_one_parameter_that_is_infinite_at_every_scale_does_not_spoil_the_others():
    def half_loss(model, batch):
        with torch.autocast("cpu", torch.float16):
            return model(batch)

    model = Odd()
    exact, _ = measured(model, lambda model, batch: model(batch))
    found, _ = measured(model, half_loss, scaler_of(2.0**16))
    for param in model.body.parameters():
        assert (found[param] - exact[param]).norm() < 0.02 * exact[param].norm()
    assert found[model.odd].isinf().all()


def test_the_pass_is_compiled_although_the_first_scale_overflows(quick_compiler):
    def half_loss(model, batch):
        with torch.autocast("cpu", torch.float16):
            return model(batch).float().square().mean()

    _, curvature = measured(network(), half_loss, scaler_of(2.0**24), compile=True)
    assert curvature.engine.description.startswith("compiled")
