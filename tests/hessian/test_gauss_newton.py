"""Gauss-Newton products against J' H_L J of small networks, with J and H_L as matrices."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from requested import assert_same, derivatives, request_for, snapshot
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from adahessian import AdaHessian, AdaHessianKron, Curvature, CurvatureError, GaussNewton, TrainingStep
from adahessian.hessian import compiled
from adahessian.hessian.engine import Engine
from cases import ATTENTION, BATCH_NORM, CONVOLUTION, MLP, RECURRENT, REGRESSION, Case, exact_derivatives

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


class Text(nn.Module):
    """An embedding, of which the batch does not reach all rows, and an output that is not linear in its weights."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.embedding(x[..., 0].abs().long())).tanh().mean(1))


EMBEDDING = Case("embedding", Text, (6, 5, 2))
CASES = [MLP, REGRESSION, CONVOLUTION, BATCH_NORM, ATTENTION, RECURRENT, EMBEDDING]


def outputs(model, batch):
    return model(batch[0])


def cross_entropy(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def mean_square(outputs, batch):
    return (outputs - batch[1]).square().mean()


CROSS_ENTROPY, MEAN_SQUARE = GaussNewton(outputs, cross_entropy), GaussNewton(outputs, mean_square)


def loss_of(case):
    return MEAN_SQUARE if case.classes is None else CROSS_ENTROPY


@pytest.fixture
def no_compiler(monkeypatch):
    """Run functions uncompiled where they would be compiled."""
    monkeypatch.setattr(compiled, "compile_derivatives", lambda function, *_, **__: function)


def flat(tensors):
    return torch.cat([each.detach().flatten() for each in tensors])


def matrices(loss_fn, model, batch):
    """J and H_L of outputs that are one tensor."""
    named = dict(model.named_parameters())

    def outputs_at(place):
        parts = place.split([param.numel() for param in named.values()])
        values = {name: part.view_as(param) for (name, param), part in zip(named.items(), parts, strict=True)}
        values.update((name, buffer.clone()) for name, buffer in model.named_buffers())
        return loss_fn.outputs(lambda *args: functional_call(model, values, args), batch)

    place = flat(named.values())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = outputs_at(place)
        slopes = jacobian(outputs_at, place).reshape(found.numel(), len(place))
    return slopes, hessian(lambda each: loss_fn.loss(each, batch), found).reshape(found.numel(), found.numel())


def measured(model, loss_fn, batch, *, num_probes=1, compile=False):
    """Measure, and return the derivatives with the description of how they were found."""
    engine = Engine(model, loss_fn, compile=compile, product_dtype=None)
    return engine.measure(batch, request_for(model.parameters(), num_probes)), engine.description


# The product ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_those_of_the_explicit_matrix(case):
    model, batch, loss_fn = case.model(), case.batch(), loss_of(case)
    slopes, middle = matrices(loss_fn, model, batch)
    expected = slopes.T @ middle @ slopes
    found, _ = measured(model, loss_fn, batch, num_probes=3)
    for z, product in zip(found.probes, found.products, strict=True):
        torch.testing.assert_close(flat(product), expected @ flat(z), **CLOSE)
        assert flat(z) @ flat(product) > 0
    _, full = exact_derivatives(case, model, batch)(flat(model.parameters()).numpy())
    assert (torch.from_numpy(full) - expected).norm() > 1e-3 * expected.norm(), "the case must tell G from H"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradients_are_those_of_the_loss(case):
    model, batch, loss_fn = case.model(), case.batch(), loss_of(case)
    found, _ = measured(model, loss_fn, batch)
    expected = derivatives(model, case.loss, batch)
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=0)
    torch.testing.assert_close(loss_fn(model, batch).detach(), expected.loss, rtol=0, atol=0)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_function_to_be_compiled_finds_the_same(case):
    model, batch, loss_fn = case.model(), case.batch(), loss_of(case)
    expected, _ = measured(model, loss_fn, batch, num_probes=2)
    found, how = measured(model, loss_fn, batch, num_probes=2, compile=True)
    assert how.startswith("compiled Gauss-Newton products, within ")
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("case", [MLP, BATCH_NORM, ATTENTION], ids=str)
def test_it_can_be_compiled(case):
    model, batch, loss_fn = case.model(), case.batch(), loss_of(case)
    expected, _ = measured(model, loss_fn, batch)
    found, how = measured(model, loss_fn, batch, compile=True)
    assert how.startswith("compiled Gauss-Newton products, within ")
    torch.testing.assert_close(found, expected, **CLOSE)


