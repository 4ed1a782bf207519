"""The engine: what it chooses and says, that it refuses what is wrong, and that every way finds the same."""

import re
from types import SimpleNamespace

import pytest
import torch
from test_measurement import Everything, assert_same, snapshot
from torch import nn

from adahessian import AdaHessian, CapturedStep, Curvature, CurvatureError
from adahessian.curvature import agreement, engine, hutchinson
from adahessian.curvature.agreement import errors
from adahessian.curvature.compilation import compile_derivatives, missing_compiler
from adahessian.curvature.engine import Engine
from adahessian.curvature.functional import FunctionalLoss
from adahessian.curvature.ways import Problem
from cases import ATTENTION, BATCH_NORM, CONVOLUTION, MLP, RECURRENT, REGRESSION, Case, flat_parameters

DROPOUT = Case("dropout", lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 3)), (16, 5))
NAMED = ["forward_over_reverse", "finite_difference"]


@pytest.fixture
def no_compiler(monkeypatch):
    """What would be compiled runs as it is, so that calls of it can be counted."""

    def as_it_is(loss, product, **_):
        return lambda *args: loss.derivatives(product, *args)

    monkeypatch.setattr(engine, "compile_derivatives", as_it_is)


@pytest.fixture
def wrong_product(monkeypatch):
    """Derivatives of which one parameter's diagonal is wrong."""
    original = FunctionalLoss.derivatives

    def wrong(self, *args):
        loss, gradients, diagonal, after = original(self, *args)
        return loss, gradients, [1.3 * diagonal[0], *diagonal[1:]], after

    monkeypatch.setattr(FunctionalLoss, "derivatives", wrong)


@pytest.fixture
def products(monkeypatch):
    """How many products have been computed: by differentiating a gradient, and by a function of the parameters."""
    count = SimpleNamespace(backward=0, functional=0)
    backward, functional = hutchinson.hessian_vector_product, FunctionalLoss.derivatives

    def count_backward(*args, **kwargs):
        count.backward += 1
        return backward(*args, **kwargs)

    def count_functional(*args):
        count.functional += 1
        return functional(*args)

    monkeypatch.setattr(hutchinson, "hessian_vector_product", count_backward)
    monkeypatch.setattr(FunctionalLoss, "derivatives", count_functional)
    return count


def measured(model, loss_fn, batch, *, params=None, probes=1, **settings):
    """The diagonal of each parameter, caught on its way into the optimizer; None for one that took no part."""
    params = list(model.parameters()) if params is None else params
    optimizer = AdaHessian(params, num_probes=probes)
    caught = {}
    optimizer.feed_curvature = lambda diagonal, gradients: caught.update(diagonal)
    assert Curvature(model, loss_fn, optimizer, **settings).measure(batch)
    return [caught.get(param) for param in params]


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def mean_square(model, x):
    return model(x).square().mean()


# What is chosen ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "compile=True would compile it on this device, too"),
        ({"compile": False}, "compile=False"),
        ({"product": "double_backward"}, "compile=True would compile it on this device, too"),
    ],
    ids=str,
)
def test_double_backward_is_the_choice_on_a_cpu_and_the_reason_is_said_once(said, settings, why):
    for _ in range(2):
        measured(MLP.model(), MLP.loss, MLP.batch(), **settings)
    assert said.messages == [f"curvature by double backward, not compiled: {why}"]


@pytest.mark.parametrize(
    ("compile", "elements", "missing", "expected"),
    [
        (None, 99_999, None, (False, "fewer than 100000 parameters do not repay the minute it takes")),
        (None, 100_000, None, (True, "")),
        (True, 10, None, (True, "")),
        (True, 10, "no C++ compiler was found", (False, "no C++ compiler was found")),
        (False, 100_000, None, (False, "compile=False")),
    ],
)
def test_on_a_gpu_it_compiles_for_models_that_repay_it(monkeypatch, compile, elements, missing, expected):
    monkeypatch.setattr(engine, "missing_compiler", lambda device: missing)
    param = SimpleNamespace(device=torch.device("cuda"), numel=lambda: elements)
    problem = SimpleNamespace(parameters=[param])
    assert Engine(problem, product="auto", compile=compile, tangent_dtype=None).wants_compiled() == expected


