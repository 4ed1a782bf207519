"""The curvature pass: it measures when it is due, on the right part of the batch, and leaves no trace."""

import copy
import gc
import pickle
import random
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from adahessian import AdaHessian, Curvature, CurvatureError, diagnose
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


def curvature_of(model, optimizer):
    """What a step has stored of the first measurement."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return [optimizer.state[param]["hessian_rms"].clone() for param in model.parameters()]


def snapshot(model):
    return (
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        {name: id(buffer) for module in model.modules() for name, buffer in module._buffers.items()},
        {name: buffer._version for name, buffer in model.named_buffers()},
        [int(module.training) for module in model.modules()],
        [param.grad.clone() for param in model.parameters() if param.grad is not None],
        flat_parameters(model),
        torch.get_rng_state(),
        list(random.getstate()[1]),
        [*np.random.get_state()[1].tolist(), np.random.get_state()[2]],
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
    optimizer = AdaHessian(model.parameters(), curvature_every=3)
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        return MLP.loss(model, batch)

    curvature = Curvature(model, loss_fn, optimizer)
    for measured in (True, False, False, True, False):
        assert curvature.measure(batch) is measured
        assert not optimizer.curvature_due
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
    found = []
    for fraction, batch in ((0.25, (x, y)), (1.0, (x[:4], y[:4]))):
        optimizer = AdaHessian(model.parameters(), lr=0.0)
        Curvature(model, MLP.loss, optimizer, batch_fraction=fraction).measure(batch)
        found.append(curvature_of(model, optimizer))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def strided(batch):
    """Every fourth example, which no slice is, and none that a graph could read twice."""
    return tuple(part[torch.arange(0, len(part), 4)] for part in batch)


def test_batch_fraction_may_be_a_function_that_chooses_the_part():
    model, batch = MLP.model(), MLP.batch()
    found = []
    for fraction, whole in ((strided, batch), (1.0, strided(batch))):
        optimizer = AdaHessian(model.parameters(), lr=0.0)
        assert Curvature(model, MLP.loss, optimizer, batch_fraction=fraction).measure(whole)
        found.append(curvature_of(model, optimizer))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_function_that_chooses_at_random_leaves_no_trace():
    model, batch = MLP.model(), MLP.batch()
    before = snapshot(model)

    def some(batch):
        chosen = torch.randperm(len(batch[0]))[: random.randint(1, 4)]
        return tuple(part[chosen] for part in batch)

    assert Curvature(model, MLP.loss, AdaHessian(model.parameters()), batch_fraction=some).measure(batch)
    assert_same(before, snapshot(model))


def test_a_function_that_chooses_nothing_changes_nothing():
    model = MLP.model()
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(ValueError, match="batch_fraction"):
        Curvature(model, MLP.loss, optimizer, batch_fraction=lambda batch: 0.25).measure(MLP.batch())
    assert optimizer.curvature_due


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


def test_a_batch_may_be_a_dataclass():
    model, (x, y) = MLP.model(), MLP.batch()
    found = []
    for loss_fn, batch in ((lambda model, pair: MLP.loss(model, (pair.x, pair.y)), Pair(x, y)), (MLP.loss, (x, y))):
        optimizer = AdaHessian(model.parameters(), lr=0.0)
        assert Curvature(model, loss_fn, optimizer, batch_fraction=0.5).measure(batch)
        found.append(curvature_of(model, optimizer))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_fraction": 0},
        {"batch_fraction": 1.5},
        {"batch_fraction": "all"},
        {"batch_dim": -1},
        {"batch_dim": 0.5},
        {"compile": "yes"},
        {"product_dtype": torch.float16},
    ],
    ids=str,
)
def test_wrong_arguments(arguments):
    model = MLP.model()
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Curvature(model, MLP.loss, AdaHessian(model.parameters()), **arguments)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, x: model(x),
        lambda model, x: 3.0,
        lambda model, x: (model(x).mean(), x),
        lambda model, x: model(x).mean() * 1j,
        lambda model, x: model(x).mean().detach(),
        lambda model, x: torch.ones((), requires_grad=True) * 2,
    ],
    ids=["vector", "number", "tuple", "complex", "detached", "of another model"],
)
def test_wrong_losses(loss_fn):
    model, (x, _) = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(CurvatureError, match="loss_fn"):
        Curvature(model, loss_fn, optimizer).measure(x)
    assert optimizer.curvature_due


def test_a_loss_of_one_element_is_a_scalar():
    model, (x, _) = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters())
    assert Curvature(model, lambda model, x: model(x).square().mean().view(1), optimizer).measure(x)


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


def test_operations_without_a_second_derivative_are_named():
    model, (x, _) = MLP.model(torch.float32), MLP.batch(torch.float32)
    before = flat_parameters(model)
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(CurvatureError, match="Once"):
        Curvature(model, lambda model, x: Once.apply(model(x)).sum(), optimizer).measure(x)

    Once.apply(model(x)).square().sum().backward(create_graph=True)
    with pytest.raises(CurvatureError, match="backward"):
        optimizer.step()

    optimizer.zero_grad()
    attention_loss(model, x).backward(create_graph=True)
    with pytest.raises(CurvatureError, match=r"scaled_dot_product.*SDPBackend.MATH"):
        optimizer.step()
    assert torch.equal(flat_parameters(model), before)
    assert all(not group["steps"] for group in optimizer.param_groups)


def test_an_error_of_another_kind_is_left_alone():
    model, batch = MLP.model(), MLP.batch()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        Curvature(model, MLP.loss, AdaHessian(model.parameters())).measure((batch[0][:, :2], batch[1]))
    assert not isinstance(caught.value, CurvatureError)


def test_running_out_of_memory_is_not_taken_for_a_missing_derivative(monkeypatch):
    param = nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([param])
    param.square().sum().backward(create_graph=True)

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(torch.autograd, "grad", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        optimizer.step()


def test_batch_dim_reaches_the_slice():
    weight = nn.Linear(4, 1)
    sizes = []

    def loss_fn(model, x):
        sizes.append(tuple(x.shape))
        return model(x).square().mean()

    optimizer = AdaHessian(weight.parameters())
    Curvature(weight, loss_fn, optimizer, batch_fraction=0.5, batch_dim=1).measure(torch.randn(3, 10, 4))
    assert sizes == [(3, 5, 4)]


def test_numpys_random_state_is_restored():
    model = nn.Linear(4, 1)
    model.register_buffer("nothing", None)

    def loss_fn(model, x):
        return (np.random.rand() + model(x)).square().mean()

    np.random.seed(0)
    expected = np.random.rand()
    np.random.seed(0)
    Curvature(model, loss_fn, AdaHessian(model.parameters())).measure(torch.randn(8, 4))
    assert np.random.rand() == expected
    assert model.nothing is None


def test_gradients_are_safe_from_a_loss_that_calls_backward_or_zero_grad():
    model = nn.Linear(4, 2)
    x = torch.randn(8, 4)
    loss_of(model, x).backward()
    before = [(param.grad, param.grad.clone()) for param in model.parameters()]

    def meddling_loss(model, batch):
        loss_of(model, batch).backward()
        model.zero_grad()
        return loss_of(model, batch)

    assert Curvature(model, meddling_loss, AdaHessian(model.parameters())).measure(x)
    for param, (grad, value) in zip(model.parameters(), before, strict=True):
        assert param.grad is grad
        assert torch.equal(grad, value)


def test_a_loss_that_frees_its_own_graph_is_explained():
    model, (x, _) = MLP.model(), MLP.batch()

    def loss_fn(model, x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with pytest.raises(CurvatureError, match="loss_fn"):
        Curvature(model, loss_fn, AdaHessian(model.parameters())).measure(x)


@pytest.mark.parametrize("way", ["object", "graph"])
def test_hooks_on_parameters_see_gradients_only(way):
    param = nn.Parameter(torch.ones(2))
    seen = []
    param.register_hook(lambda gradient: seen.append(gradient) or gradient)
    model = nn.ParameterList([param])
    optimizer = AdaHessian(model.parameters())
    if way == "object":
        Curvature(model, lambda model, _: model[0].square().sum(), optimizer).measure(None)
        assert not seen
    param.square().sum().backward(create_graph=optimizer.curvature_due)
    optimizer.step()
    assert len(seen) == 1
    assert optimizer.state[param]["hessian_rms"].eq(2).all()
    param.square().sum().backward()
    assert len(seen) == 2, "the hook is back in its place"


class Positions(nn.Module):
    """Grows a table when a longer sequence comes, and remembers its length beside it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("table", None)
        self.length = 0

    def forward(self, x):
        if len(x) > self.length:
            self.length = len(x)
            self.table = torch.arange(float(len(x)))
        return (self.scale * (x + self.table[: len(x)])).square().mean()