def test_compiled_code_rounds_the_product_and_nothing_else():
    """The one test here with the code of the compiler."""
    torch._dynamo.reset()
    model, batch = MLP.model(torch.float32), MLP.batch(torch.float32)
    expected, _ = measured(model, CROSS_ENTROPY, batch)
    engine = Engine(model, CROSS_ENTROPY, compile=True, product_dtype=torch.bfloat16)
    found = engine.measure(batch, request_for(model.parameters()))
    assert engine.description.startswith("compiled"), engine.description
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-5, atol=1e-6)
    error = (flat(found.products[0]) - flat(expected.products[0])).norm() / flat(expected.products[0]).norm()
    assert 1e-4 < error < 2e-2


def test_least_squares():
    model, batch = REGRESSION.model(), REGRESSION.batch()
    slopes, _ = matrices(MEAN_SQUARE, model, batch)
    found, _ = measured(model, MEAN_SQUARE, batch)
    expected = 2 / len(slopes) * slopes.T @ (slopes @ flat(found.probes[0]))
    torch.testing.assert_close(flat(found.products[0]), expected, **CLOSE)


def test_a_linear_model_has_the_hessian():
    model, batch = nn.Linear(5, 3).double(), MLP.batch()
    found, _ = measured(model, CROSS_ENTROPY, batch)
    torch.testing.assert_close(found, derivatives(model, MLP.loss, batch), **CLOSE)


@pytest.mark.usefixtures("no_compiler")
def test_dropout_is_drawn_once_as_in_the_gradient():
    model = nn.Sequential(nn.Linear(5, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 3)).double()
    state = torch.get_rng_state()
    found = []
    for compile in (False, True):
        torch.set_rng_state(state)
        found.append(measured(model, CROSS_ENTROPY, MLP.batch(), num_probes=2, compile=compile)[0])
    torch.testing.assert_close(*found, **CLOSE)
    CROSS_ENTROPY(model, MLP.batch()).backward()
    torch.testing.assert_close([param.grad for param in model.parameters()], found[0].gradients)


def test_checkpointed_layers():
    model, batch = MLP.model(), MLP.batch()
    loss_fn = GaussNewton(lambda model, batch: checkpoint(model, batch[0], use_reentrant=False), cross_entropy)
    expected, _ = measured(model, CROSS_ENTROPY, batch, num_probes=2)
    torch.testing.assert_close(measured(model, loss_fn, batch, num_probes=2)[0], expected, **CLOSE)


def test_outputs_may_contain_derivatives_even_through_a_layer_norm():
    """As in a network that solves a differential equation. PyTorch's Hessian product would be wrong."""
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 1)).double()

    def residuals(model, batch):
        x = batch[0].detach().requires_grad_()
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]

    batch = torch.randn(4, 2).double(), torch.randn(4, 2).double()
    loss_fn = GaussNewton(residuals, mean_square)
    with pytest.raises(CurvatureError, match="layer_norm"):
        measured(model, lambda model, batch: loss_fn(model, batch), batch)
    slopes, middle = matrices(loss_fn, model, batch)
    found, _ = measured(model, loss_fn, batch)
    expected = slopes.T @ middle @ slopes @ flat(found.probes[0])
    zeros = [torch.zeros_like(z) for z in found.probes[0]]  # the residuals do not depend on the last bias
    product = [zero if each is None else each for each, zero in zip(found.products[0], zeros, strict=True)]
    torch.testing.assert_close(flat(product), expected, **CLOSE)


# Outputs and losses ---------------------------------------------------------------------------------------------------


