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


def pretend_pass(overflows, scales_probes=True):
    """A loss that is its batch, and a pass that knows when loss, gradient and products overflow; the scales it saw."""
    loss = loss_scale.ScaledLoss(lambda model, batch: batch, scaler_of(2.0**10), scales_probes=scales_probes)
    scales = []

    def measure():
        of_loss = float(loss(None, torch.ones(())))
        scales.append((of_loss, loss.of_probe))
        bad = overflows(*scales[-1])
        value = of_loss * loss.of_probe**2
        products = [torch.full((2,), torch.inf if each else value) for each in bad.get("products", [False])]
        gradient = torch.full((2,), torch.inf if bad.get("gradient") else 1.0)
        return Found(torch.tensor(torch.nan if bad.get("loss") else 1.0), [gradient, None], [*products, None])

    def unscaled(**settings):
        found = loss.unscaled(measure, torch.device("cpu"), None, **settings)
        return [values[0].item() for values in found.diagonal if values is not None]

    return unscaled, scales


def test_the_scales_of_a_pass_back_off_and_grow_again(monkeypatch):
    monkeypatch.setattr(loss_scale, "_GROWTH_INTERVAL", 2)
    unscaled, scales = pretend_pass(lambda L, s: {"gradient": L >= 2.0**8, "products": [s >= 2.0**-2]})
    for _ in range(5):
        assert unscaled() == [1.0]
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
    unscaled, scales = pretend_pass(lambda L, s: {"gradient": L >= 2.0**8})
    for _ in range(3):
        assert unscaled() == [1.0]
    assert scales == [(2.0**10, 1.0), (2.0**6, 1.0), (2.0**6, 1.0), (2.0**7, 1.0)]


def test_probes_grow_no_smaller_than_float16_can_tell_and_those_of_differences_not_at_all():
    for scales_probes, of_probe in ((True, 2.0**-12), (False, 1.0)):
        unscaled, scales = pretend_pass(lambda L, s: {"products": [L >= 2.0**4]}, scales_probes)
        assert unscaled() == [1.0]
        assert scales[-1] == (2.0**2, of_probe)


def test_what_is_not_finite_at_any_scale_is_left_out_alone_and_costs_one_pass_from_then_on(said):
    is_bad = [True]
    unscaled, scales = pretend_pass(lambda L, s: {"products": [is_bad[0], s >= 2.0**-3]})
    assert unscaled() == [torch.inf, 1.0]
    assert len(scales) == 16
    assert said.messages == [
        "some second derivatives are finite in float16 at none of the scales that were tried: left out"
    ]
    assert unscaled() == [torch.inf, 1.0]
    assert scales[16:] == [(2.0**10, 2.0**-4)]
    is_bad[0] = False
    assert unscaled() == [1.0, 1.0]


def test_of_a_loss_that_is_not_finite_no_scale_is_to_blame():
    unscaled, scales = pretend_pass(lambda L, s: {"loss": True, "gradient": True, "products": [True]})
    assert unscaled() == [torch.inf]
    assert unscaled() == [torch.inf]
    assert scales == [(2.0**10, 1.0)] * 2


def test_a_pass_that_does_not_count_is_not_made_again():
    unscaled, scales = pretend_pass(lambda L, s: {"gradient": True, "products": [True]})
    unscaled(counts=False)
    assert len(scales) == 1


def test_one_parameter_without_curvature_in_float16_leaves_that_of_the_others():
    class Odd(nn.Module):
        """A parameter whose second derivative at 0 is infinite."""

        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
            self.odd = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return self.body(x).float().square().mean() + self.odd.abs().pow(1.5).sum()

    torch.manual_seed(0)
    model = Odd()
    batch = torch.randn(32, 6)
    found = {}
    for dtype in (torch.float32, torch.float16):
        optimizer = AdaHessian(model.parameters())
        caught = found[dtype] = {}
        optimizer.feed_curvature = lambda diagonal, gradients, to=caught: to.update(diagonal)

        def loss_fn(model, batch, dtype=dtype):
            with torch.autocast("cpu", torch.float16, enabled=dtype is torch.float16):
                return model(batch)

        Curvature(model, loss_fn, optimizer, scaler=scaler_of(2.0**16)).measure(batch)
    for param in model.body.parameters():
        exact = found[torch.float32][param]
        assert (found[torch.float16][param] - exact).norm() < 0.02 * exact.norm()
    assert not found[torch.float16][model.odd].isfinite().any()


@pytest.mark.parametrize("product", ["auto", "forward_over_reverse"])
def test_a_product_is_chosen_at_scales_at_which_nothing_overflows(quick_compiler, product):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.float16):
            return model(batch).float().square().mean()

    optimizer = AdaHessian(model.parameters())
    curvature = Curvature(model, loss_fn, optimizer, scaler=scaler_of(2.0**24), compile=True, product=product)
    for _ in range(2):
        curvature.measure(torch.randn(32, 6))
    assert curvature.engine.choice(None).is_compiled