def test_what_the_machine_lacks_is_named(monkeypatch):
    from torch._inductor import cpp_builder, exc
    from torch.utils import _triton

    def none_found():
        raise exc.InvalidCxxCompiler

    assert missing_compiler(torch.device("cpu")) is None
    monkeypatch.setattr(_triton, "has_triton", lambda: False)
    assert missing_compiler(torch.device("cuda")) == "Triton is not installed, or does not support this GPU"
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    assert missing_compiler(torch.device("cpu")) == "no C++ compiler was found"


def test_without_a_compiler_it_trains_as_ever_and_says_so_once(said, monkeypatch):
    monkeypatch.setattr(engine, "missing_compiler", lambda device: "no C++ compiler was found")
    finals = []
    for compile in (True, False):
        model, batch = MLP.model(), MLP.batch()
        optimizer = AdaHessian(model.parameters())
        curvature = Curvature(model, MLP.loss, optimizer, compile=compile)
        for _ in range(3):
            assert curvature.measure(batch)
            step(optimizer, MLP.loss(model, batch))
        finals.append(flat_parameters(model))
    assert torch.equal(*finals)
    assert said.messages == [
        "curvature by double backward, not compiled: no C++ compiler was found",
        "curvature by double backward, not compiled: compile=False",
    ]


@pytest.mark.parametrize("compile", [None, True])
def test_parameters_that_are_not_the_models(said, compile):
    model, (x, _) = REGRESSION.model(), REGRESSION.batch()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    params = [*model.parameters(), scale]

    def loss_fn(model, x):
        return (scale**2 * model(x)).square().mean()

    found = measured(model, loss_fn, x, params=params, compile=compile)
    assert all(diagonal is not None for diagonal in found)
    why = "the optimizer has parameters that are not the model's"
    assert said.messages == [f"curvature by double backward, not compiled: {why}"]
    for product in NAMED:
        with pytest.raises(CurvatureError, match=rf"no {product.replace('_', ' ')}: {why}\. Remedy: product='auto'"):
            measured(model, loss_fn, x, params=params, product=product)


def test_complex_parameters(said):
    model = nn.Linear(3, 2, dtype=torch.complex128)
    x = torch.randn(8, 3, dtype=torch.complex128)

    def loss_fn(model, x):
        return model(x).abs().square().mean()

    expected = measured(model, loss_fn, x)
    for a, b in zip(measured(model, loss_fn, x, compile=True), expected, strict=True):
        assert torch.equal(a, b)
    assert said.messages[-1] == "curvature by double backward, not compiled: the model has complex parameters"
    for product in NAMED:
        with pytest.raises(CurvatureError, match=r"the model has complex parameters\. Remedy: product='auto'"):
            measured(model, loss_fn, x, product=product)


def loss_with_a_graph_break(model, batch):
    torch._dynamo.graph_break()
    return MLP.loss(model, batch)


def loss_that_reads_a_number(model, batch):
    return MLP.loss(model, batch) if batch[0].sum().item() < 1e9 else None


@pytest.mark.parametrize(
    ("case", "loss_fn"),
    [
        (MLP, loss_with_a_graph_break),
        (MLP, loss_that_reads_a_number),
        (RECURRENT, RECURRENT.loss),
    ],
    ids=["graph break", "number", "recurrent"],
)
@pytest.mark.usefixtures("quick_compiler")
def test_what_cannot_be_compiled_is_measured_without_and_the_reason_is_said(said, case, loss_fn):
    model, batch = case.model(), case.batch()
    found = [measured(model, loss_fn, batch, compile=compile) for compile in (False, True)]
    torch.testing.assert_close(*found, rtol=0, atol=0)
    refused = [message for message in said.messages if message.startswith("not by compiled")]
    assert re.fullmatch(r"not by compiled forward over reverse: \w+: .+", refused[0])
    assert re.fullmatch(r"not by compiled double backward: \w+: .+", refused[1])
    reasons = "; ".join(message.removeprefix("not by compiled ") for message in refused)
    assert said.messages[-1] == f"curvature by double backward, not compiled: {reasons}"


