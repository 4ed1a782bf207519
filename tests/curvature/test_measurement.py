"""The curvature pass: it measures what it should, where it should, and leaves no trace."""

import random
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from adahessian import AdaHessian, Curvature, CurvatureError
from adahessian.curvature.batches import slice_batch
from adahessian.curvature.errors import explained
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
    assert seen == 3 * [True]  # twice for the comparison with torch
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
        optimizer.feed_curvature = lambda diagonal, gradients: fed.append(diagonal)
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
    sliced = slice_batch([x, "name", 7], 0.5)
    assert isinstance(sliced, list)
    assert torch.equal(sliced[0], x[:5])
    assert sliced[1:] == ["name", 7]
    assert len(slice_batch(torch.zeros(100), 0.55)) == 55
    assert len(slice_batch(torch.zeros(100), 0.07)) == 7
    named = slice_batch(Pair(x, {"y": (x, scalar)}), 0.5)
    assert isinstance(named, Pair)
    assert named.rest["y"][0].shape == (5, 1)
    assert named.rest["y"][1] is scalar
    whole = UserDict(x=x)
    mapping = slice_batch(whole, 0.5)
    assert isinstance(mapping, UserDict)
    assert (mapping["x"].shape, whole["x"].shape) == ((5, 1), (10, 1))
    assert slice_batch(torch.zeros(3, 10), 0.5, dim=1).shape == (3, 5)


@pytest.mark.parametrize("batch", ["text", (torch.zeros(8), torch.zeros(6)), torch.tensor(1.0), []], ids=str)
def test_batches_that_cannot_be_sliced(batch):
    with pytest.raises(ValueError, match=r"cannot take a slice.*batch_fraction=1.0"):
        slice_batch(batch, 0.5)


@pytest.mark.parametrize(
    "arguments", [{"batch_fraction": 0}, {"batch_fraction": 1.5}, {"batch_fraction": "all"}, {"batch_dim": -1}], ids=str
)
def test_wrong_arguments(arguments):
    model = MLP.model()
    with pytest.raises(ValueError, match=f"Invalid {next(iter(arguments))}"):
        Curvature(model, MLP.loss, AdaHessian(model.parameters()), **arguments)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            lambda model, x: model(x),
            r"scalar, but returned a torch.float64 tensor of shape \(16, 3\): reduce",
        ),
        (lambda model, x: 3.0, "the loss alone, as a tensor, but returned a float"),
        (lambda model, x: (model(x).mean(), x), "the loss alone, as a tensor, but returned a tuple"),
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


