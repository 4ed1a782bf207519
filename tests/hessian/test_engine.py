"""The engine: what it chooses and logs, and that each way finds the same."""

import copy
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from requested import assert_same, derivatives, request_for, snapshot, squares
from test_isolation import Everything
from torch import nn
from torch.utils.checkpoint import checkpoint

from adahessian.base.errors import CurvatureError
from adahessian.hessian import check, compiled, double_backward, engine
from adahessian.hessian.compiled import CompiledPass
from adahessian.hessian.engine import Engine
from adahessian.hessian.isolation import random_state_kept
from cases import ATTENTION, BATCH_NORM, CONVOLUTION, MLP, RECURRENT, REGRESSION, Case

DROPOUT = Case("dropout", lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 3)), (16, 5))
IMAGES = Case(
    "images with everything",
    lambda: nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.Dropout2d(0.2)),
        *(nn.Conv2d(4, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    ),
    (8, 2, 6, 6),
)
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture
def no_compiler(monkeypatch):
    """Run functions uncompiled where they would be compiled."""
    monkeypatch.setattr(compiled, "compile_derivatives", lambda function, *_, **__: function)


@pytest.fixture
def wrong_product(monkeypatch):
    """The product of one parameter is wrong in the compiled pass."""
    original = compiled._FunctionalLoss.derivatives

    def wrong(self, *args):
        loss, gradients, products, after = original(self, *args)
        return loss, gradients, [1.3 * products[0], *products[1:]], after

    monkeypatch.setattr(compiled._FunctionalLoss, "derivatives", wrong)


@pytest.fixture
def passes(monkeypatch):
    """The number of passes by double backward, and of compiled ones."""
    count = SimpleNamespace(backward=0, compiled=0)
    backward, functional = double_backward.double_backward, compiled._FunctionalLoss.derivatives

    def count_backward(*args, **kwargs):
        count.backward += 1
        return backward(*args, **kwargs)

    def count_functional(*args):
        count.compiled += 1
        return functional(*args)

    for module in (engine, check):
        monkeypatch.setattr(module, "double_backward", count_backward)
    monkeypatch.setattr(compiled._FunctionalLoss, "derivatives", count_functional)
    return count


def make(model, loss_fn, compile=None, product_dtype=None):
    return Engine(model, loss_fn, compile=compile, product_dtype=product_dtype)


def measured(model, loss_fn, batch, *, params=None, num_probes=1, **settings):
    request = request_for(model.parameters() if params is None else params, num_probes)
    return make(model, loss_fn, **settings).measure(batch, request)


# What is chosen ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [({}, "compile=True compiles on this device too"), ({"compile": False}, "compile=False")],
)
def test_double_backward_is_the_choice_on_a_cpu_and_logged_once(said, settings, why):
    for _ in range(2):
        measured(MLP.model(), MLP.loss, MLP.batch(), **settings)
    assert said.messages == [f"Curvature by double backward, not compiled: {why}"]
    assert said.records[0].levelname == "INFO"


@pytest.mark.parametrize(
    ("compile", "elements", "has_triton", "why"),
    [
        (None, 99_999, True, "fewer than 100000 parameters"),
        (None, 100_000, True, None),
        (None, 100_000, False, "Triton"),
        (True, 10, True, None),
        (True, 10, False, "Triton"),
        (False, 100_000, True, "compile=False"),
    ],
)
def test_on_a_gpu_models_that_repay_it_are_compiled(monkeypatch, compile, elements, has_triton, why):
    monkeypatch.setattr(engine, "has_triton", lambda: has_triton)
    device = torch.device("cuda")
    param = SimpleNamespace(device=device, numel=lambda: elements, is_complex=lambda: False)
    found = make(SimpleNamespace(parameters=lambda: [param]), squares, compile=compile).why_not_compiled([param])
    assert found is None if why is None else why in found
    assert "requires a gradient" in make(nn.Linear(1, 1), squares, compile=compile).why_not_compiled([])


def test_without_a_compiler_it_measures_as_ever_and_warns(said, monkeypatch, tmp_path):
    from torch._inductor import cpp_builder, exc

    def none_found(*_):
        raise exc.InvalidCxxCompiler

    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    model, batch = nn.Linear(3, 2), torch.randn(7, 3)
    found = measured(model, squares, batch, compile=True)
    torch.testing.assert_close(found, derivatives(model, squares, batch), rtol=0, atol=0)
    assert said.records[-1].levelname == "WARNING"
    assert "InvalidCxxCompiler" in said.messages[-1]


