"""The whole step in one call does what a loop does: uncaptured on a CPU, and by graphs that only pretend to be some."""

import copy
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from adahessian import AdaHessian, AdaHessianKron, Curvature, CurvatureError, TrainingStep, training_step
from adahessian.algorithm import plan
from adahessian.cuda_graphs import CannotCapture
from adahessian.hessian import compiled
from adahessian.hessian.double_backward import Derivatives
from adahessian.hessian.isolation import buffers_restored, random_state_kept
from cases import BATCH_NORM, MLP, Case, flat_parameters

# Batch norm counts its batches, and dropout draws.
BOTH = Case(
    "batch norm and dropout",
    lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 3)),
    (16, 5),
)
PLAIN_OPTIMIZERS = [
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: torch.optim.AdamW(params, lr=0.01),
]


class PretendedGraph:
    """A CapturedFunction without CUDA: a replay runs the function, and spoils what all other graphs have left."""

    captured: list["PretendedGraph"]

    def __init__(self, function, model, memory=None, rehearse=True):
        self._function, self._result, self.rehearse = function, None, rehearse
        if rehearse:
            with buffers_restored(model), random_state_kept(model):
                before = torch.get_rng_state()
                self._result = function()
                self.is_random = not torch.equal(before, torch.get_rng_state())
        self.captured.append(self)

    def replay(self):
        if not self.rehearse:  # it reads what an earlier graph has left, and leaves nothing
            self._function()
            return None
        for graph in self.captured:
            for tensor in graph.tensors(graph._result):
                tensor.fill_(torch.nan)
        for static, tensor in zip(self.tensors(self._result), self.tensors(self._function()), strict=True):
            static.copy_(tensor)
        return self._result

    @staticmethod
    def tensors(result):
        # Probes are drawn into memory that graphs do not share.
        of_graph = result._replace(probes=[]) if isinstance(result, Derivatives) else result
        return [leaf for leaf in tree_leaves(of_graph) if isinstance(leaf, torch.Tensor)]


class PretendedMemory:
    def side_by_side(self, functions):
        for function in reversed(functions):  # their order does not matter
            function()


