"""The range test: what it suggests where the answer is known, and that it leaves no trace."""

import math
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from adahessian import AdaHessian, Curvature, DenseAndSparse, GaussNewton, param_groups, suggest_lr
from cases import BATCH_NORM, MLP


class Quadratic(nn.Module):
    """A bowl, every direction with a curvature of its own; a batch says where its centre seems to be."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.position = nn.Parameter(torch.full((20,), 3.0, dtype=torch.float64))
        self.register_buffer("curvatures", scale * torch.linspace(0.5, 2.0, 20, dtype=torch.float64))

    def loss(self, model, centre):
        return 0.5 * (self.curvatures * (self.position - centre).square()).sum()


def noisy_centres(number=100, noise=0.3):
    generator = torch.Generator().manual_seed(0)
    return list(noise * torch.randn(number, 20, generator=generator, dtype=torch.float64))


def newton(scale=1.0, **settings):
    """With an exact diagonal and no momentum: a step of lr 1 is Newton's, and beyond 2 it diverges."""
    model = Quadratic(scale)
    optimizer = AdaHessian(model.parameters(), betas=(0.0, 0.999), eps=0.0, **settings)
    return Curvature(model, model.loss, optimizer)


def in_training(curvature, batches):
    """A few steps, after which everything has a value that could be lost."""
    for batch in batches:
        curvature.measure(batch)
        curvature.optimizer.zero_grad()
        curvature.loss_fn(curvature.model, batch).backward()
        curvature.optimizer.step()


def everything(model, optimizer, sparse=False):
    """Whatever the range test must leave as it was, in values that compare bit by bit."""
    state = optimizer.state_dict()
    tensors = [*model.parameters(), *model.buffers()]
    return repr(
        (
            [tensor.detach().cpu().numpy().tobytes() for tensor in tensors],
            [] if sparse else [param.grad is not None and param.grad.numpy().tobytes() for param in model.parameters()],
            [module.training for module in model.modules()],
            {
                key: {name: value.numpy().tobytes() for name, value in of_param.items()}
                for key, of_param in state["state"].items()
            },
            state["param_groups"],
            torch.get_rng_state().numpy().tobytes(),
            random.getstate(),
            np.random.get_state(),
        )
    )


# What it suggests ----------------------------------------------------------------------------------------------------


def test_newton_diverges_beyond_two():
    found = suggest_lr(newton(), noisy_centres())
    # Some steps pass, each with an lr larger by a sixth, until the loss has risen from the bottom to above the start.
    assert 2 < found.diverged_at < 5
    assert 0.5 < found.largest_descending < 2
    assert found.steepest < found.nearly_down <= found.largest_descending
    assert 0.02 < found.suggestion < 1


def test_training_at_the_suggestion_converges_and_at_where_it_diverged_it_does_not():
    centres = noisy_centres()
    found = suggest_lr(newton(), centres)
    heights = {}
    for lr in (found.suggestion, found.diverged_at):
        curvature = newton(lr=lr)
        in_training(curvature, centres)
        heights[lr] = curvature.loss_fn(curvature.model, torch.zeros(20)).item()
    assert heights[found.suggestion] < 0.02 * found.losses[0]
    assert heights[found.diverged_at] > found.losses[0]


def test_the_scale_of_the_loss_moves_sgd_but_not_adahessian():
    centres = noisy_centres()
    of_newton = [suggest_lr(newton(scale), centres).suggestion for scale in (1.0, 64.0)]
    assert of_newton[0] == of_newton[1]
    of_sgd = []
    for scale in (1.0, 64.0):
        model = Quadratic(scale)
        optimizer = SGD(model.parameters(), lr=0.1)
        found = suggest_lr(optimizer, centres, model=model, loss_fn=model.loss, lowest=1e-4 / scale, highest=10 / scale)
        of_sgd.append(found.suggestion)
        # The steepest direction decides: with its curvature, 2 * scale, the limit is 1 / scale.
        assert 1 < found.diverged_at * scale < 3
    assert of_sgd[0] == pytest.approx(64 * of_sgd[1])