@pytest.mark.parametrize("compile", [None, True])
def test_parameters_that_are_not_the_models(compile):
    model, (x, _) = REGRESSION.model(), REGRESSION.batch()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def loss_fn(model, x):
        return (scale**2 * model(x)).square().mean()

    params = [*model.parameters(), scale]
    found = measured(model, loss_fn, x, params=params, compile=compile)
    assert all(product.any() for product in found.products[0])


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_complex_parameters(said):
    model, x = nn.Linear(3, 2, dtype=torch.complex128), torch.randn(8, 3, dtype=torch.complex128)

    def loss_fn(model, x):
        return model(x).abs().square().mean()

    expected = measured(model, loss_fn, x)
    torch.testing.assert_close(measured(model, loss_fn, x, compile=True), expected, rtol=0, atol=0)
    assert expected.products[0][0].dtype == torch.complex128
    assert "complex parameters" in said.messages[-1]


def loss_with_a_graph_break(model, batch):
    torch._dynamo.graph_break()
    return MLP.loss(model, batch)


def loss_that_reads_a_number(model, batch):
    return MLP.loss(model, batch) if batch[0].sum().item() < 1e9 else None


@pytest.mark.parametrize(
    ("case", "loss_fn"),
    [(MLP, loss_with_a_graph_break), (MLP, loss_that_reads_a_number), (RECURRENT, RECURRENT.loss)],
    ids=["graph break", "number", "recurrent"],
)
@pytest.mark.usefixtures("quick_compiler")
def test_what_cannot_be_compiled_is_measured_without_and_the_reason_is_logged(said, case, loss_fn):
    model, batch = case.model(), case.batch()
    found = [measured(model, loss_fn, batch, compile=compile) for compile in (False, True)]
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert said.records[-1].levelname == "WARNING"
    assert re.search(r"not compiled: (Unsupported|UserError): .+", said.messages[-1])


@pytest.mark.usefixtures("no_compiler")
def test_other_parameters_lead_to_another_choice():
    model, batch = MLP.model(), MLP.batch()
    chooser = make(model, MLP.loss, compile=True)
    passes_by_choice = []
    for is_frozen in (False, True, True, False):
        model[0].requires_grad_(not is_frozen)
        params = [param for param in model.parameters() if param.requires_grad]
        found = chooser.measure(batch, request_for(params))
        expected = measured(model, MLP.loss, batch, params=params)
        torch.testing.assert_close(found.products, expected.products, **CLOSE)
        passes_by_choice.append(chooser._compiled)
    assert passes_by_choice[1] is passes_by_choice[2]
    assert len(set(map(id, passes_by_choice))) == 3


@pytest.mark.usefixtures("quick_compiler")
def test_parameters_that_are_new_tensors_in_each_pass_are_compiled_once(said):
    """As those that FSDP2 gathers."""
    model, batch = MLP.model(), MLP.batch()
    chooser = make(model, MLP.loss, compile=True)
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        for module in model:
            for name, param in list(module._parameters.items()):
                module._parameters[name] = nn.Parameter(param.detach() * 1.1)
        found = chooser.measure(batch, request_for(model.parameters()))
        expected = measured(model, MLP.loss, batch)
        torch.testing.assert_close(found.products, expected.products, **CLOSE)
    assert chooser.description.startswith("compiled")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert sum("Compiling" in message for message in said.messages) == 1


def test_a_batch_of_another_shape_is_measured_without_the_compiler(no_compiler, passes):
    model, (x, y) = MLP.model(), MLP.batch()
    chooser, request = make(model, MLP.loss, compile=True), request_for(model.parameters())
    for batch, backward in (((x, y), 1), ((x[:5], y[:5]), 2), ((x, y), 2)):
        found = chooser.measure(batch, request)
        assert passes.backward == backward, "the first is the check"
        torch.testing.assert_close(found.products, derivatives(model, MLP.loss, batch).products, **CLOSE)


@pytest.mark.usefixtures("no_compiler")
def test_another_shape_is_compiled_for_when_it_has_come_often(passes):
    model, (x, y) = MLP.model(), MLP.batch()
    chooser, request = make(model, MLP.loss, compile=True), request_for(model.parameters())
    chooser.measure((x, y), request)
    for _ in range(49):
        chooser.measure((x[:5], y[:5]), request)
    passes.backward = 0
    chooser.measure((x[:5], y[:5]), request)
    assert passes.backward == 0