class Several(nn.Module):
    """A parameter for each kind of output, and one that is an output itself."""

    def __init__(self):
        super().__init__()
        names = ("scale", "used", "ignored", "unused", "constant")
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.rand(2, dtype=torch.float64)))

    def forward(self, x):
        return self.scale, (self.used * x).tanh() + self.constant, self.ignored * x, torch.arange(2), x


def loss_of_several(outputs, batch):
    scale, used, _, index, x = outputs
    return (scale.exp() * used[:, index] * x).square().mean()


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("compile", [False, True])
def test_outputs_of_several_kinds(compile):
    model, x = Several(), torch.randn(6, 2, dtype=torch.float64)
    model.constant.requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    request = request_for(params)
    loss_fn = GaussNewton(lambda model, x: model(x), loss_of_several)
    found = Engine(model, loss_fn, compile=compile, product_dtype=None).measure(x, request)
    assert [each is None for each in found.gradients] == [False, False, True, True]
    assert [each is None for each in found.products[0]] == [False, False, True, True]

    # The same with one tensor as the output.
    loss = GaussNewton(
        lambda model, x: torch.cat([model(x)[0], model(x)[1].flatten()]),
        lambda joined, x: loss_of_several((joined[:2], joined[2:].view(6, 2), None, torch.arange(2), x), x),
    )
    expected = Engine(model, loss, compile=False, product_dtype=None).measure(x, request)
    torch.testing.assert_close(found.products[0][:2], expected.products[0][:2], **CLOSE)
    torch.testing.assert_close(found[:2], expected[:2], **CLOSE)


@pytest.mark.parametrize(
    ("outputs_fn", "loss", "named"),
    [
        (lambda model, batch: model(batch[0]).mean().item(), mean_square, "outputs returned a float"),
        (lambda model, batch: None, mean_square, "outputs returned a NoneType"),
        (lambda model, batch: model(batch[0]).argmax(-1), cross_entropy, "outputs"),
        (lambda model, batch: model(batch[0]).detach(), cross_entropy, "outputs .*no_grad"),
        (lambda model, batch: batch[0].clone().requires_grad_(), lambda y, batch: y.sum(), "depends on none"),
        (outputs, lambda y, batch: y.sum(0), "loss returned .* shape"),
        (outputs, lambda y, batch: y.mean().item(), "loss returned a float"),
        (outputs, lambda y, batch: batch[0].mean(), "loss without a graph"),
        (outputs, lambda y, batch: Once.apply(y).square().mean(), "once_differentiable"),
        (lambda model, batch: Once.apply(model(batch[0])), cross_entropy, "once_differentiable"),
    ],
)
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.usefixtures("no_compiler")
def test_errors(outputs_fn, loss, named, compile):
    model, batch = MLP.model(), MLP.batch()
    before = snapshot(model)
    with pytest.raises(CurvatureError, match=named):
        measured(model, GaussNewton(outputs_fn, loss), batch, compile=compile)
    assert_same(before, snapshot(model))


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("compile", [False, True])
def test_a_loss_that_reads_parameters_is_rejected(compile):
    model = MLP.model()
    loss_fn = GaussNewton(outputs, lambda y, batch: cross_entropy(y, batch) + model[0].weight.square().sum())
    with pytest.raises(CurvatureError, match="loss reads parameters"):
        measured(model, loss_fn, MLP.batch(), compile=compile)


def test_a_loss_that_is_linear_in_the_outputs_has_no_curvature(said):
    found, _ = measured(MLP.model(), GaussNewton(MLP.loss, lambda loss, batch: loss), MLP.batch())
    assert not any(product.any() for product in found.products[0])
    assert all(gradient.any() for gradient in found.gradients)
    assert "linear in outputs" in said.messages[-1]


@pytest.mark.parametrize("functions", [(outputs, nn.CrossEntropyLoss()), (outputs, 3), (None, cross_entropy)])
def test_it_takes_two_functions(functions):
    with pytest.raises(TypeError, match="outputs and loss"):
        GaussNewton(*functions)


def test_sparse_gradients_are_rejected():
    model = nn.Embedding(5, 2, sparse=True)
    loss_fn = GaussNewton(lambda model, x: model(x), lambda y, x: y.square().mean())
    with pytest.raises(RuntimeError, match="sparse"):
        measured(model, loss_fn, torch.tensor([1, 2]))