def test_a_table_that_grew_in_the_pass_stays():
    model = Positions()
    curvature = Curvature(model, lambda model, x: model(x), AdaHessian(model.parameters()))
    assert curvature.measure(torch.ones(5))
    model(torch.ones(5))
    curvature.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert curvature.measure(torch.ones(9))
    model(torch.ones(9))


def test_reentrant_checkpointing_is_rejected_and_the_other_kind_works():
    body, head = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.Sequential(body, head)
    x = torch.randn(8, 4, requires_grad=True)

    def loss_with(reentrant):
        hidden = torch.utils.checkpoint.checkpoint(lambda x: body(x).tanh(), x, use_reentrant=reentrant)
        return head(hidden).square().mean()

    optimizer = AdaHessian(model.parameters())
    with pytest.raises(CurvatureError, match="use_reentrant=False"):
        Curvature(model, lambda *_: loss_with(True), optimizer).measure(x)
    loss_with(True).backward(create_graph=True)
    with pytest.raises(CurvatureError, match="use_reentrant=False"):
        optimizer.step()
    optimizer.zero_grad()

    found = []
    for loss_fn in (lambda *_: loss_with(False), lambda model, x: head(body(x).tanh()).square().mean()):
        optimizer = AdaHessian(model.parameters(), lr=0.0)
        Curvature(model, loss_fn, optimizer).measure(x)
        found.append(curvature_of(model, optimizer))
    torch.testing.assert_close(*found)


