"""Bad input and faults: a clear error before anything is changed, and nothing is lost."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from adahessian import AdaHessian, Curvature, CurvatureError, diagnose
from cases import MLP, flat_parameters, train


def quadratic_step(optimizer, *params, power=2):
    optimizer.zero_grad()
    sum((param**power).sum() for param in params).backward(create_graph=optimizer.curvature_due)
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lr", [-1.0, math.nan, "fast", None, torch.tensor([1.0, 2.0]), torch.tensor(-1.0)]),
        ("betas", [(1.0, 0.999), (0.9, -0.1), (0.9,), 0.9, (0.9, 1.0), ("a", "b"), (math.nan, 0.9)]),
        ("eps", [-1e-8, math.nan, math.inf, "small"]),
        ("weight_decay", [-0.1, math.nan, None]),
        ("hessian_power", [-0.1, 1.1, math.nan, "half"]),
        ("block_size", [0, -1, 2.0, True, None]),
        ("num_probes", [0, 1.5]),
        ("curvature_every", [0, -3, 1.5]),
        ("curvature_warmup", [-1, 0.5]),
        ("seed", [0.5, None, "seed"]),
        ("averaging", ["rows", None, 3]),
        ("signed", ["yes", 1, None]),
        ("maximize", ["yes", None]),
        ("steady_start", ["yes", 1, None]),
        ("capturable", ["yes", 0]),
        ("fused", ["yes", 1]),
    ],
)
def test_wrong_options_are_rejected_by_name(name, values):
    param = nn.Parameter(torch.ones(2))
    for value in values:
        with pytest.raises(ValueError, match=name):
            AdaHessian([param], **{name: value})
        with pytest.raises(ValueError, match=name):
            AdaHessian([{"params": [param], name: value}])
        optimizer = AdaHessian([nn.Parameter(torch.ones(2))])
        with pytest.raises(ValueError, match=name):
            optimizer.add_param_group({"params": [param], name: value})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "hessian_power"])
def test_numbers_that_are_booleans_are_rejected(name):
    with pytest.raises(ValueError, match=name):
        AdaHessian([nn.Parameter(torch.ones(2))], **{name: True})


def test_an_unknown_argument_is_rejected():
    with pytest.raises(TypeError, match="spatial_average_block_size"):
        AdaHessian([nn.Parameter(torch.ones(2))], spatial_average_block_size=4)


def test_a_step_without_any_curvature_says_what_to_call():
    model, batch = MLP.model(), MLP.batch()
    before = flat_parameters(model)
    optimizer = AdaHessian(model.parameters())
    MLP.loss(model, batch).backward()
    with pytest.raises(CurvatureError, match="measure"):
        optimizer.step()
    assert torch.equal(flat_parameters(model), before)
    train(MLP, model, optimizer, batch, 1, "object")
    assert not torch.equal(flat_parameters(model), before)


@pytest.mark.parametrize("lr", [0.0, 0.1, torch.tensor(0.0)])
def test_zero_gradients_on_a_fresh_optimizer_make_all_state_and_move_nothing(lr):
    model = MLP.model()
    before = flat_parameters(model)
    optimizer = AdaHessian(model.parameters(), lr=lr, weight_decay=0.1)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(flat_parameters(model), before)
    keys = {"step", "exp_avg", "hessian_rms", "measurements", "dropped"}
    assert all(set(optimizer.state[param]) == keys for param in model.parameters())
    assert optimizer.curvature_due
    # The training that follows is the same as without that step.
    optimizer.param_groups[0]["lr"] = 0.1
    other = MLP.model()
    train(MLP, model, optimizer, MLP.batch(), 3, "object")
    train(MLP, other, AdaHessian(other.parameters(), lr=0.1, weight_decay=0.1), MLP.batch(), 3, "object")
    assert torch.equal(flat_parameters(model), flat_parameters(other))


def test_a_warm_up_from_lr_zero_measures_as_usual():
    model, batch = MLP.model(), MLP.batch()
    before = flat_parameters(model)
    optimizer = AdaHessian(model.parameters(), lr=0.0)
    train(MLP, model, optimizer, batch, 2, "graph")
    assert torch.equal(flat_parameters(model), before)
    assert all(state["measurements"] == 2 for state in optimizer.state.values())


def test_state_is_complete_after_the_first_step_and_keeps_its_keys():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), curvature_every=2)
    train(MLP, model, optimizer, batch, 1, "object")
    keys = [set(state) for state in optimizer.state.values()]
    train(MLP, model, optimizer, batch, 4, "object")
    assert [set(state) for state in optimizer.state.values()] == keys
    assert len(keys) == 4


def test_sparse_gradients_are_rejected():
    embedding = nn.Embedding(5, 3, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = AdaHessian(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse_lr"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="sparse_lr"):
        Curvature(embedding, lambda model, x: model(x).square().sum(), optimizer).measure(torch.tensor([1, 2]))
    assert torch.equal(embedding.weight, before)
    assert not optimizer.state


def test_a_state_that_does_not_fit_is_rejected_before_it_is_loaded():
    optimizer = AdaHessian([nn.Parameter(torch.ones(4, 6))], block_size=2)
    saved = AdaHessian([param := nn.Parameter(torch.ones(4, 5))], block_size=2)
    quadratic_step(saved, param)
    with pytest.raises(ValueError, match="exp_avg"):
        optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.state
    broken = copy.deepcopy(saved.state_dict())
    broken["param_groups"][0]["block_size"] = 5
    with pytest.raises(ValueError, match="hessian_rms"):
        saved.load_state_dict(broken)
    assert saved.param_groups[0]["block_size"] == 2


@pytest.mark.parametrize("change", [{"block_size": 3}, {"averaging": "none"}], ids=str)
def test_blocks_that_change_between_steps_are_rejected_before_the_step(change):
    param = nn.Parameter(torch.ones(4, 6))
    optimizer = AdaHessian([param], block_size=2)
    quadratic_step(optimizer, param)
    before = param.detach().clone()
    optimizer.param_groups[0].update(change)
    with pytest.raises(RuntimeError, match="hessian_rms"):
        quadratic_step(optimizer, param)
    assert torch.equal(param, before)


def test_curvature_that_does_not_fit_is_rejected():
    param = nn.Parameter(torch.ones(3))
    optimizer = AdaHessian([param])
    for diagonal, gradients, error, name in (
        ({torch.ones(3): torch.ones(3)}, None, ValueError, "diagonal"),
        ({param: torch.ones(4)}, None, ValueError, "diagonal"),
        ({param: 2.0}, None, ValueError, "diagonal"),
        ({"weight": torch.ones(3)}, None, ValueError, "diagonal"),
        ([torch.ones(3)], None, TypeError, "diagonal"),
        ({param: torch.ones(3)}, {}, ValueError, "gradients"),
        ({param: torch.ones(3)}, {param: torch.ones(4)}, ValueError, "gradients"),
    ):
        with pytest.raises(error, match=name):
            optimizer.set_curvature(diagonal, gradients)
    assert optimizer.curvature_due


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_a_measurement_that_is_not_finite_is_dropped_and_counted(value):
    """1e30 is finite, but its square is not in float32."""
    bad, good = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    optimizer = AdaHessian([bad, good], lr=0.1, block_size=2)

    def step(curvature_of_bad):
        bad.grad = good.grad = torch.ones(2, 3)
        optimizer.set_curvature({bad: curvature_of_bad, good: torch.full((2, 3), 2.0)})
        optimizer.step()

    spoiled = torch.full((2, 3), 2.0)
    spoiled[1, 2] = value
    step(spoiled)  # the first one: the parameter has no curvature yet, and stands still
    assert torch.equal(bad, torch.ones(2, 3))
    step(torch.full((2, 3), 2.0))
    step(spoiled)
    assert optimizer.state[bad]["measurements"] == 1
    assert optimizer.state[good]["measurements"] == 3
    assert torch.equal(optimizer.state[bad]["hessian_rms"], torch.full((2, 2), 2.0))
    assert optimizer.state[bad]["dropped"] == 2
    assert optimizer.state[good]["dropped"] == 0
    assert bad.isfinite().all()


def test_nan_in_a_batch_names_the_batch(said):
    """The learning rate is the second suspect."""
    model, (x, y) = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters())
    curvature = Curvature(model, MLP.loss, optimizer)
    x[0, 0] = math.nan
    curvature.measure((x, y))
    assert "loss_fn" in said.text
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all(param.isfinite().all() for param in model.parameters())
    with pytest.warns(UserWarning, match="batch"):
        numbers = diagnose(optimizer)
    assert numbers["dropped_measurements"] == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert diagnose(optimizer)["dropped_measurements"] == 4, "the same count warns once"


def test_a_nan_gradient_behaves_as_in_adamw():
    results = []
    for make in (AdaHessian, torch.optim.AdamW):
        first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = make([first, second], lr=0.1)
        if make is AdaHessian:
            optimizer.set_curvature({first: torch.ones(2), second: torch.ones(2)})
        first.grad, second.grad = torch.tensor([math.nan, 1.0]), torch.ones(2)
        optimizer.step()
        results.append([param.isnan().tolist() for param in (first, second)])
    assert results[0] == results[1] == [[True, False], [False, False]]


def test_clipping_acts_on_the_gradient_and_not_on_the_curvature():
    rms = []
    for clip in (False, True):
        model, batch = MLP.model(), MLP.batch()
        optimizer = AdaHessian(model.parameters())
        MLP.loss(model, batch).backward(create_graph=True)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        rms.append([state["hessian_rms"] for state in optimizer.state.values()])
    torch.testing.assert_close(*rms, rtol=0, atol=0)


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
def test_lr_zero_on_a_fresh_optimizer_needs_no_curvature(lr):
    param = nn.Parameter(torch.ones(3))
    optimizer = AdaHessian([param], lr=lr, weight_decay=0.1)
    param.grad = torch.ones(3)
    optimizer.step()
    assert param.eq(1).all()
    assert optimizer.state[param]["step"] == 0
    assert optimizer.curvature_due


class OnceDifferentiable(torch.autograd.Function):
    """The square, whose backward cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def fail_in_the_closure(optimizer, good, bad):
    def closure():
        raise RuntimeError("no loss")

    optimizer.step(closure)