def test_frozen_and_thawed_parameters_lead_to_another_choice():
    batch = MLP.batch()
    finals = []
    for product in ("double_backward", "forward_over_reverse"):
        model = MLP.model()
        optimizer = AdaHessian(model.parameters())
        curvature = Curvature(model, MLP.loss, optimizer, product=product)
        ages = []
        for frozen in (False, True, True, False):
            model[0].requires_grad_(not frozen)
            assert curvature.measure(batch)
            step(optimizer, MLP.loss(model, batch))
            ages.append([optimizer.state[param]["hessian_age"].item() for param in model.parameters()])
        assert ages == [[1, 1, 1, 1], [1, 1, 2, 2], [1, 1, 3, 3], [2, 2, 4, 4]]
        finals.append(flat_parameters(model))
    torch.testing.assert_close(*finals, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("no_compiler")
def test_a_batch_of_another_shape_is_measured_without_the_compiler(said, products):
    model, (x, y) = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters())
    caught = []
    optimizer.feed_curvature = lambda diagonal, gradients: caught.append(list(diagonal.values()))
    curvature = Curvature(model, MLP.loss, optimizer, compile=True)
    curvature.measure((x, y))
    assert products.backward == 1, "the check"
    curvature.measure((x[:5], y[:5]))
    assert products.backward == 2
    curvature.measure((x, y))
    assert products.backward == 2
    assert sum("another shape" in message for message in said.messages) == 1
    for found, part in zip(caught, ((x, y), (x[:5], y[:5]), (x, y)), strict=True):
        torch.testing.assert_close(found, measured(model, MLP.loss, part), rtol=1e-9, atol=1e-12)


def test_a_kind_of_batch_that_cannot_be_compiled_for_is_measured_without_the_compiler(said, monkeypatch):
    def as_it_is_but_for_five(loss, product, **_):
        def function(params, buffers, probe, part):
            if len(part[0]) == 5:
                raise RuntimeError("no code for five")
            return loss.derivatives(product, params, buffers, probe, part)

        return function

    monkeypatch.setattr(engine, "compile_derivatives", as_it_is_but_for_five)
    model, (x, y) = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters())
    caught = []
    optimizer.feed_curvature = lambda diagonal, gradients: caught.append(list(diagonal.values()))
    curvature = Curvature(model, MLP.loss, optimizer, compile=True)
    curvature.measure((x, y))
    for _ in range(302):
        curvature.measure((x[:5], y[:5]))
    assert said.messages.count("from now on not compiled for this kind of batch: RuntimeError: no code for five") == 1
    torch.testing.assert_close(caught[-1], measured(model, MLP.loss, (x[:5], y[:5])), rtol=0, atol=0)


@pytest.mark.usefixtures("quick_compiler")
def test_another_order_of_memory_changes_neither_results_nor_the_order_of_the_parameters():
    model, batch = CONVOLUTION.model(), CONVOLUTION.batch()
    optimizer = AdaHessian(model.parameters())
    loss = Problem(model, CONVOLUTION.loss, optimizer).functional()
    function = compile_derivatives(loss, "forward_over_reverse", tangent_dtype=None, channels_last=True)
    for order in (torch.contiguous_format, torch.channels_last):
        kernel, *others = (param.detach() for param in model.parameters())
        params = [kernel.contiguous(memory_format=order), *others]
        probe = optimizer.draw_probes(0)
        with torch.no_grad():
            _, gradients, diagonal, _ = function(params, {}, probe, batch)
            _, *expected, _ = loss.derivatives("double_backward", params, {}, probe, batch)
        torch.testing.assert_close([gradients, diagonal], expected, rtol=1e-9, atol=1e-12)
        for found in (gradients, diagonal):
            assert [tensor.stride() for tensor in found] == [param.stride() for param in params]


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        ("auto", ["forward_over_reverse", "double_backward"]),
        ("double_backward", ["double_backward"]),
        ("forward_over_reverse", ["forward_over_reverse"]),
    ],
)
def test_images_on_a_gpu_are_tried_in_another_order_of_memory_first(product, expected):
    for on_gpu in (True, False):
        problem = SimpleNamespace(parameters=[SimpleNamespace(dim=lambda: 4, is_cuda=on_gpu)])
        chooser = Engine(problem, product=product, compile=True, tangent_dtype=None)
        orders = [True, False] if on_gpu else [False]
        assert list(chooser._candidates()) == [(each, order) for each in expected for order in orders]


# All ways find the same ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [MLP, CONVOLUTION, BATCH_NORM, ATTENTION, DROPOUT], ids=str)
@pytest.mark.parametrize("probes", [1, 3])
def test_forward_over_reverse_agrees_with_double_backward(said, case, probes):
    """With dropout, this says that all probes see the same mask."""
    model, batch = case.model(), case.batch()
    found = []
    for product in ("double_backward", "forward_over_reverse"):
        torch.manual_seed(5)
        found.append(measured(model, case.loss, batch, probes=probes, product=product))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    assert re.fullmatch(r"curvature by forward over reverse, within \d(e-1\d)? of double backward", said.messages[-1])