def test_weight_norm_is_rejected():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(CurvatureError, match="weight_norm"):
        Curvature(model, loss_of, optimizer).measure(torch.randn(8, 4))


def test_arguments_in_the_wrong_place_are_named():
    model = MLP.model()
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(TypeError, match=r"model, loss_fn, optimizer.*method, Sequential, AdaHessian"):
        Curvature(MLP.loss, model, optimizer)
    with pytest.raises(TypeError, match="AdamW"):
        Curvature(model, MLP.loss, torch.optim.AdamW(model.parameters()))


def test_cudnn_is_off_for_recurrent_models_only():
    for model, expected in ((nn.LSTM(4, 3), False), (nn.Linear(4, 3), True)):
        seen = []

        def loss_fn(model, x, seen=seen):
            seen.append(torch.backends.cudnn.enabled)
            output = model(x)
            return (output[0] if isinstance(output, tuple) else output).square().mean()

        assert Curvature(model, loss_fn, AdaHessian(model.parameters())).measure(torch.randn(5, 2, 4))
        assert set(seen) == {expected}
        assert torch.backends.cudnn.enabled


class Compilable(nn.Module):
    """torch.compile leaves the modules of torch itself alone, unless something of the user's calls them."""

    def __init__(self):
        super().__init__()
        self.layers = MLP.model()

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_are_measured_by_their_original_code(in_place):
    batch = MLP.batch()
    compiled = Compilable()
    if in_place:
        compiled.compile(backend="aot_eager")
    else:
        compiled = torch.compile(compiled, backend="aot_eager")
    found = []
    for model in (compiled, Compilable()):
        optimizer = AdaHessian(model.parameters(), lr=0.0)
        MLP.loss(model, batch).backward()  # compiles
        assert Curvature(model, MLP.loss, optimizer).measure(batch)
        found.append(curvature_of(model, optimizer))
    torch.testing.assert_close(*found)