def fail_in_the_second_derivative(optimizer, good, bad):
    optimizer.zero_grad()
    (good.square().sum() + OnceDifferentiable.apply(bad).square().sum()).backward(create_graph=True)
    optimizer.step()


def fail_on_a_sparse_gradient(optimizer, good, bad):
    good.grad, bad.grad = torch.ones(2), torch.ones(2).to_sparse()
    optimizer.step()


def fail_on_the_shape_of_a_state(optimizer, good, bad):
    optimizer.state[bad]["exp_avg"] = torch.zeros(3)
    step_with_curvature(optimizer, good, bad)


def fail_on_the_dtype_of_a_state(optimizer, good, bad):
    optimizer.state[bad]["exp_avg"] = torch.zeros(2, dtype=torch.complex64)
    step_with_curvature(optimizer, good, bad)


def fail_on_the_state_of_a_parameter_in_the_same_group(optimizer, good, bad):
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
    optimizer.state[bad]["hessian_rms"] = torch.ones(3)
    step_with_curvature(optimizer, good, bad)


def step_with_curvature(optimizer, *params):
    optimizer.set_curvature({param: torch.ones(2) for param in params})
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()


@pytest.mark.parametrize(
    "fail",
    [
        fail_in_the_closure,
        fail_in_the_second_derivative,
        fail_on_a_sparse_gradient,
        fail_on_the_shape_of_a_state,
        fail_on_the_dtype_of_a_state,
        fail_on_the_state_of_a_parameter_in_the_same_group,
    ],
)
def test_an_error_in_a_step_changes_nothing(fail):
    good, bad = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([{"params": [good]}, {"params": [bad]}])
    quadratic_step(optimizer, good, bad)
    place = [param.detach().clone() for param in (good, bad)]
    known = copy.deepcopy(dict(optimizer.state[good]))
    names = ("steps", "measurements", "staleness")
    counts = [group[name] for group in optimizer.param_groups for name in names]
    with pytest.raises(RuntimeError):
        fail(optimizer, good, bad)
    assert torch.equal(good, place[0])
    assert torch.equal(bad, place[1])
    torch.testing.assert_close(dict(optimizer.state[good]), known, rtol=0, atol=0)
    assert [group[name] for group in optimizer.param_groups for name in names] == counts