@pytest.mark.parametrize(
    ("way", "first", "later"),
    [
        ({}, (1, 0), (1, 0)),
        ({"product": "forward_over_reverse"}, (1, 2), (0, 1)),
        ({"compile": True}, (1, 2), (0, 1)),
        ({"compile": True, "product": "double_backward"}, (1, 2), (0, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("probes", [1, 3])
@pytest.mark.usefixtures("no_compiler")
def test_there_is_one_product_a_probe_and_a_check_at_first(products, way, first, later, probes):
    """Products by double backward, and by a function of the parameters."""
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), num_probes=probes)
    curvature = Curvature(model, MLP.loss, optimizer, **way)
    for backward, functional in (first, later, later):
        products.backward = products.functional = 0
        assert curvature.measure(batch)
        assert (products.backward, products.functional) == (probes * backward, probes * functional)
        step(optimizer, MLP.loss(model, batch))


class TwoHeads(nn.Module):
    """Only one of them is used."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x).tanh()


@pytest.mark.parametrize("product", ["double_backward", "forward_over_reverse", "finite_difference"])
def test_a_parameter_that_takes_no_part_has_no_curvature_and_keeps_its_state(product):
    model = TwoHeads()
    x = torch.randn(8, 3)
    optimizer = AdaHessian(model.parameters())
    Curvature(model, lambda model, x: mean_square(model, x) + model.unused(x).square().mean(), optimizer).measure(x)
    step(optimizer, mean_square(model, x) + model.unused(x).square().mean())
    before = {name: value.clone() for name, value in optimizer.state[model.unused.weight].items()}

    assert measured(model, mean_square, x, product=product)[2:] == [None, None]
    assert Curvature(model, mean_square, optimizer, product=product).measure(x)
    step(optimizer, mean_square(model, x))
    assert optimizer.state[model.used.weight]["hessian_age"] == 2
    torch.testing.assert_close(optimizer.state[model.unused.weight], before, rtol=0, atol=0)


# What is wrong is refused --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("wrong_product", "quick_compiler")
@pytest.mark.parametrize("case", [MLP, DROPOUT], ids=str)
def test_a_wrong_product_is_not_taken(said, case):
    model, batch = case.model(), case.batch()
    found = []
    for compile in (False, True):
        torch.manual_seed(5)
        found.append(measured(model, case.loss, batch, compile=compile))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    wrong = r"it differs from double backward by \d+\.\d% in norm, by 30\.0% for a single parameter, .* wrongly.*"
    for product in ("forward over reverse", "double backward"):
        assert any(re.fullmatch(f"not by compiled {product}: {wrong}", message) for message in said.messages)
    assert said.messages[-1].startswith("curvature by double backward, not compiled: forward over reverse: it differs")


@pytest.mark.usefixtures("wrong_product")
@pytest.mark.parametrize("case", [MLP, DROPOUT], ids=str)
def test_a_wrong_product_that_was_asked_for_is_refused_before_anything_changes(case):
    model, batch = case.model(), case.batch()
    optimizer = AdaHessian(model.parameters())
    fed = []
    optimizer.feed_curvature = lambda diagonal, gradients: fed.append(diagonal)
    before = flat_parameters(model), torch.get_rng_state()
    with pytest.raises(
        CurvatureError, match=r"no forward over reverse: it differs .* by 30\.0% .*wrongly.*\. Remedy: product='auto'\."
    ):
        Curvature(model, case.loss, optimizer, product="forward_over_reverse").measure(batch)
    assert not fed
    assert optimizer.curvature_due
    assert_same(before, (flat_parameters(model), torch.get_rng_state()))


def test_parameters_that_the_loss_takes_behind_the_models_back_are_noticed():
    """A function of the parameters does not know of these."""
    model, batch = MLP.model(), MLP.batch()
    own = list(model.parameters())

    def loss_fn(model, batch):
        return MLP.loss(model, batch) + sum(param.square().sum() for param in own)

    with pytest.raises(CurvatureError, match=r"no forward over reverse: its? .*differs .*Remedy: product='auto'"):
        measured(model, loss_fn, batch, product="forward_over_reverse")


def test_dropout_is_compared_without_and_batch_norm_as_it_is(said):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 1))
    modes = []

    def loss_fn(model, x):
        modes.append((model[1].training, model[3].training))
        return mean_square(model, x)

    measured(model, loss_fn, torch.randn(16, 4), product="forward_over_reverse")
    assert all(norm for norm, _ in modes)
    assert [dropout for _, dropout in modes].count(False) >= 2, "double backward and the way itself"
    assert modes[-1] == (True, True), "the measurement"
    assert all(module.training for module in model.modules())
    assert said.messages[-1].startswith("curvature by forward over reverse, within ")


def test_a_loss_that_is_random_without_dropout_is_not_compared(said):
    model, x = nn.Linear(4, 2), torch.randn(8, 4)

    def loss_fn(model, x):
        return (model(x) * torch.rand(8, 2)).square().mean()

    found = []
    for product in ("forward_over_reverse", "double_backward"):
        torch.manual_seed(5)
        found.append(measured(model, loss_fn, x, product=product))
    torch.testing.assert_close(*found)
    assert said.messages[0] == (
        "curvature by forward over reverse, not compared with double backward, as the loss is random even without "
        "dropout"
    )


def test_where_double_backward_does_not_fit_into_memory_it_measures_without_a_check(said, monkeypatch):
    expected = measured(MLP.model(), MLP.loss, MLP.batch())

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(agreement, "double_backward", lambda problem, **settings: out_of_memory)
    found = measured(MLP.model(), MLP.loss, MLP.batch(), product="forward_over_reverse")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert said.messages[1:] == [
        "the curvature is not compared with that by double backward, which does not fit into memory",
        "curvature by forward over reverse, not compared with double backward for want of memory",
    ]


def test_a_compiled_pass_that_does_not_fit_into_memory_is_no_reason_for_another(monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(engine, "compile_derivatives", lambda *_, **__: out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        measured(MLP.model(), MLP.loss, MLP.batch(), compile=True)


def test_errors_are_relative_to_all_parameters_and_to_each():
    def of(*values):
        return [torch.tensor(value) for value in values]

    expected = of([3.0, 4.0], [12.0])
    assert errors(expected, expected) == (0, 0)
    assert errors(of([3.0, 4.0], [25.0]), expected) == pytest.approx((1.0, 13 / 12))
    assert errors(of([3.0, 5.0], [12.0]), expected) == pytest.approx((1 / 13, 1 / 5))
    assert errors([None, *of([13.0])], expected) == pytest.approx((1 / 12, 1 / 12)), "what took no part is left out"
    assert errors([*of([3.0, 4.0]), torch.zeros(0)], [*of([3.0, 4.0]), torch.zeros(0)]) == (0, 0)

    zeros = of([0.0, 0.0], [0.0])
    assert errors(zeros, zeros) == (0, 0)
    assert errors(of([0.0, 0.0], [1e-9]), zeros) == (torch.inf, torch.inf)


def test_a_parameter_with_next_to_no_curvature_is_measured_by_a_thousandth_of_the_average():
    expected = [torch.full((100,), 2.0), torch.full((100,), 1e-9)]
    average = (2.0**2 / 2) ** 0.5
    overall, worst = errors([expected[0], torch.full((100,), 1e-4 * average)], expected)
    assert worst == pytest.approx(0.1, rel=1e-3)
    assert overall < 1e-4


def test_the_bias_before_a_batch_norm_has_no_curvature_but_by_rounding(quick_compiler):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(288, 4)).bfloat16()
    optimizer = AdaHessian(model.parameters())
    curvature = Curvature(model, lambda m, x: m(x).float().square().mean(), optimizer, compile=True)
    assert curvature.engine.choice(torch.randn(16, 3, 8, 8).bfloat16()).is_compiled


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([torch.float64], (1e-6, 1e-5, 1e-3)),
        ([torch.float32], (1e-2, 5e-2, 1e-3)),
        ([torch.bfloat16], (0.25, 0.5, 3e-2)),
        ([torch.float32, torch.bfloat16], (0.25, 0.5, 3e-2)),
    ],
    ids=str,
)
def test_bounds_go_by_the_precision_of_the_parameters(dtypes, expected):
    assert agreement._bounds([torch.zeros(1, dtype=dtype) for dtype in dtypes]) == expected
    elsewhere = [torch.zeros(1, dtype=dtype, device="meta") for dtype in dtypes]
    assert agreement._bounds(elsewhere) == (expected if dtypes == [torch.float64] else (0.25, 0.5, 3e-2))


@pytest.mark.parametrize(
    "arguments",
    [
        {"product": "hutchinson"},
        {"product": None},
        {"compile": "yes"},
        {"compile": 1},
        {"tangent_dtype": torch.float16},
        {"tangent_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_wrong_arguments(arguments):
    model = MLP.model()
    with pytest.raises(ValueError, match=f"Invalid {next(iter(arguments))}.*It must be"):
        Curvature(model, MLP.loss, AdaHessian(model.parameters()), **arguments)


# No trace is left ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probes", [1, 2])
def test_forward_over_reverse_leaves_no_trace(probes):
    model = Everything()
    x = torch.randn(16, 4)
    mean_square(model, x).backward()
    model.dropout.eval()  # a mode of its own
    before = snapshot(model)
    measured(model, mean_square, x, probes=probes, product="forward_over_reverse")
    assert_same(before, snapshot(model))


def test_a_compiled_pass_leaves_no_trace_and_sees_the_dropout_that_the_gradient_will_see(said):
    """The one test here with the compiler's own code."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(16, 4)
    mean_square(model, x).backward()
    before = snapshot(model)
    found = measured(model, mean_square, x, probes=2, compile=True)
    assert_same(before, snapshot(model))
    assert said.messages[-1].startswith("curvature by compiled forward over reverse, within "), said.messages
    torch.testing.assert_close(found, measured(model, mean_square, x, probes=2))


# Finite differences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [MLP, DROPOUT, BATCH_NORM], ids=str)
@pytest.mark.parametrize("probes", [1, 2])
def test_finite_differences_agree_on_smooth_networks(said, case, probes):
    model, batch = case.model(torch.float32), case.batch(torch.float32)
    found = []
    for product in ("finite_difference", "double_backward"):
        torch.manual_seed(5)
        diagonal = measured(model, case.loss, batch, probes=probes, product=product)
        found.append(torch.cat([part.flatten() for part in diagonal]))
    assert 0 < (found[0] - found[1]).norm() < 1e-2 * found[1].norm()
    assert re.fullmatch(r"curvature by finite difference, within 0?\.?\d*(e-\d+)? of double backward", said.messages[0])


def test_finite_differences_leave_no_trace():
    model = Everything()
    x = torch.randn(16, 4)
    mean_square(model, x).backward()
    model.dropout.eval()
    before = snapshot(model)
    measured(model, mean_square, x, probes=2, product="finite_difference")
    assert_same(before, snapshot(model))


def test_finite_differences_refuse_a_kink_by_name():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(CurvatureError, match=r'Relu has a kink.*Remedy: take product="double_backward"'):
        Curvature(model, mean_square, optimizer, product="finite_difference").measure(torch.randn(8, 4))
    assert optimizer.curvature_due


def test_a_kink_that_leaves_no_name_is_found_by_the_check():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 1))

    def loss_fn(model, x):
        for layer in model[:-1]:
            x = layer(x)
            x = torch.where(x > 0, x, 0)
        return model[-1](x).square().mean()

    with pytest.raises(CurvatureError, match=r"no finite difference: it differs .*Remedy: product='auto'\."):
        measured(model, loss_fn, torch.randn(64, 4), product="finite_difference")