class Wrapper:
    """A trainer's wrapper of an optimizer, which can only step."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


def test_the_optimizer_inside_of_a_wrapper_gets_the_curvature():
    model = MLP.model()
    optimizer = AdaHessian(model.parameters())
    curvature = Curvature(model, MLP.loss, Wrapper(Wrapper(optimizer)))
    assert curvature.optimizer is optimizer
    assert curvature.measure(MLP.batch())
    assert not optimizer.curvature_due


@pytest.mark.parametrize("function", [nn.CrossEntropyLoss(), nn.functional.mse_loss, lambda x: 0], ids=range(3))
def test_a_loss_that_does_not_take_a_model_and_a_batch_is_rejected_at_once(function):
    model = MLP.model()
    with pytest.raises(TypeError, match=r"loss_fn.*model, batch"):
        Curvature(model, function, AdaHessian(model.parameters()))


# Until the step -------------------------------------------------------------------------------------------------------


def mlp_loss(model, batch):
    """MLP.loss cannot be pickled."""
    return MLP.loss(model, batch)


def take_step(model, optimizer, batch):
    optimizer.zero_grad()
    MLP.loss(model, batch).backward()
    optimizer.step()


def train(curvature, numbers, micro_batches=1):
    for number in numbers:
        batch = MLP.batch(seed=number)
        for part in zip(*(tensor.chunk(micro_batches) for tensor in batch), strict=True):
            curvature.measure(part)
        take_step(curvature.model, curvature.optimizer, batch)
    return flat_parameters(curvature.model)


def new(batch_fraction=None):
    model = MLP.model()
    optimizer = AdaHessian(model.parameters(), lr=0.05, curvature_every=2)
    return Curvature(model, mlp_loss, optimizer, batch_fraction=batch_fraction)


def through_pickle(curvature):
    return pickle.loads(pickle.dumps(curvature))


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("fraction", [None, strided])
def test_a_copy_trains_on_to_the_same_bits(copied, is_measured, fraction):
    curvature = new(fraction)
    train(curvature, range(4), micro_batches=2)
    if is_measured:  # the copy has to measure again
        curvature.measure(MLP.batch(seed=9))
    twin = copied(curvature)
    assert twin.optimizer is not curvature.optimizer
    assert twin.optimizer.param_groups[0]["params"][0] is next(twin.model.parameters())
    assert twin.optimizer.curvature_due
    found = train(twin, range(4, 8), micro_batches=2)
    if not is_measured:
        assert torch.equal(train(curvature, range(4, 8), micro_batches=2), found)
    straight = new(fraction)
    assert torch.equal(train(straight, range(8), micro_batches=2), found)


def test_compiled_code_is_left_out_of_a_copy(quick_compiler):
    model = MLP.model()
    curvature = Curvature(model, mlp_loss, AdaHessian(model.parameters(), lr=0.05), compile=True)
    train(curvature, range(2))
    for twin in (copy.deepcopy(curvature), through_pickle(curvature)):
        train(twin, range(2, 4))
        assert twin.engine.description.startswith("compiled")


def test_the_optimizer_does_not_keep_a_curvature_alive():
    curvature = new()
    optimizer = curvature.optimizer
    gone = weakref.ref(curvature)
    curvature.measure(MLP.batch())
    del curvature
    gc.collect()
    assert gone() is None
    assert not optimizer.curvature_due, "its measurement stays"
    assert not optimizer._optimizer_step_pre_hooks


def test_products_are_let_go_with_the_step():
    curvature = new()
    kept = []
    original = curvature.engine.measure

    def measure(*args):
        derivatives = original(*args)
        kept.extend(weakref.ref(product) for product in derivatives.products[0])
        return derivatives

    curvature.engine.measure = measure
    for count in (1, 2):
        kept.clear()
        for _ in range(count):
            curvature.measure(MLP.batch())
        take_step(curvature.model, curvature.optimizer, MLP.batch())
        assert all(each() is None for each in kept)
        take_step(curvature.model, curvature.optimizer, MLP.batch())


def test_a_second_curvature_waits_for_the_next_measurement():
    first = new()
    second = Curvature(first.model, MLP.loss, first.optimizer)
    for measures, waits in ((first, second), (second, first)):
        assert measures.measure(MLP.batch())
        assert not waits.measure(MLP.batch())
        assert measures.measure(MLP.batch())
        take_step(first.model, first.optimizer, MLP.batch())
        take_step(first.model, first.optimizer, MLP.batch())


@pytest.mark.parametrize("event", ["load_state_dict", "add_param_group"])
def test_a_measurement_begins_anew_after(event):
    curvature = new()
    optimizer = curvature.optimizer
    x, y = MLP.batch()
    curvature.measure((x * 100, y))
    if event == "load_state_dict":
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.float64))]})
    assert optimizer.curvature_due
    assert curvature.measure((x, y))
    expected = new()
    expected.measure((x, y))
    found = curvature_of(curvature.model, optimizer)
    torch.testing.assert_close(found, curvature_of(expected.model, expected.optimizer), rtol=0, atol=0)


def test_a_curvature_of_the_users_own_ends_a_measurement():
    curvature = new()
    params = list(curvature.model.parameters())
    curvature.measure(MLP.batch())
    curvature.optimizer.set_curvature({param: torch.full_like(param, 7.0) for param in params})
    assert not curvature.measure(MLP.batch())
    assert all(each.eq(7).all() for each in curvature_of(curvature.model, curvature.optimizer))


def test_parameters_may_be_frozen_between_a_measurement_and_its_step():
    curvature = new()
    curvature.measure(MLP.batch())
    curvature.model[0].requires_grad_(False)
    take_step(curvature.model, curvature.optimizer, MLP.batch())
    assert not curvature.measure(MLP.batch())


@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_may_measure(keyword):
    curvature = new()
    for number in range(4):
        first, second = (part for part in zip(*(each.chunk(2) for each in MLP.batch(seed=number)), strict=True))

        def closure(number=number, halves=(first, second)):
            for half in halves:
                curvature.measure(half)
            curvature.optimizer.zero_grad()
            loss = MLP.loss(curvature.model, MLP.batch(seed=number))
            loss.backward()
            return loss

        loss = curvature.optimizer.step(closure=closure) if keyword else curvature.optimizer.step(closure)
        assert loss > 0
    assert torch.equal(flat_parameters(curvature.model), train(new(), range(4), micro_batches=2))


def test_a_loss_that_is_not_finite_is_reported_once(said):
    curvature = new()
    x, y = MLP.batch()
    for _ in range(3):
        assert curvature.measure((x * torch.nan, y))
    warnings = [record for record in said.records if record.levelname == "WARNING"]
    assert ["loss_fn" in record.getMessage() for record in warnings] == [True]
    before = flat_parameters(curvature.model)
    take_step(curvature.model, curvature.optimizer, (x, y))
    assert torch.equal(flat_parameters(curvature.model), before)
    with pytest.warns(UserWarning, match="dropped"):
        assert diagnose(curvature.optimizer)["dropped_measurements"] == 4