def test_a_step_that_failed_can_be_taken_again():
    runs = []
    for fails in (False, True):
        good, bad = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = AdaHessian([{"params": [good]}, {"params": [bad]}])
        quadratic_step(optimizer, good, bad)
        if fails:
            with pytest.raises(RuntimeError, match="sparse"):
                fail_on_a_sparse_gradient(optimizer, good, bad)
        quadratic_step(optimizer, good, bad)
        runs.append([good.detach(), bad.detach(), optimizer.state_dict()["state"]])
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


def test_a_scaled_loss_whose_product_is_an_expanded_tensor():
    """The second derivative of a squared sum is one number for all elements, which cannot be divided in place."""
    rms = []
    for scale in (1.0, 2.0**10):
        param = nn.Parameter(torch.ones(4))
        optimizer = AdaHessian([param])
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(param.sum() ** 2).backward(create_graph=True)
        scaler.step(optimizer)
        rms.append(optimizer.state[param]["hessian_rms"])
    torch.testing.assert_close(*rms, rtol=0, atol=0)


def test_foreign_entries_in_the_state_do_not_disturb():
    param = nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([param])
    quadratic_step(optimizer, param)
    optimizer.state["note"] = 1
    quadratic_step(optimizer, param)
    assert diagnose(optimizer)["dropped_measurements"] == 0


def test_integers_of_numpy_are_integers():
    optimizer = AdaHessian([nn.Parameter(torch.ones(2, 8))], block_size=np.int64(4), curvature_every=np.int32(2))
    assert optimizer.param_groups[0]["block_size"] == 4


def test_the_state_of_another_optimizer_is_rejected():
    param = nn.Parameter(torch.ones(2))
    adam = torch.optim.Adam([param])
    param.grad = torch.ones(2)
    adam.step()
    optimizer = AdaHessian([param], lr=0.5)
    with pytest.raises(ValueError, match="state"):
        optimizer.load_state_dict(adam.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_state_of_another_adahessian_is_rejected():
    """As torch_optimizer and pytorch_optimizer save it."""
    param = nn.Parameter(torch.ones(2))
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-4, "weight_decay": 0.0, "hessian_power": 1, "params": [0]}
    state = {"step": 1, "exp_avg": torch.ones(2), "exp_hessian_diag_sq": torch.ones(2)}
    optimizer = AdaHessian([param], lr=0.5)
    with pytest.raises(ValueError, match="state"):
        optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    assert optimizer.param_groups[0]["lr"] == 0.5
