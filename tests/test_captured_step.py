"""The whole step in one call: what a loop of one's own does, on a CPU, where nothing is captured."""

import copy

import pytest
import torch
from torch import nn

from adahessian import AdaHessian, CapturedStep, Curvature, CurvatureError, GaussNewton
from adahessian.curvature import engine
from cases import BATCH_NORM, MLP, Case

# Batch norm counts its batches, dropout draws.
BOTH = Case(
    "batch norm and dropout",
    lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 3)),
    (16, 5),
)


@pytest.fixture
def only_gradients_compiled(quick_compiler, monkeypatch):
    """The curvature pass runs as it is, to save time."""

    def as_it_is(loss, product, **_):
        return lambda *args: loss.derivatives(product, *args)

    monkeypatch.setattr(engine, "compile_derivatives", as_it_is)


@pytest.fixture
def broken_compiler(monkeypatch):
    """It starts, and then fails."""

    def fail(*_, **__):
        raise RuntimeError("out of registers\nand much more")

    monkeypatch.setattr(torch, "compile", lambda function, **_: fail)


def made(case, loss_fn=None, *, update_every=1, **settings):
    """A model, its optimizer and its curvature."""
    model = case.model()
    optimizer = AdaHessian(model.parameters(), lr=0.05, eps=1e-2, update_every=update_every, num_probes=2)
    return model, optimizer, Curvature(model, loss_fn or case.loss, optimizer, **settings)


def in_a_loop(curvature):
    """The same, written out."""

    def step(batch):
        curvature.measure(batch)
        curvature.optimizer.zero_grad()
        loss = curvature.loss_fn(curvature.model, batch)
        loss.backward()
        curvature.optimizer.step()
        return loss

    return step


def everything(model, optimizer):
    """All that a step may change."""
    counts = [[group[name] for name in ("steps", "measurements", "staleness")] for group in optimizer.param_groups]
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    modes = [int(module.training) for module in model.modules()]
    state = optimizer.state_dict()["state"]
    return copy.deepcopy((model.state_dict(), state, counts, gradients, modes, torch.get_rng_state()))


def assert_same(found, expected, **tolerance):
    torch.testing.assert_close(found, expected, **(tolerance or {"rtol": 0, "atol": 0}))


# It is the loop ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("capture", [True, False])
def test_it_does_what_the_loop_does_bit_by_bit(said, fraction, capture):
    """Parameters, buffers, state, gradients and losses, and the random numbers that follow."""
    found = []
    for make_step in (lambda curvature: CapturedStep(curvature, capture=capture), in_a_loop):
        model, optimizer, curvature = made(BOTH, update_every=2, batch_fraction=fraction)
        step = make_step(curvature)
        torch.manual_seed(3)
        losses = [step(BOTH.batch(seed=number)).item() for number in range(6)]
        found.append((losses, *everything(model, optimizer)))
    assert_same(*found)
    assert not any("compiling" in message for message in said.messages), "nobody asked for it"


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_forward_over_reverse_does_too(fraction):
    found = []
    for make_step, product in ((CapturedStep, "forward_over_reverse"), (in_a_loop, "double_backward")):
        model, optimizer, curvature = made(BOTH, update_every=2, batch_fraction=fraction, product=product)
        step = make_step(curvature)
        torch.manual_seed(3)
        losses = [step(BOTH.batch(seed=number)).item() for number in range(6)]
        found.append((losses, *everything(model, optimizer)))
    assert_same(*found, rtol=1e-9, atol=1e-9)


def test_schedules_partial_batches_evaluation_and_checkpoints_in_between():
    found = []
    for make_step in (CapturedStep, in_a_loop):
        model, optimizer, curvature = made(BATCH_NORM, update_every=3)
        step = make_step(curvature)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        x, y = BATCH_NORM.batch()
        for number in range(8):
            size = 5 if number % 4 == 3 else len(x)
            step((x[:size], y[:size]))
            scheduler.step()
            if number == 2:
                model.eval()
                model(x)
                model.train()
            if number == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        found.append(everything(model, optimizer))
    assert_same(*found)


def test_it_works_where_gradients_are_disabled():
    found = []
    for disabled in (False, True):
        model, optimizer, curvature = made(MLP, update_every=2)
        step = CapturedStep(curvature)
        with torch.set_grad_enabled(not disabled):
            step(MLP.batch())
            step(MLP.batch())
        found.append(everything(model, optimizer))
    assert_same(*found)