@pytest.fixture
def graphs(monkeypatch):
    """Everything is captured, as on a GPU; the graphs so far."""
    PretendedGraph.captured = []
    monkeypatch.setattr(training_step, "CapturedFunction", PretendedGraph)
    monkeypatch.setattr(training_step, "Memory", PretendedMemory)
    monkeypatch.setattr(training_step, "cuda_device_of", lambda model: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return PretendedGraph.captured


@pytest.fixture
def only_gradients_compiled(quick_compiler, monkeypatch):
    """The curvature pass runs as it is, to save time."""
    monkeypatch.setattr(compiled, "compile_derivatives", lambda function, *_, **__: function)


def made(case, loss_fn=None, *, curvature_every=1, **options):
    """A model, its optimizer and its curvature."""
    model = case.model()
    optimizer = AdaHessian(model.parameters(), lr=0.05, eps=1e-2, curvature_every=curvature_every, num_probes=2)
    return model, optimizer, Curvature(model, loss_fn or case.loss, optimizer, **options)


def in_a_loop(curvature):
    return plain_loop(curvature.model, curvature.loss_fn, curvature.optimizer, curvature.measure)


def plain_loop(model, loss_fn, optimizer, measure=lambda batch: None):
    def step(batch):
        measure(batch)
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def everything(model, optimizer):
    """All that a step may change."""
    counts = [[group.get(name) for name in ("steps", "measurements", "staleness")] for group in optimizer.param_groups]
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    modes = [int(module.training) for module in model.modules()]
    state = optimizer.state_dict()["state"]
    return copy.deepcopy((model.state_dict(), state, counts, gradients, modes, torch.get_rng_state()))


def assert_same(found, expected, **tolerance):
    torch.testing.assert_close(found, expected, **(tolerance or {"rtol": 0, "atol": 0}))


# It is the loop ------------------------------------------------------------------------------------------------------


def run(make_step, *, steps=6, case=BOTH, **options):
    model, optimizer, curvature = made(case, curvature_every=2, **options)
    step = make_step(curvature)
    torch.manual_seed(3)
    losses = [step(case.batch(seed=number)).item() for number in range(steps)]
    return losses, *everything(model, optimizer)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("capture", [True, False])
def test_it_does_what_the_loop_does_bit_by_bit(said, fraction, capture):
    """Parameters, buffers, state, gradients and losses, and the random numbers that follow."""
    found = run(lambda curvature: TrainingStep(curvature, capture=capture), batch_fraction=fraction)
    assert_same(found, run(in_a_loop, batch_fraction=fraction))
    assert not any("Compiling" in message or "shape" in message for message in said.messages), "nobody asked for it"


@pytest.mark.parametrize("kind", [AdaHessian, AdaHessianKron])
def test_autocast_around_it_is_as_autocast_around_the_loop(kind):
    ends = []
    for make_step in (in_a_loop, TrainingStep):
        model = MLP.model(torch.float32)
        optimizer = kind(model.parameters(), lr=0.01, curvature_every=2)
        step = make_step(Curvature(model, MLP.loss, optimizer, batch_fraction=1))
        with torch.autocast("cpu", torch.bfloat16):
            losses = [step(MLP.batch(torch.float32, seed=number)).item() for number in range(4)]
        ends.append((losses, *everything(model, optimizer)))
        assert flat_parameters(model).isfinite().all()
    assert_same(*ends)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_graphs_do_what_the_loop_does_bit_by_bit(graphs, fraction):
    assert_same(run(TrainingStep, batch_fraction=fraction), run(in_a_loop, batch_fraction=fraction))
    assert len(graphs) == 2, "one for the gradient, one for the curvature"


def strided(batch):
    """Choose examples by a copy. A captured graph would read the copy of an earlier batch."""
    return tuple(part[torch.arange(0, len(part), 4)] for part in batch)


@pytest.mark.parametrize("captured", [True, False])
def test_a_function_chooses_a_part_of_each_batch_anew(request, said, captured):
    graphs = request.getfixturevalue("graphs") if captured else []
    assert_same(run(TrainingStep, batch_fraction=strided), run(in_a_loop, batch_fraction=strided))
    assert len(graphs) == captured, "for the gradient"
    assert sum("batch_fraction" in message for message in said.messages) == captured


@pytest.mark.parametrize("make", PLAIN_OPTIMIZERS)
@pytest.mark.parametrize("captured", [True, False])
def test_plain_optimizers_do_what_the_loop_does_bit_by_bit(request, make, captured):
    graphs = request.getfixturevalue("graphs") if captured else []
    found = []
    for make_step in (TrainingStep, plain_loop):
        model = BOTH.model()
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # wraps optimizer.step
        step = make_step(model, BOTH.loss, optimizer)
        torch.manual_seed(3)
        losses = []
        for number in range(5):
            losses.append(step(BOTH.batch(seed=number)).item())
            scheduler.step()
        found.append((losses, *everything(model, optimizer)))
    assert_same(*found)
    assert len(graphs) == captured


@pytest.mark.parametrize("captured", [True, False])
def test_schedules_partial_batches_evaluation_and_checkpoints_in_between(request, captured):
    graphs = request.getfixturevalue("graphs") if captured else []
    found = []
    for make_step in (TrainingStep, in_a_loop):
        model, optimizer, curvature = made(BATCH_NORM, curvature_every=3)
        step = make_step(curvature)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        x, y = BATCH_NORM.batch()
        for number in range(14):
            size = 5 if number % 4 == 3 else len(x)
            step((x[:size], y[:size]))
            scheduler.step()
            if number == 2:
                model.eval()
                model(x)
                model.train()
            if number == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if number == 6:  # other addresses
                for param in model.parameters():
                    param.data = param.data.clone()
            if number == 8:  # another mode
                model[1].eval()
            if number == 9:
                model[0].weight.requires_grad_(False)
                model[0].weight.grad = None
            if number == 10:
                optimizer.param_groups[0]["num_probes"] = 1
            if number == 12:
                model[2] = nn.Sigmoid()
        found.append(everything(model, optimizer))
    assert_same(*found)
    assert len(graphs) == (7 if captured else 0)


def test_it_works_where_gradients_are_disabled():
    found = []
    for disabled in (False, True):
        model, optimizer, curvature = made(MLP, curvature_every=2)
        step = TrainingStep(curvature)
        with torch.set_grad_enabled(not disabled):
            step(MLP.batch())
            step(MLP.batch())
        found.append(everything(model, optimizer))
    assert_same(*found)


# What it returns and leaves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_it_returns_the_loss_and_leaves_the_gradients(fraction):
    model, _, curvature = made(MLP, curvature_every=2, batch_fraction=fraction)
    step = TrainingStep(curvature)
    for number in range(3):
        batch = MLP.batch(seed=number)
        expected = MLP.loss(model, batch)
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        loss = step(batch)
        assert_same(loss, expected.detach())
        assert_same([param.grad for param in model.parameters()], list(gradients))  # replaced, not accumulated
        assert not loss.requires_grad
        assert all(not param.grad.requires_grad for param in model.parameters())


def test_gradients_share_no_memory_and_have_the_strides_of_their_parameters():
    model = nn.ParameterList([torch.randn(4, 3), torch.randn(4, 3), torch.randn(3, 4).t()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainingStep(model, lambda model, x: (model[0] + model[1] + model[2] * x).square().sum(), optimizer)
    step(torch.ones(4, 3))
    assert len({param.grad.data_ptr() for param in model}) == 3
    assert all(param.grad.stride() == param.stride() for param in model)
    assert_same(model[0].grad, model[1].grad)


def test_a_parameter_that_takes_no_part_has_no_gradient_and_does_not_move():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    optimizer = AdaHessian(model.parameters(), curvature_every=2, weight_decay=0.1)
    step = TrainingStep(Curvature(model, lambda model, x: model["used"](x).square().mean(), optimizer))
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
def test_it_measures_when_due_and_joins_gradient_and_curvature_on_the_whole_batch(fraction, sizes):
    seen = []

    def loss_fn(model, batch):
        seen.append(len(batch[0]))
        return MLP.loss(model, batch)

    model, optimizer, curvature = made(MLP, loss_fn, curvature_every=3, batch_fraction=fraction)
    step = TrainingStep(curvature)
    measurements = []
    for _ in range(5):
        step(MLP.batch())
        measurements.append(optimizer.state[model[0].weight]["measurements"].item())
    assert seen == sizes
    assert measurements == [1, 1, 1, 2, 2]


def test_what_has_been_measured_is_not_measured_again(monkeypatch):
    _, optimizer, curvature = made(MLP)
    assert curvature.measure(MLP.batch())
    accepted = []
    monkeypatch.setattr(optimizer, "_accept", lambda *args: accepted.append(args))
    TrainingStep(curvature)(MLP.batch())
    assert not accepted
    assert optimizer.param_groups[0]["measurements"] == 1


# Errors --------------------------------------------------------------------------------------------------------------


def test_what_it_is_made_of():
    model, optimizer, curvature = made(MLP)
    adamw = torch.optim.AdamW(model.parameters())
    for arguments, name in [
        ((optimizer,), "Curvature"),
        ((model, MLP.loss, optimizer), "Curvature"),
        ((model, MLP.loss, SimpleNamespace(optimizer=optimizer)), "optimizer"),
        ((model, adamw), "loss_fn"),
        ((curvature, MLP.loss), "loss_fn"),
    ]:
        with pytest.raises(TypeError, match=name):
            TrainingStep(*arguments)
    with pytest.raises(TypeError, match="compile"):
        TrainingStep(curvature, compile=True)
    with pytest.raises(ValueError, match="compile"):
        TrainingStep(model, MLP.loss, adamw, compile="max")
    with pytest.raises(ValueError, match="capture"):
        TrainingStep(curvature, capture="graphs")
    with pytest.raises(ValueError, match="closure"):
        TrainingStep(model, MLP.loss, torch.optim.LBFGS(model.parameters()))


def test_loops_that_it_cannot_take():
    model, _, curvature = made(MLP, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="scaler"):
        TrainingStep(curvature)
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = AdaHessian([{"params": model.parameters(), "sparse": True}])
    with pytest.raises(ValueError, match="sparse"):
        TrainingStep(Curvature(model, MLP.loss, optimizer))


@pytest.mark.parametrize("due", [True, False])
@pytest.mark.parametrize("options", [{}, {"batch_fraction": 0.5}, {"compile": True}], ids=str)
@pytest.mark.usefixtures("only_gradients_compiled")
def test_a_loss_that_fails_changes_nothing(due, options):
    fails = []

    def loss_fn(model, batch):
        if fails:
            raise KeyError("the user's own")
        return MLP.loss(model, batch)

    model, optimizer, curvature = made(MLP, loss_fn, curvature_every=1 if due else 2, **options)
    step = TrainingStep(curvature)
    step(MLP.batch())
    fails.append(True)
    before = everything(model, optimizer)
    with pytest.raises(KeyError, match="the user's own"):
        step(MLP.batch())
    assert_same(everything(model, optimizer), before)
    assert optimizer.curvature_due == due


def test_a_curvature_that_cannot_be_computed_changes_no_parameter():
    model, optimizer, curvature = made(MLP, lambda model, batch: model(batch[0]))
    before = everything(model, optimizer)
    with pytest.raises(CurvatureError, match="scalar"):
        TrainingStep(curvature)(MLP.batch())
    assert_same(everything(model, optimizer), before)


def test_a_pass_that_fails_restores_buffers():
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))

    def loss_fn(model, x):
        model(x)
        raise CurvatureError("no")

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CurvatureError):
        TrainingStep(Curvature(model, loss_fn, AdaHessian(model.parameters())))(torch.randn(16, 5))
    assert_same(model.state_dict(), before)