# No trace is left -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("compile", [False, True])
def test_measuring_leaves_no_trace(compile):
    model, batch = BATCH_NORM.model(), BATCH_NORM.batch()
    model.append(nn.Dropout(0.5))
    CROSS_ENTROPY(model, batch).backward()
    for _ in range(2):
        before = snapshot(model)
        measured(model, CROSS_ENTROPY, batch, num_probes=2, compile=compile)
        assert_same(before, snapshot(model))


def test_no_graph_is_left_behind():
    seen = []

    def keep(model, batch):
        seen.append(weakref.ref(result := outputs(model, batch)))
        return result

    gc.disable()
    try:
        measured(MLP.model(), GaussNewton(keep, cross_entropy), MLP.batch())
        assert seen[0]() is None
    finally:
        gc.enable()


# In training ----------------------------------------------------------------------------------------------------------

OPTIMIZERS = [
    lambda params: AdaHessian(params, lr=0.05, eps=1e-2, curvature_every=2),
    lambda params: AdaHessianKron(params, lr=0.01, curvature_every=2, curvature_warmup=2),
]


def train(curvature, steps, start=0):
    model, loss_fn, optimizer = curvature.model, curvature.loss_fn, curvature.optimizer
    for number in range(start, steps):
        batch = MLP.batch(seed=number)
        curvature.measure(batch)
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return flat(model.parameters())


def curvature_for(make_optimizer, loss_fn=CROSS_ENTROPY, **options):
    model = MLP.model()
    return Curvature(model, loss_fn, make_optimizer(model.parameters()), batch_fraction=1.0, **options)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS, ids=["diagonal", "kron"])
def test_training_and_resuming(make_optimizer):
    expected = train(curvature_for(make_optimizer), 6)
    assert not torch.equal(expected, train(curvature_for(make_optimizer, MLP.loss), 6))
    half = curvature_for(make_optimizer)
    train(half, 3)
    resumed = curvature_for(make_optimizer)
    resumed.model.load_state_dict(half.model.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(half.optimizer.state_dict()))
    assert torch.equal(train(resumed, 6, 3), expected)
    assert torch.equal(train(pickle.loads(pickle.dumps(half)), 6, 3), expected)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS, ids=["diagonal", "kron"])
def test_a_training_step_is_the_loop(make_optimizer, compile, fraction):
    expected, other = curvature_for(make_optimizer), curvature_for(make_optimizer, compile=compile)
    expected.batch_fraction = other.batch_fraction = fraction
    step = TrainingStep(other)
    for number in range(4):
        step(MLP.batch(seed=number))
    torch.testing.assert_close(flat(other.model.parameters()), train(expected, 4), **CLOSE)
    assert ("compiled Gauss-Newton" in other.engine.description) is compile


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("compile", [False, True])
def test_the_curvature_does_not_depend_on_the_loss_scale(compile):
    """A power of two changes no digit."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    curvature, plain = (curvature_for(OPTIMIZERS[0], scaler=each, compile=compile) for each in (scaler, None))
    scales = []
    curvature._loss_scale._loss_fn = lambda *args: scales.append(1) or cross_entropy(*args)
    for each in (curvature, plain):
        each.measure(MLP.batch())
    found, expected = (each.optimizer._measurement for each in (curvature, plain))
    for param, other in zip(curvature.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(found[param], expected[other], rtol=0, atol=0)
    assert scales


def test_micro_batches_are_averaged():
    whole, parts = (curvature_for(OPTIMIZERS[0]) for _ in range(2))
    x, y = MLP.batch()
    whole.measure((x, y))
    parts.measure((x[:4], y[:4]), weight=4)
    parts.measure((x[4:], y[4:]), weight=12)
    for each in (whole, parts):
        CROSS_ENTROPY(each.model, (x, y)).backward()
        each.optimizer.step()
    torch.testing.assert_close(flat(parts.model.parameters()), flat(whole.model.parameters()), **CLOSE)