# What it returns and leaves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_it_returns_the_loss_and_leaves_the_gradients(fraction):
    model, _, curvature = made(MLP, update_every=2, batch_fraction=fraction)
    step = CapturedStep(curvature)
    for number in range(3):
        batch = MLP.batch(seed=number)
        expected = MLP.loss(model, batch)
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        loss = step(batch)
        assert_same(loss, expected.detach())
        # Replaced, not added to.
        assert_same([param.grad for param in model.parameters()], list(gradients))
        assert not loss.requires_grad
        assert all(not param.grad.requires_grad for param in model.parameters())


@pytest.mark.parametrize("product", ["double_backward", "forward_over_reverse"])
def test_a_parameter_that_takes_no_part_has_no_gradient_and_does_not_move(product):
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    optimizer = AdaHessian(model.parameters(), update_every=2, weight_decay=0.1)
    curvature = Curvature(model, lambda model, x: model["used"](x).square().mean(), optimizer, product=product)
    step = CapturedStep(curvature)
    before = copy.deepcopy(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for _ in range(2):
        step(torch.randn(8, 3))
        assert model["unused"].weight.grad is None
    assert_same(model["unused"].state_dict(), before["unused"].state_dict())
    assert not torch.equal(model["used"].weight, before["used"].weight)


# When it measures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "sizes"), [(1.0, [16] * 5), (0.5, [8, 16, 16, 16, 8, 16, 16])])
def test_it_measures_when_that_is_due_and_joins_gradient_and_curvature_on_the_whole_batch(fraction, sizes):
    seen = []

    def loss_fn(model, batch):
        seen.append(len(batch[0]))
        return MLP.loss(model, batch)

    model, optimizer, curvature = made(MLP, loss_fn, update_every=3, batch_fraction=fraction)
    step = CapturedStep(curvature)
    assert step.joins == (fraction == 1)
    ages = []
    for _ in range(5):
        step(MLP.batch())
        ages.append(optimizer.state[model[0].weight]["hessian_age"].item())
    assert seen == sizes
    assert ages == [1, 1, 1, 2, 2]


def test_what_has_been_measured_is_not_measured_again(monkeypatch):
    _, optimizer, curvature = made(MLP)
    assert curvature.measure(MLP.batch())
    fed = []
    monkeypatch.setattr(optimizer, "feed_curvature", fed.append)
    CapturedStep(curvature)(MLP.batch())
    assert not fed
    assert optimizer.param_groups[0]["measurements"] == 1


# Errors --------------------------------------------------------------------------------------------------------------


def test_what_is_no_curvature_is_named():
    model = MLP.model()
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(TypeError, match=r"takes the curvature pass, adahessian\.Curvature.* but got a AdaHessian"):
        CapturedStep(optimizer)
    gauss_newton = GaussNewton(model, lambda model, batch: model(batch[0]), optimizer)
    with pytest.raises(TypeError, match="but got a GaussNewton"):
        CapturedStep(gauss_newton)


def test_finite_differences_are_refused():
    _, _, curvature = made(MLP, product="finite_difference")
    with pytest.raises(ValueError, match=r"finite differences .* take another product, or call curvature\.measure"):
        CapturedStep(curvature)


@pytest.mark.parametrize(
    ("due", "settings"),
    [
        (True, {}),
        (True, {"product": "forward_over_reverse"}),
        (True, {"batch_fraction": 0.5}),
        (True, {"compile": True}),
        (False, {}),
        (False, {"compile": True}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("only_gradients_compiled")
def test_a_loss_that_fails_changes_nothing(due, settings):
    fails = []

    def loss_fn(model, batch):
        if fails:
            raise KeyError("the user's own")
        return MLP.loss(model, batch)

    model, optimizer, curvature = made(MLP, loss_fn, update_every=1 if due else 2, **settings)
    step = CapturedStep(curvature)
    step(MLP.batch())
    fails.append(True)
    before = everything(model, optimizer)
    with pytest.raises(KeyError, match="the user's own"):
        step(MLP.batch())
    assert_same(everything(model, optimizer), before)
    assert optimizer.curvature_due == due


def test_a_curvature_that_cannot_be_had_changes_no_parameter():
    model, optimizer, curvature = made(MLP, lambda model, batch: model(batch[0]))
    before = everything(model, optimizer)
    with pytest.raises(CurvatureError, match="must return a real scalar"):
        CapturedStep(curvature)(MLP.batch())
    assert_same(everything(model, optimizer), before)


# What it says --------------------------------------------------------------------------------------------------------


def test_that_nothing_is_captured_is_said_once_and_only_if_it_was_to_be(said):
    for capture, expected in ((False, []), (True, ["CUDA graphs need the model and all tensors of the batch"])):
        for _ in range(2):
            _, _, curvature = made(MLP)
            step = CapturedStep(curvature, capture=capture)
            step(MLP.batch())
            step(MLP.batch())
        messages = [message for message in said.messages if message.startswith("nothing is captured")]
        assert len(messages) == len(expected)
        assert all(part in message for part, message in zip(expected, messages, strict=True))


@pytest.mark.usefixtures("quick_compiler")
def test_the_gradient_is_compiled_once_and_that_leaves_no_trace(said):
    found = []
    for make_step, compile in ((CapturedStep, True), (in_a_loop, False)):
        model, optimizer, curvature = made(BATCH_NORM, compile=compile, update_every=2)
        step = make_step(curvature)
        for _ in range(4):
            step(BATCH_NORM.batch())
        found.append(everything(model, optimizer))
    assert_same(*found, rtol=1e-9, atol=1e-9)
    assert sum(message.startswith("compiling the gradient") for message in said.messages) == 1
    assert sum(message.startswith("compiling the curvature pass") for message in said.messages) == 1


@pytest.mark.usefixtures("broken_compiler")
def test_a_gradient_that_cannot_be_compiled_is_computed_without_and_the_reason_is_said(said):
    found = []
    for make_step, compile in ((CapturedStep, True), (in_a_loop, False)):
        model, optimizer, curvature = made(BOTH, compile=compile, update_every=2)
        step = make_step(curvature)
        torch.manual_seed(3)
        for _ in range(4):
            step(BOTH.batch())
        found.append(everything(model, optimizer))
    assert_same(*found)
    why = "RuntimeError: out of registers"
    assert said.messages.count(f"the gradient is not compiled: {why}") == 1
    assert (
        f"curvature by double backward, not compiled: forward over reverse: {why}; double backward: {why}"
        in said.messages
    )


@pytest.mark.usefixtures("only_gradients_compiled")
def test_another_kind_of_batch_is_not_compiled_for_until_it_has_come_often():
    compiled = []

    def loss_fn(model, batch):
        compiled.append((len(batch[0]), torch.compiler.is_compiling()))
        return MLP.loss(model, batch)

    _, _, curvature = made(MLP, loss_fn, compile=True, update_every=1000)
    step = CapturedStep(curvature)
    x, y = MLP.batch()
    step((x, y))
    step((x, y))
    compiled.clear()
    for _ in range(299):
        step((x[:5], y[:5]))
    assert compiled == [(5, False)] * 299
    compiled.clear()
    step((x[:5], y[:5]))
    assert (5, True) in compiled


def test_want_of_memory_is_no_reason_to_do_without_the_compiler(monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("no memory left")

    _, optimizer, curvature = made(MLP, update_every=2)
    CapturedStep(curvature)(MLP.batch())
    curvature.engine._compile = True
    monkeypatch.setattr(torch, "compile", lambda function, **_: out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        CapturedStep(curvature)(MLP.batch())
    assert optimizer.param_groups[0]["steps"] == 1


# What goes wrong -----------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its batches in place and, like averages of codebooks, by putting another tensor in the old one's place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x):
        self.in_place += 1
        self.replaced = self.replaced + 1
        return self.linear(x).tanh() * (1 + self.replaced)


@pytest.mark.parametrize("settings", [{}, {"product": "forward_over_reverse"}, {"compile": True}], ids=str)
def test_buffers_that_modules_replace_count_as_those_they_write_to(quick_compiler, settings):
    torch.manual_seed(0)
    model = Counting()
    optimizer = AdaHessian(model.parameters(), lr=0.01, eps=1e-2)
    curvature = Curvature(model, lambda model, x: model(x).square().mean(), optimizer, **settings)
    step = CapturedStep(curvature)
    for number in range(1, 4):
        step(torch.randn(16, 5))
        assert (model.in_place.item(), model.replaced.item()) == (number, number)


def test_a_pass_that_fails_takes_back_what_it_did_to_buffers():
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))

    def loss_fn(model, x):
        model(x)
        raise CurvatureError("no")

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CurvatureError):
        CapturedStep(Curvature(model, loss_fn, AdaHessian(model.parameters())))(torch.randn(16, 5))
    assert_same(model.state_dict(), before)


def test_whether_to_capture_is_yes_or_no():
    with pytest.raises(ValueError, match="'graphs'"):
        CapturedStep(made(MLP)[2], capture="graphs")


def test_where_nothing_is_compiled_no_shape_is_told_of(said):
    _, _, curvature = made(MLP)
    step = CapturedStep(curvature)
    x, y = MLP.batch()
    for size in (8, 7, 6):
        step((x[:size], y[:size]))
    assert not any("shape" in message for message in said.messages)