@pytest.mark.parametrize("make", [SGD, AdamW, AdaHessian])
def test_digits_are_learned_at_the_suggestion(make):
    from adahessian.lab.digits import training_and_test_examples

    examples, _ = training_and_test_examples()
    loader = DataLoader(TensorDataset(examples.images, examples.labels), batch_size=64, shuffle=True, drop_last=True)

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def train(lr):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        options = {"momentum": 0.9} if make is SGD else {}
        optimizer = make(model.parameters(), lr=lr or 0.1, **options)
        source = Curvature(model, loss_fn, optimizer) if make is AdaHessian else optimizer
        if lr is None:
            return suggest_lr(source, loader, model=model, loss_fn=loss_fn)
        for _ in range(2):
            for batch in loader:
                if make is AdaHessian:
                    source.measure(batch)
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
        return loss_fn(model, (examples.images, examples.labels)).item()

    found = train(None)
    good = train(found.suggestion)
    assert good < 0.5
    # A tenth of it, or ten times it, is worse: it is the suggestion that is good, not everything.
    assert train(found.suggestion / 10) > 1.5 * good
    assert not train(10 * found.suggestion) < 1.5 * good


def test_with_and_without_a_curvature_pass_the_curve_is_the_same():
    batches = [MLP.batch()]
    curves = []
    for source_is_curvature in (True, False):
        model = MLP.model()
        optimizer = AdaHessian(model.parameters())
        source = Curvature(model, MLP.loss, optimizer, product="double_backward") if source_is_curvature else optimizer
        curves.append(suggest_lr(source, batches, model=model, loss_fn=MLP.loss, highest=1.0).losses)
    assert curves[0] == pytest.approx(curves[1])


def test_gauss_newton_needs_the_loss():
    model = MLP.model()
    curvature = GaussNewton(model, lambda m, batch: m(batch[0]), AdaHessian(model.parameters()))
    batches = [MLP.batch()]
    with pytest.raises(TypeError, match="GaussNewton does not know all that is needed: give suggest_lr loss_fn="):
        suggest_lr(curvature, batches)
    assert suggest_lr(curvature, batches, loss_fn=MLP.loss).suggestion > 0


def test_groups_keep_their_ratios_and_schedules_may_have_begun_at_zero():
    model = MLP.model()
    first, second = model.parameters().__next__(), list(model.parameters())[1:]
    optimizer = SGD([{"params": [first], "lr": 0.02}, {"params": second, "lr": 0.1}])
    LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    tried = []
    optimizer.register_step_pre_hook(lambda opt, *_: tried.append([group["lr"] for group in opt.param_groups]))
    found = suggest_lr(optimizer, [MLP.batch()], model=model, loss_fn=MLP.loss)
    assert [largest for _, largest in tried] == pytest.approx(list(found.lrs[: len(tried)]))
    assert all(small == pytest.approx(large / 5) for small, large in tried)


# That it leaves no trace ---------------------------------------------------------------------------------------------


class Interrupts:
    """A loss that stops in the middle, or never."""

    def __init__(self, error, after):
        self.error, self.calls = error, after

    def __call__(self, model, batch):
        self.calls -= 1
        if self.calls == 0:
            raise self.error
        random.random(), np.random.rand()
        model.eval() if self.calls % 2 else model.train()
        return BATCH_NORM.loss(model.train(), batch) * (1 + 0 * torch.rand(()))


@pytest.mark.parametrize("error", [None, RuntimeError("no"), KeyboardInterrupt()], ids=str)
@pytest.mark.parametrize("started", [False, True])
def test_everything_is_put_back(started, error):
    model = BATCH_NORM.model(torch.float32)
    batches = [BATCH_NORM.batch(torch.float32)] * 5
    optimizer = AdaHessian(param_groups(model), lr=0.07, update_every=3, weight_decay=0.1)
    LambdaLR(optimizer, lambda step: 1 / (step + 1))
    loss_fn = Interrupts(error, after=-1 if error is None else 60)
    curvature = Curvature(model, loss_fn, optimizer)
    if started:
        in_training(Curvature(model, BATCH_NORM.loss, optimizer), batches)
        model[0].eval()
        # A measurement that no step has used, and one that is on its way out.
        optimizer.param_groups[0]["staleness"] = 3
        curvature.measure(batches[0])
    pending, state, grads = optimizer._measurement, optimizer.state, [param.grad for param in model.parameters()]
    attributes = set(vars(optimizer))
    before, seconds = everything(model, optimizer), curvature.seconds
    if error is None:
        suggest_lr(curvature, batches)
    else:
        with pytest.raises(type(error)):
            suggest_lr(curvature, batches)
    assert everything(model, optimizer) == before
    assert optimizer._measurement is pending
    assert curvature.seconds == seconds
    assert optimizer.state is state
    assert set(vars(optimizer)) == attributes
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.1, momentum=0.9), AdamW, lambda p: AdamW(p, torch.tensor(0.01))])
def test_other_optimizers_are_put_back_too(make):
    model = BATCH_NORM.model(torch.float32)
    optimizer = make(model.parameters())
    BATCH_NORM.loss(model, BATCH_NORM.batch(torch.float32)).backward()
    optimizer.step()
    before = everything(model, optimizer)
    suggest_lr(optimizer, [BATCH_NORM.batch(torch.float32)], model=model, loss_fn=BATCH_NORM.loss)
    assert everything(model, optimizer) == before