def test_a_shape_that_cannot_be_compiled_for_is_measured_without_the_compiler(said, monkeypatch):
    def as_it_is_except_for_five(function, *_, **__):
        def derivatives(params, buffers, probe, batch):
            if len(batch[0]) == 5:
                tried.append(5)
                raise RuntimeError("no code for five")
            return function(params, buffers, probe, batch)

        return derivatives

    monkeypatch.setattr(compiled, "compile_derivatives", as_it_is_except_for_five)
    tried = []
    model, (x, y) = MLP.model(), MLP.batch()
    chooser, request = make(model, MLP.loss, compile=True), request_for(model.parameters())
    chooser.measure((x, y), request)
    for _ in range(52):
        found = chooser.measure((x[:5], y[:5]), request)
    assert len(tried) == 1
    assert [message for message in said.messages if "no code for five" in message] == [
        "The curvature pass is not compiled for one shape of batch: RuntimeError: no code for five"
    ]
    torch.testing.assert_close(found, derivatives(model, MLP.loss, (x[:5], y[:5])), rtol=0, atol=0)
    assert chooser.pass_for((x[:5], y[:5]), request) == chooser._double_backward
    assert chooser.pass_for((x, y), request) is chooser._compiled
    assert chooser.pass_for((x[:6], y[:6]), request) is chooser._compiled, "at once"


@pytest.mark.usefixtures("no_compiler")
def test_batches_that_cannot_be_compared_are_measured_without_the_compiler(said):
    class Rest:
        x = torch.randn(8, 3)

    model = nn.Linear(3, 2)
    chooser, request = make(model, lambda m, batch: squares(m, batch.x), compile=True), request_for(model.parameters())
    for _ in range(2):
        assert chooser.measure(Rest(), request).products[0][0].any()
    assert any("Rest" in message for message in said.messages)


def test_the_pass_for_a_graph_is_the_one_that_is_used(no_compiler):
    for compile, case in ((True, MLP), (False, DROPOUT)):
        model, batch = case.model(), case.batch()
        chooser, request = make(model, case.loss, compile=compile), request_for(model.parameters())
        state = torch.get_rng_state()
        compute = chooser.pass_for(batch, request)
        assert torch.equal(torch.get_rng_state(), state)
        assert chooser.description.startswith("compiled") is compile
        torch.testing.assert_close(
            compute(batch, request, False), chooser.derivatives(batch, request), **CLOSE
        ) if compile else None
        assert (compute == chooser._compiled) is compile


def test_a_compiled_pass_that_fails_later_is_not_used_again(said, no_compiler):
    """As when a Python number in the loss changes: the compiler gives up after eight versions."""
    model, scale = MLP.model(), [1.0]

    def loss_fn(model, batch):
        if scale[0] > 2 and torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError("recompile limit reached")
        return scale[0] * MLP.loss(model, batch)

    chooser, request = make(model, loss_fn, compile=True), request_for(model.parameters())
    products = []
    for scale[0] in (1.0, 2.0, 3.0, 4.0):
        products.append(chooser.measure(MLP.batch(), request).products[0][0] / scale[0])
    torch.testing.assert_close(products[1:], 3 * products[:1])
    assert len([message for message in said.messages if "recompile limit" in message]) == 1


def test_rounding_without_effect_is_warned_of(said):
    measured(MLP.model(), MLP.loss, MLP.batch(), product_dtype=torch.bfloat16)
    assert any("product_dtype has no effect" in message for message in said.messages)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("compile", [True, False])
def test_copies_choose_again_and_find_the_same(compile):
    model, batch = MLP.model(), MLP.batch()
    chooser = make(model, squares_of_first, compile=compile)
    found = chooser.measure(batch, request_for(model.parameters()))
    for each in (copy.deepcopy(chooser), pickle.loads(pickle.dumps(chooser))):
        assert each.description == "not chosen yet"
        assert each._model is not model
        torch.testing.assert_close(each.measure(batch, request_for(each._model.parameters())), found)
        assert each.description == chooser.description


def squares_of_first(model, batch):
    return squares(model, batch[0])


def test_lazy_parameters_get_their_shapes_in_the_first_pass():
    model = nn.Sequential(nn.LazyLinear(2), nn.Tanh(), nn.Linear(2, 1))
    found = measured(model, squares, torch.randn(5, 3))
    assert [product.shape for product in found.products[0]] == [(2, 3), (2,), (1, 2), (1,)]