def test_finite_differences_are_not_for_captured_steps():
    model = MLP.model()
    curvature = Curvature(model, MLP.loss, AdaHessian(model.parameters()), product="finite_difference")
    with pytest.raises(ValueError, match=r"finite differences .* cannot be captured: take another product"):
        CapturedStep(curvature)


def test_a_compiled_pass_that_fails_later_is_done_without(said, no_compiler):
    """As where a Python number in the loss changes: the compiler gives up after so many versions."""
    model, scale = MLP.model(), [1.0]

    def loss_fn(model, batch):
        if scale[0] > 2 and torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError("recompile limit reached")
        return scale[0] * MLP.loss(model, batch)

    optimizer = AdaHessian(model.parameters(), lr=0.01, eps=1e-2)
    curvature = Curvature(model, loss_fn, optimizer, compile=True)
    for scale[0] in (1.0, 2.0, 3.0, 4.0):
        assert curvature.measure(MLP.batch())
        step(optimizer, loss_fn(model, MLP.batch()))
    assert [message for message in said.messages if "from now on" in message] == [
        "from now on not compiled for this kind of batch: RuntimeError: recompile limit reached"
    ]


def test_rounding_that_has_no_effect_is_told_of(said):
    measured(MLP.model(), MLP.loss, MLP.batch(), tangent_dtype=torch.bfloat16)
    assert "tangent_dtype has no effect, as the pass is not compiled" in said.messages