def test_training_goes_on_as_if_nothing_had_been():
    ends = []
    for with_test in (False, True):
        torch.manual_seed(3)
        model = MLP.model(torch.float32)
        curvature = Curvature(model, MLP.loss, AdaHessian(model.parameters(), update_every=2))
        batches = [MLP.batch(torch.float32)] * 6
        in_training(curvature, batches[:3])
        if with_test:
            suggest_lr(curvature, batches)
        in_training(curvature, batches[3:])
        ends.append(everything(model, curvature.optimizer))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "make", [lambda model: AdaHessian(model.parameters(), eps=1e-13), lambda model: SGD(model.parameters(), 0.1)]
)
def test_in_float16_a_scaler_keeps_derivatives_from_vanishing_and_is_put_back(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    batches = list(torch.randn(5, 32, 6))  # a step that changes nothing shows in the next round

    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.float16):
            return 1e-9 * model(batch).float().square().mean()

    def suggestion(scaler):
        optimizer = make(model)
        if isinstance(optimizer, AdaHessian):
            curvature = Curvature(model, loss_fn, optimizer, scaler=scaler)
            return suggest_lr(curvature, batches, highest=1e3)
        return suggest_lr(optimizer, batches, model=model, loss_fn=loss_fn, scaler=scaler, highest=1e9)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=100)
    found = suggestion(scaler)
    assert min(found.smoothed) < 0.5 * found.losses[0]
    if isinstance(make(model), AdaHessian):  # SGD's first steps are too small to be seen
        assert len(set(found.losses[:10])) == 10, "no step was skipped"
    assert (scaler.get_scale(), scaler._get_growth_tracker(), dict(scaler._per_optimizer_states)) == (2.0**60, 0, {})
    with pytest.raises(RuntimeError, match="by more than chance"):
        suggestion(None)


@pytest.mark.parametrize("pending", ["scaled", "unscaled"])
def test_a_step_that_a_scaler_has_begun_is_its_own(pending):
    """The test knows nothing of it, and the step goes on where it was."""

    model = MLP.model(torch.float32)
    optimizer, scaler, batch = SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu"), MLP.batch(torch.float32)
    scaler.scale(MLP.loss(model, batch)).backward()
    states, scale = scaler._per_optimizer_states, scaler._scale
    if pending == "unscaled":
        scaler.unscale_(optimizer)
    before = [param.grad.clone() for param in model.parameters()]
    found = suggest_lr(optimizer, [batch], model=model, loss_fn=MLP.loss, scaler=scaler)
    fresh = SGD(model.parameters(), 0.1)
    assert found.losses == suggest_lr(fresh, [batch], model=model, loss_fn=MLP.loss).losses
    assert scaler._per_optimizer_states is states
    assert scaler._scale is scale
    torch.testing.assert_close([param.grad for param in model.parameters()], before, rtol=0, atol=0)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_loader_goes_on_with_the_same_order(own_generator):
    model = MLP.model()
    x, y = MLP.batch()
    generator = torch.Generator().manual_seed(5) if own_generator else None
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, generator=generator)
    torch.manual_seed(1)
    if own_generator:
        generator.manual_seed(1)
    expected = [labels.tolist() for _, labels in loader]
    torch.manual_seed(1)
    if own_generator:
        generator.manual_seed(1)
    suggest_lr(SGD(model.parameters(), 0.1), loader, model=model, loss_fn=MLP.loss)
    assert [labels.tolist() for _, labels in loader] == expected


def test_an_optimizer_made_of_two_is_put_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 1))
    words = torch.randint(10, (16, 3))
    curvature = Curvature(model, lambda m, batch: (m(batch) - 1).square().mean(), DenseAndSparse(model))
    in_training(curvature, [words] * 2)
    before = everything(model, curvature.optimizer, sparse=True)
    assert suggest_lr(curvature, [words]).suggestion > 0
    assert everything(model, curvature.optimizer, sparse=True) == before
    assert curvature.optimizer.dense.state is curvature.optimizer.state


def test_a_measurement_that_goes_on_over_micro_batches_is_put_back():
    ends = []
    for with_test in (False, True):
        model = MLP.model(torch.float32)
        optimizer = AdaHessian(model.parameters())
        curvature = Curvature(model, MLP.loss, optimizer, accumulate=True)
        first, second = (MLP.batch(torch.float32, seed=seed) for seed in (1, 2))
        curvature.measure(first)
        if with_test:
            suggest_lr(curvature, [first])
        curvature.measure(second)
        MLP.loss(model, first).backward()
        optimizer.step()
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