# All ways find the same ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [MLP, REGRESSION, CONVOLUTION, BATCH_NORM, ATTENTION, DROPOUT, IMAGES], ids=str)
@pytest.mark.parametrize("probes", [1, 3])
@pytest.mark.usefixtures("no_compiler")
def test_the_function_that_is_compiled_agrees_with_double_backward(case, probes):
    """With dropout, this says that all probes see the same mask."""
    model, batch = case.model(), case.batch()
    expected = derivatives(model, case.loss, batch, num_probes=probes)
    with random_state_kept(model):
        found = measured(model, case.loss, batch, num_probes=probes, compile=True)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("case", [MLP, CONVOLUTION, BATCH_NORM, ATTENTION, DROPOUT, IMAGES], ids=str)
@pytest.mark.usefixtures("quick_compiler")
def test_the_compiled_pass_agrees_with_double_backward(said, case):
    model, batch = case.model(), case.batch()
    chooser, request = make(model, case.loss, compile=True), request_for(model.parameters(), 2)
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        torch.manual_seed(3)
        found = chooser.measure(batch, request)
        assert chooser.description.startswith("compiled forward over reverse, within "), said.messages
        torch.testing.assert_close(found, derivatives(model, case.loss, batch, num_probes=2), **CLOSE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("compile", "first", "later"), [(False, (1, 0), (1, 0)), (True, (1, 2), (0, 1))])
def test_a_measurement_is_one_pass_and_the_first_a_check_too(passes, compile, first, later, no_compiler):
    model, batch = MLP.model(), MLP.batch()
    chooser, request = make(model, MLP.loss, compile=compile), request_for(model.parameters())
    for expected in (first, later, later):
        passes.backward = passes.compiled = 0
        chooser.measure(batch, request)
        assert (passes.backward, passes.compiled) == expected


@pytest.mark.usefixtures("quick_compiler")
def test_another_order_of_memory_changes_neither_results_nor_the_order_of_the_parameters():
    model, batch = CONVOLUTION.model(), CONVOLUTION.batch()
    loss = compiled._FunctionalLoss(model, CONVOLUTION.loss, list(model.parameters()))
    function = compiled.compile_derivatives(loss.derivatives, None, channels_last=True)
    expected = derivatives(model, CONVOLUTION.loss, batch)
    for order in (torch.contiguous_format, torch.channels_last):
        kernel, *others = (param.detach() for param in model.parameters())
        params = [kernel.contiguous(memory_format=order), *others]
        with torch.no_grad():
            _, gradients, products, _ = function(params, {}, expected.probes[0], batch)
        torch.testing.assert_close([gradients, products], [expected.gradients, expected.products[0]], **CLOSE)
        for found in (gradients, products):
            assert [tensor.stride() for tensor in found] == [param.stride() for param in params]


@pytest.mark.parametrize("needs_marks", [True, False])
def test_a_gradient_that_nobody_needs_is_left_out(quick_compiler, needs_marks):
    model, batch = CONVOLUTION.model(), CONVOLUTION.batch()
    request = request_for(model.parameters())
    settings = {"needs_gradient": False, "needs_marks": needs_marks}
    found = CompiledPass(model, CONVOLUTION.loss, request.params, None, **settings)(batch, request, False)
    expected = double_backward.double_backward(model, CONVOLUTION.loss, batch, request)
    torch.testing.assert_close(found.products[0], expected.products[0], **CLOSE)
    marks = expected.gradients if needs_marks else expected.products[0]
    torch.testing.assert_close(found.gradients, marks, **CLOSE)


@pytest.mark.parametrize("is_image", [True, False])
@pytest.mark.parametrize("is_cuda", [True, False])
def test_images_on_a_gpu_are_computed_in_another_order_of_memory(monkeypatch, is_image, is_cuda):
    seen = []
    monkeypatch.setattr(compiled, "compile_derivatives", lambda *_, channels_last, **__: seen.append(channels_last))
    model = nn.Conv2d(1, 1, 1, bias=False) if is_image else nn.Linear(1, 1, bias=False)
    monkeypatch.setattr(type(model.weight), "is_cuda", is_cuda)
    CompiledPass(model, squares, [model.weight], None)
    assert seen == [is_image and is_cuda]