class Counting(nn.Module):
    """Counts its batches in place and, like averages of codebooks, by a new tensor in place of the old one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x):
        self.in_place += 1
        self.replaced = self.replaced + 1
        return self.linear(x).tanh() * (1 + self.replaced)


@pytest.mark.parametrize("options", [{}, {"compile": True}], ids=str)
def test_buffers_that_modules_replace_count_as_those_they_write_to(quick_compiler, options):
    model = Counting()
    optimizer = AdaHessian(model.parameters(), lr=0.01, eps=1e-2)
    step = TrainingStep(Curvature(model, lambda model, x: model(x).square().mean(), optimizer, **options))
    for number in range(1, 4):
        step(torch.randn(16, 5))
        assert (model.in_place.item(), model.replaced.item()) == (number, number)


# What is captured and compiled, and what is said about it ------------------------------------------------------------


def test_what_cannot_be_captured_runs_uncaptured_and_the_reason_is_logged_once(graphs, said, monkeypatch):
    class Failing(PretendedGraph):
        def __init__(self, function, model, memory=None, rehearse=True):
            super().__init__(function, model, memory, rehearse)
            if function().loss if isinstance(self._result, Derivatives) else None:
                raise CannotCapture("it waits")

    monkeypatch.setattr(training_step, "CapturedFunction", Failing)
    options = {"batch_fraction": 0.5, "case": BATCH_NORM}
    assert_same(run(TrainingStep, **options), run(in_a_loop, **options))
    assert sum("it waits" in message for message in said.messages) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_the_update_of_kronecker_factors_is_captured_and_follows_a_schedule(
    graphs, only_gradients_compiled, said, monkeypatch, fails
):
    class Graph(PretendedGraph):
        def __init__(self, function, model, memory=None, rehearse=True):
            if fails and not rehearse:
                raise CannotCapture("it waits")
            super().__init__(function, model, memory, rehearse)

    def trained(make_step):
        torch.manual_seed(0)
        model = MLP.model(torch.float32)
        optimizer = AdaHessianKron(model.parameters(), lr=0.01, curvature_every=2, curvature_warmup=0)
        step = make_step(Curvature(model, MLP.loss, optimizer, compile=True, batch_fraction=0.5))
        for number in range(6):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
            step(MLP.batch(torch.float32, seed=number))
        return [param.detach() for param in model.parameters()]

    monkeypatch.setattr(training_step, "CapturedFunction", Graph)
    torch.testing.assert_close(trained(TrainingStep), trained(in_a_loop), rtol=1e-4, atol=1e-5)
    assert sum(not graph.rehearse for graph in graphs) == (0 if fails else 2)  # the roots and the step
    assert any("The update is not captured: it waits" in message for message in said.messages) == fails


class SharedMemory(PretendedGraph):
    """A replay overwrites the results of graphs that were captured later in the same memory."""

    def __init__(self, function, model, memory=None, rehearse=True):
        self.memory = memory
        super().__init__(function, model, memory, rehearse)

    def replay(self):
        result = super().replay()
        for later in self.captured[self.captured.index(self) + 1 :] if not self.rehearse else ():
            for tensor in self.tensors(later._result) if later.memory is self.memory else ():
                tensor.fill_(torch.nan)
        return result


def kron_trained(make_step, change, *, steps=10, **options):
    torch.manual_seed(0)
    model = MLP.model(torch.float32)
    optimizer = AdaHessianKron(model.parameters(), lr=0.01, curvature_every=2, curvature_warmup=0)
    step = make_step(Curvature(model, MLP.loss, optimizer, compile=False, **options))
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + number)
        batch = MLP.batch(torch.float32, seed=number)
        step(change(optimizer, batch) if number >= steps // 2 else batch)
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_captured_updates_keep_the_results_of_graphs_captured_after_them(graphs, monkeypatch, fraction):
    monkeypatch.setattr(training_step, "CapturedFunction", SharedMemory)

    def shorten(optimizer, batch):
        return tuple(part[:12] for part in batch)

    ways = [kron_trained(way, shorten, steps=120, batch_fraction=fraction) for way in (TrainingStep, in_a_loop)]
    torch.testing.assert_close(*ways, rtol=1e-4, atol=1e-5)


def load_own_state(optimizer, batch):
    optimizer.load_state_dict(optimizer.state_dict())
    return batch


def add_frozen_group(optimizer, batch):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3), requires_grad=False)]})
    return batch


def make_lr_a_tensor(optimizer, batch):
    optimizer.param_groups[0]["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
    return batch


@pytest.mark.parametrize("change", [load_own_state, add_frozen_group, make_lr_a_tensor])
def test_captured_updates_read_current_numbers_after_their_bucket_was_rebuilt(graphs, change):
    ways = [kron_trained(way, change, batch_fraction=0.5) for way in (TrainingStep, in_a_loop)]
    torch.testing.assert_close(*ways, rtol=1e-4, atol=1e-5)


def test_large_updates_run_one_after_another(graphs, monkeypatch):
    monkeypatch.setattr(plan, "_SMALL", 0)
    together = []
    monkeypatch.setattr(PretendedMemory, "side_by_side", lambda self, updates: together.append(len(updates)))
    kron_trained(TrainingStep, lambda optimizer, batch: batch)
    assert set(together) == {1}


def test_the_oldest_captured_updates_make_room(graphs, monkeypatch):
    monkeypatch.setattr(training_step, "_MOST_UPDATES", 2)
    ways = [kron_trained(way, add_frozen_group, batch_fraction=0.5) for way in (TrainingStep, in_a_loop)]
    torch.testing.assert_close(*ways, rtol=1e-4, atol=1e-5)


def test_batches_on_another_device_are_not_captured(graphs, monkeypatch):
    _, _, curvature = made(MLP)
    step = TrainingStep(curvature)
    step(MLP.batch())
    monkeypatch.setattr(step, "_device", torch.device("meta"))
    with pytest.raises(CannotCapture, match="cpu"):
        training_step._Graphs(step, None, MLP.batch(), [])


def test_that_nothing_is_captured_is_logged_once_and_only_if_it_was_to_be(said):
    for capture in (False, True):
        for _ in range(2):
            step = TrainingStep(made(MLP)[2], capture=capture)
            step(MLP.batch())
            step(MLP.batch())
        assert sum(message.startswith("Nothing is captured") for message in said.messages) == capture


@pytest.mark.usefixtures("quick_compiler")
def test_the_gradient_is_compiled_once_and_that_leaves_no_trace(said):
    found = [
        run(make_step, case=BATCH_NORM, compile=compile)
        for make_step, compile in ((TrainingStep, True), (in_a_loop, False))
    ]
    assert_same(*found, rtol=1e-9, atol=1e-9)
    assert sum(message.startswith("Compiling the gradient") for message in said.messages) == 1


def test_a_gradient_that_cannot_be_compiled_is_computed_without_and_the_reason_is_logged(said, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of registers\nand much more")

    monkeypatch.setattr(torch, "compile", lambda function, **_: fail)
    assert_same(run(TrainingStep, compile=True), run(in_a_loop, compile=False))
    of_gradient = [message for message in said.messages if message.startswith("The gradient is not compiled")]
    assert len(of_gradient) == 1
    assert of_gradient[0].endswith("out of registers")


@pytest.mark.usefixtures("only_gradients_compiled")
@pytest.mark.parametrize("plain", [True, False])
def test_another_kind_of_batch_is_not_compiled_for_until_it_has_come_often(plain):
    compiled = []

    def loss_fn(model, batch):
        compiled.append((len(batch[0]), torch.compiler.is_compiling()))
        return MLP.loss(model, batch)

    model, _, curvature = made(MLP, loss_fn, compile=True, curvature_every=1000)
    adamw = torch.optim.AdamW(model.parameters())
    step = TrainingStep(model, loss_fn, adamw, compile=True) if plain else TrainingStep(curvature)
    x, y = MLP.batch()
    step((x, y))
    step((x, y))
    compiled.clear()
    for _ in range(49):
        step((x[:5], y[:5]))
    assert compiled == [(5, False)] * 49
    compiled.clear()
    step((x[:5], y[:5]))
    assert (5, True) in compiled


def test_running_out_of_memory_is_no_reason_to_do_without_the_compiler(monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("no memory left")

    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monkeypatch.setattr(torch, "compile", lambda function, **_: out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        TrainingStep(model, MLP.loss, optimizer, compile=True)(MLP.batch())
    assert not optimizer.state


class Scarce:
    """A loss that runs out of memory once when told."""

    is_short, held = False, None

    def __call__(self, model, batch):
        loss = MLP.loss(model, batch)
        if self.is_short:
            self.is_short, self.held = False, weakref.ref(loss)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss


def scarce(make, **options):
    """A curvature that is due at every second step, with its loss."""
    model, loss_fn = MLP.model(), Scarce()
    optimizer = make(model.parameters(), lr=0.01, curvature_every=2, curvature_warmup=0)
    return Curvature(model, loss_fn, optimizer, **options), loss_fn


def curvature_of(optimizer):
    others = ("step", "exp_avg", "grad_square")
    return [{key: value.clone() for key, value in s.items() if key not in others} for s in optimizer.state.values()]


@pytest.mark.parametrize("make", [AdaHessian, AdaHessianKron])
@pytest.mark.parametrize("fraction", [1.0, 0.25, strided])
@pytest.mark.parametrize("way", ["loop", "step", "graphs"])
def test_a_pass_that_runs_out_of_memory_keeps_the_last_curvature(request, said, way, fraction, make):
    curvature, loss_fn = scarce(make, batch_fraction=fraction)
    model, optimizer = curvature.model, curvature.optimizer
    if way == "graphs":
        request.getfixturevalue("graphs")
    step = in_a_loop(curvature) if way == "loop" else TrainingStep(curvature)
    for number in range(8):
        loss_fn.is_short = number in (2, 6)
        before, theta = copy.deepcopy(curvature_of(optimizer)), flat_parameters(model)
        assert optimizer.curvature_due == (number % 2 == 0)
        assert step(MLP.batch(seed=number)).isfinite()
        if number in (1, 2, 3, 5, 6, 7):
            assert_same(curvature_of(optimizer), before)
        assert loss_fn.held is None or loss_fn.held() is None
        assert (flat_parameters(model) != theta).all()
    assert {int(state["measurements"]) for state in optimizer.state.values()} == {2}
    advice = "function batch_fraction" if fraction is strided else f"batch_fraction={fraction / 2:g} "
    assert sum(advice in message for message in said.messages) == 1


def test_a_micro_batch_that_runs_out_of_memory_drops_the_measurement():
    curvature, loss_fn = scarce(AdaHessianKron)
    optimizer, step = curvature.optimizer, in_a_loop(curvature)
    for _ in range(2):
        step(MLP.batch())
    before = curvature_of(optimizer)
    assert curvature.measure(MLP.batch())
    loss_fn.is_short = True
    assert curvature.measure(MLP.batch())
    step(MLP.batch())
    assert_same(curvature_of(optimizer), before)


@pytest.mark.parametrize("why", ["nothing measured", "ranks"])
def test_a_pass_that_runs_out_of_memory_raises_without_a_curvature_or_with_ranks(why):
    curvature, loss_fn = scarce(AdaHessian)
    step = TrainingStep(curvature)
    if why == "ranks":
        step(MLP.batch())
        step(MLP.batch())
        curvature.ranks = object()
    loss_fn.is_short = True
    with pytest.raises(torch.OutOfMemoryError, match=r"batch_fraction=0\.5 .*CUDA out of memory"):
        step(MLP.batch())


def test_a_parameter_that_was_frozen_stands_still():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainingStep(model, lambda model, x: model(x).square().mean(), optimizer, capture=False)
    step(torch.ones(4, 3))
    model.bias.requires_grad_(False)
    before = model.bias.detach().clone()
    step(torch.ones(4, 3))
    assert torch.equal(model.bias, before)