def test_running_out_of_memory_is_not_taken_for_a_missing_derivative(monkeypatch):
    param = nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([param])
    param.square().sum().backward(create_graph=True)

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(torch.autograd, "grad", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        optimizer.step()


def test_a_loss_of_one_element_is_a_scalar_and_a_complex_one_is_not():
    model, (x, _) = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(CurvatureError, match="must return a real scalar"):
        Curvature(model, lambda model, x: model(x).mean() * 1j, optimizer).measure(x)
    assert Curvature(model, lambda model, x: model(x).square().mean().view(1), optimizer).measure(x)


def test_batch_dim_reaches_the_slice():
    weight = nn.Linear(4, 1)
    sizes = []

    def loss_fn(model, x):
        sizes.append(tuple(x.shape))
        return model(x).square().mean()

    optimizer = AdaHessian(weight.parameters())
    Curvature(weight, loss_fn, optimizer, batch_fraction=0.5, batch_dim=1).measure(torch.randn(3, 10, 4))
    assert sizes == [(3, 5, 4)]


def test_numpys_stream_goes_on_as_if_nothing_had_been():
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

    with pytest.raises(CurvatureError, match=r"cannot be differentiated .*Remedy"):
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


def test_reentrant_checkpointing_is_refused_and_the_other_kind_works():
    body, head = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.Sequential(body, head)
    x = torch.randn(8, 4, requires_grad=True)

    def loss_with(reentrant):
        hidden = torch.utils.checkpoint.checkpoint(lambda x: body(x).tanh(), x, use_reentrant=reentrant)
        return head(hidden).square().mean()

    optimizer = AdaHessian(model.parameters())
    with pytest.raises(CurvatureError, match=r"reentrant activation checkpointing.*use_reentrant=False"):
        Curvature(model, lambda *_: loss_with(True), optimizer).measure(x)
    loss_with(True).backward(create_graph=True)
    with pytest.raises(CurvatureError, match=r"reentrant activation checkpointing.*use_reentrant=False"):
        optimizer.step()
    optimizer.zero_grad()

    found = []
    for loss_fn in (lambda *_: loss_with(False), lambda model, x: head(body(x).tanh()).square().mean()):
        optimizer = AdaHessian(model.parameters())
        optimizer.feed_curvature = lambda diagonal, gradients: found.append(diagonal)
        Curvature(model, loss_fn, optimizer).measure(x)
    for param in model.parameters():
        torch.testing.assert_close(found[0][param], found[1][param])


def test_weight_norm_is_refused():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(CurvatureError, match=r"weight_norm wrongly.*Remedy: write it with ordinary operations"):
        Curvature(model, loss_of, optimizer).measure(torch.randn(8, 4))


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("derivative for '_flash_attention_backward' is not implemented", "SDPBackend.MATH"),
        ("derivative for 'aten::_cudnn_rnn_backward' is not implemented", "cudnn.flags"),
        ("torch.compile with aot_autograd does not currently support double backward", "as they were written"),
        ("compiled with non-empty donated buffers which requires create_graph=False", "as they were written"),
        ("Trying to backward through the graph a second time", "once a step"),
        ("something else", "replace the operation"),
    ],
)
def test_every_error_has_its_remedy(said, remedy):
    with pytest.raises(CurvatureError, match=remedy), explained():
        raise RuntimeError(said)


def test_arguments_in_the_wrong_place_are_named():
    model = MLP.model()
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(TypeError, match=r"takes \(model, loss_fn, optimizer\).*but got method, Sequential, AdaHessian"):
        Curvature(MLP.loss, model, optimizer)
    with pytest.raises(TypeError, match="but got Sequential, method, AdamW"):
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
def test_compiled_models_are_measured_as_they_were_written(in_place):
    batch = MLP.batch()
    compiled = Compilable()
    if in_place:
        compiled.compile(backend="aot_eager")
    else:
        compiled = torch.compile(compiled, backend="aot_eager")
    found = []
    for model in (compiled, Compilable()):
        optimizer = AdaHessian(model.parameters())
        optimizer.feed_curvature = lambda diagonal, gradients: found.append(list(diagonal.values()))
        MLP.loss(model, batch).backward()  # compiles
        assert Curvature(model, MLP.loss, optimizer).measure(batch)
    torch.testing.assert_close(*found)


class Wrapper:
    """As trainers wrap optimizers: it can step, and no more."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


def test_the_optimizer_inside_of_a_wrapper_is_fed():
    model = MLP.model()
    optimizer = AdaHessian(model.parameters())
    curvature = Curvature(model, MLP.loss, Wrapper(Wrapper(optimizer)))
    assert curvature.optimizer is optimizer
    assert curvature.measure(MLP.batch())
    assert not optimizer.curvature_due


def test_lists_with_an_entry_for_each_example_are_sliced_with_the_tensors():
    batch = {
        "text": ["a", "b", "c", "d"],
        "y": torch.zeros(4),
        "options": ["mean"],
        "pair": (torch.zeros(4), ["e"] * 4),
    }
    sliced = slice_batch(batch, 0.5)
    assert (sliced["text"], sliced["options"], sliced["pair"][1]) == (["a", "b"], ["mean"], ["e", "e"])
    assert batch["text"] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("function", "said"),
    [(nn.CrossEntropyLoss(), "CrossEntropyLoss takes outputs"), (lambda batch: 0, "this one takes other arguments")],
)
def test_a_loss_that_does_not_take_a_model_and_a_batch_is_refused_at_once(function, said):
    model = MLP.model()
    with pytest.raises(TypeError, match=rf"loss_fn\(model, batch\), but {said}"):
        Curvature(model, function, AdaHessian(model.parameters()))