class TwoHeads(nn.Module):
    """Only one of them is used, unless the batch says otherwise."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        y = self.first(x).tanh()
        if torch._C._functorch.peek_interpreter_stack() is None and not x.any():
            return y
        return y + self.second(x).sin() * x.any()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.usefixtures("no_compiler")
def test_a_parameter_that_takes_no_part_has_neither_gradient_nor_products(compile):
    model = TwoHeads()
    chooser, request = make(model, squares, compile=compile), request_for(model.parameters())
    found = chooser.measure(torch.zeros(4, 3), request)
    assert found.gradients[2:] == found.products[0][2:] == [None, None]
    assert None not in (*found.gradients[:2], *found.products[0][:2])
    found = chooser.measure(torch.ones(4, 3), request)
    assert None not in (*found.gradients, *found.products[0]), "a gradient proves a part in the loss"


# The check -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("wrong_product", "quick_compiler")
@pytest.mark.parametrize("case", [MLP, DROPOUT], ids=str)
def test_a_wrong_product_is_not_used(said, case):
    model, batch = case.model(), case.batch()
    expected = derivatives(model, case.loss, batch)
    with random_state_kept(model):
        found = measured(model, case.loss, batch, compile=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert said.messages[-1].startswith("Curvature by double backward, not compiled: it differs")
    assert "30.0% for one parameter" in said.messages[-1]
    assert said.records[-1].levelname == "WARNING"


@pytest.mark.usefixtures("no_compiler")
def test_parameters_that_the_loss_reads_from_elsewhere_are_noticed():
    """A function of the parameters does not know of these."""
    model, batch = MLP.model(), MLP.batch()
    own = list(model.parameters())

    def loss_fn(model, batch):
        return MLP.loss(model, batch) + sum(param.square().sum() for param in own)

    found = measured(model, loss_fn, batch, compile=True)
    torch.testing.assert_close(found, derivatives(model, loss_fn, batch))


@pytest.mark.usefixtures("no_compiler")
def test_dropout_is_compared_without_and_batch_norm_as_it_is(said):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 1))
    modes = []

    def loss_fn(model, x):
        modes.append((model[1].training, model[3].training))
        return squares(model, x)

    measured(model, loss_fn, torch.randn(16, 4), compile=True)
    assert all(norm for norm, _ in modes)
    assert [dropout for _, dropout in modes].count(False) >= 2, "double backward and the pass itself"
    assert modes[-1] == (True, True), "the measurement"
    assert all(module.training for module in model.modules())
    assert "compared without the compiler" in said.messages[-1]


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("loss_fn", "why"),
    [
        (lambda model, x: (model(x) * torch.rand(8, 2)).square().mean(), "random even without dropout"),
        (lambda model, x: (F_dropout(model(x)) if model.training else (None,)).square().mean(), "without dropout"),
    ],
)
def test_losses_that_cannot_be_compared(said, loss_fn, why):
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    expected = derivatives(model, loss_fn, x)
    with random_state_kept(model):
        torch.testing.assert_close(measured(model, loss_fn, x, compile=True), expected)
    assert why in said.messages[-1]
    assert "compiled forward over reverse, not compared" in said.messages[-1]


F_dropout = nn.functional.dropout


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_batch_that_is_not_finite_is_blamed_for_nothing(said, request, is_right, value):
    if not is_right:
        request.getfixturevalue("wrong_product")
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(8, 4)
    chooser, asked = make(model, squares, compile=True), request_for(model.parameters())
    for _ in range(2):
        assert chooser.measure(x * value, asked).loss.isnan()
        assert "not compared with double backward yet: the loss is not finite" in chooser.description
    blames = [record for record in said.records if not record.getMessage().startswith("Compiling")]
    assert all(record.levelname == "INFO" for record in blames)
    found = chooser.measure(x, asked)
    torch.testing.assert_close(found, derivatives(model, squares, x))
    assert ("within" in chooser.description) is is_right
    assert ("it differs" in chooser.description) is not is_right


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("no memory left")


@pytest.mark.usefixtures("no_compiler")
def test_without_memory_for_double_backward_the_compiled_pass_is_not_checked(said, monkeypatch):
    expected = derivatives(MLP.model(), MLP.loss, MLP.batch())
    monkeypatch.setattr(check, "double_backward", out_of_memory)
    calls = []
    monkeypatch.setattr(
        engine, "compare", lambda *args, **settings: calls.append(1) or check.compare(*args, **settings)
    )
    chooser = make(model := MLP.model(), MLP.loss, compile=True)
    for _ in range(2):
        found = chooser.measure(MLP.batch(), request_for(model.parameters()))
        torch.testing.assert_close(found, expected, **CLOSE)
    assert "does not fit into memory" in chooser.description
    assert len(calls) == 1


def test_running_out_of_memory_is_no_reason_for_double_backward(monkeypatch):
    monkeypatch.setattr(compiled, "compile_derivatives", lambda *_, **__: out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        measured(MLP.model(), MLP.loss, MLP.batch(), compile=True)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("compile", [True, False])
def test_errors_of_the_user_are_raised_and_change_nothing(compile):
    def failing(model, batch):
        raise KeyError("the user's own")

    model, batch = MLP.model(), MLP.batch()
    before = snapshot(model)
    with pytest.raises(KeyError, match="the user's own"):
        measured(model, failing, batch, compile=compile)
    with pytest.raises(CurvatureError, match="shape"):
        measured(model, lambda model, batch: model(batch[0]), batch, compile=compile)
    assert_same(before, snapshot(model))


def test_the_graph_is_searched_on_the_first_batch_and_again_for_other_parameters(monkeypatch):
    searched = []
    monkeypatch.setattr(double_backward, "check_twice_differentiable", lambda *_, **__: searched.append(1))
    model, batch = MLP.model(), MLP.batch()
    chooser = make(model, MLP.loss)
    for params, count in ((model, 1), (model, 1), (model[2], 2), (model[2], 2)):
        chooser.measure(batch, request_for(params.parameters()))
        assert len(searched) == count


def test_the_bias_before_a_batch_norm_has_no_curvature_except_by_rounding(quick_compiler):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(288, 4)).bfloat16()
    chooser = make(model, lambda m, x: m(x).float().square().mean(), compile=True)
    chooser.measure(torch.randn(16, 3, 8, 8).bfloat16(), request_for(model.parameters()))
    assert chooser.description.startswith("compiled"), chooser.description


# No trace is left ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probes", [1, 2])
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.usefixtures("no_compiler")
def test_measuring_leaves_no_trace(probes, compile):
    model, x = Everything(), torch.randn(16, 4)
    squares(model, x).backward()
    model.dropout.eval()  # a mode of its own
    chooser, request = make(model, squares, compile=compile), request_for(model.parameters(), probes)
    for _ in range(2):
        before = snapshot(model)
        chooser.measure(x, request)
        assert_same(before, snapshot(model))


@pytest.mark.parametrize("probes", [1, 2])
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.usefixtures("no_compiler")
def test_a_step_of_training_keeps_buffers_and_random_states(probes, compile):
    model, x = BATCH_NORM.model(), BATCH_NORM.batch()
    chooser, request = make(model, BATCH_NORM.loss, compile=compile), request_for(model.parameters(), probes)
    expected = copy.deepcopy(model)
    BATCH_NORM.loss(expected, x)
    addresses = [buffer.data_ptr() for buffer in model.buffers()]
    chooser.derivatives(x, request, keep_buffers=True)
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    assert [buffer.data_ptr() for buffer in model.buffers()] == addresses

    model = DROPOUT.model()
    chooser, request = make(model, DROPOUT.loss, compile=compile), request_for(model.parameters(), probes)
    batch = DROPOUT.batch()
    torch.manual_seed(1)
    DROPOUT.loss(model, batch)
    state = torch.get_rng_state()
    for _ in range(2):
        torch.manual_seed(1)
        chooser.derivatives(batch, request, keep_buffers=True)
        assert torch.equal(torch.get_rng_state(), state)


def test_compiled_code_leaves_no_trace_and_sees_the_dropout_that_the_gradient_will_see():
    """The one test here with the code of the compiler."""
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)), torch.randn(16, 4)
    squares(model, x).backward()
    before = snapshot(model)
    chooser = make(model, squares, compile=True)
    found = chooser.measure(x, request_for(model.parameters(), 2))
    assert_same(before, snapshot(model))
    assert chooser.description.startswith("compiled forward over reverse, within ")
    torch.testing.assert_close(found, derivatives(model, squares, x, num_probes=2))


def test_checkpointed_layers_that_cannot_be_compiled_leave_nothing_open(said):
    def loss_fn(model, x):
        return checkpoint(model, x, use_reentrant=False).square().mean()

    torch._dynamo.reset()
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    found = measured(model, loss_fn, x, compile=True)
    if said.messages[-1].startswith("Curvature by compiled"):  # torch 2.11 compiles them
        torch.testing.assert_close(found, derivatives(model, loss_fn, x))
        return
    assert "saved tensor hooks" in said.messages[-1]
    torch.testing.assert_close(found, derivatives(model, loss_fn, x), rtol=0, atol=0)