def test_what_the_optimizer_holds_besides_the_model_is_put_back():
    model = MLP.model()
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = SGD([*model.parameters(), temperature], 0.1)

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]) * temperature, batch[1])

    suggest_lr(optimizer, [MLP.batch()], model=model, loss_fn=loss_fn)
    assert temperature.item() == 1
    assert temperature.grad is None


# What it refuses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lowest": 0.0}, r"Invalid range: 0\.0 to 10\.0"),
        ({"lowest": 1.0, "highest": 0.1}, r"Invalid range: 1\.0 to 0\.1"),
        ({"highest": math.inf}, "Invalid range"),
        ({"lowest": math.nan}, "Invalid range"),
        ({"lowest": True}, "Invalid range"),
        ({"steps": 19}, "Invalid steps: 19"),
        ({"steps": 80.0}, "Invalid steps"),
    ],
)
def test_ranges_that_are_none(arguments, message):
    with pytest.raises(ValueError, match=message):
        suggest_lr(newton(), noisy_centres(), **arguments)


def test_batches_that_are_too_few():
    with pytest.raises(ValueError, match="there are no batches"):
        suggest_lr(newton(), [])
    with pytest.raises(ValueError, match="ran out after 30 of 80 steps and cannot be started again"):
        suggest_lr(newton(), iter(noisy_centres(30)))
    assert suggest_lr(newton(), iter(noisy_centres(80))).suggestion > 0
    assert suggest_lr(newton(), noisy_centres(30)).suggestion > 0


@pytest.mark.parametrize("source", [None, nn.Linear(2, 2), "AdaHessian"])
def test_what_does_not_train(source):
    with pytest.raises(TypeError, match="takes a curvature pass"):
        suggest_lr(source, noisy_centres())


def test_an_optimizer_alone_does_not_know_its_model():
    optimizer = SGD(MLP.model().parameters(), 0.1)
    with pytest.raises(TypeError, match="model= and loss_fn="):
        suggest_lr(optimizer, [MLP.batch()])


def test_a_loss_that_is_not_a_number():
    model = Quadratic()
    with pytest.raises(TypeError, match="tensor of one element"):
        suggest_lr(SGD(model.parameters(), 0.1), noisy_centres(), model=model, loss_fn=lambda m, b: 1.0)


def test_several_processes(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    optimizer = SGD(MLP.model().parameters(), 0.1)
    with pytest.raises(RuntimeError, match="runs in one process"):
        suggest_lr(optimizer, [MLP.batch()], model=MLP.model(), loss_fn=MLP.loss)


def test_a_loss_that_is_nan_from_the_start():
    curvature = newton()
    with pytest.raises(ValueError, match="nan before the first step, so no learning rate is to blame"):
        suggest_lr(curvature, [torch.full((20,), math.nan)])
    assert torch.equal(curvature.model.position, torch.full((20,), 3.0))


def test_a_range_that_is_too_high():
    with pytest.raises(RuntimeError, match="Further on it rose: try a lower lowest"):
        suggest_lr(newton(), noisy_centres(), lowest=5.0, highest=50.0)


def test_a_range_that_is_too_low_for_the_noise():
    with pytest.raises(RuntimeError, match="Try a higher highest"):
        suggest_lr(newton(), noisy_centres(), lowest=1e-9, highest=1e-7)


def test_noise_alone_is_no_descent():
    """A loss that no step changes, whatever the noise of its batches: nothing may be read into it."""
    model = nn.Linear(1, 1)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        levels = list(torch.randn(80, generator=generator))
        with pytest.raises(RuntimeError, match="more than chance"):
            suggest_lr(SGD(model.parameters(), 0.1), levels, model=model, loss_fn=lambda m, b: b + 0 * m.weight.sum())


# What it tells -------------------------------------------------------------------------------------------------------


def test_why_says_what_the_suggestion_rests_on():
    found = suggest_lr(newton(), noisy_centres())
    for number in (found.suggestion, found.nearly_down, found.steepest, found.largest_descending, found.diverged_at):
        assert f"{number:.2g}" in found.why
    assert "a larger highest would tell more" in suggest_lr(newton(), noisy_centres(), highest=0.3).why


def test_the_plot(tmp_path, monkeypatch):
    found = suggest_lr(newton(), noisy_centres())
    found.plot(tmp_path / "lr.png")
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "adahessian\[lab\]"'):
        found.plot(tmp_path / "none.png")
