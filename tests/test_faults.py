"""Bad input and faults: a clear error before anything is changed, or nothing lost."""

import copy
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from adahessian import AdaHessian, Curvature, CurvatureError
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
        ("update_every", [0, -3, 1.5]),
        ("warmup_steps", [-1, 0.5]),
        ("seed", [0.5, None, "seed"]),
        ("blocks", ["rows", None, 3]),
        ("averaging", ["mean", None]),
        ("beta2_per", ["epoch", None]),
        ("maximize", ["yes", None]),
        ("steady_start", ["yes", 1, None]),
        ("foreach", ["yes", 1]),
        ("capturable", ["yes", 0]),
    ],
)
def test_wrong_settings_are_refused_by_name(name, values):
    param = nn.Parameter(torch.ones(2))
    words = {"lr": "learning rate|lr"}.get(name, name)
    for value in values:
        with pytest.raises(ValueError, match=f"({words})"):
            AdaHessian([param], **{name: value})
        with pytest.raises(ValueError, match=f"({words})"):
            AdaHessian([{"params": [param], name: value}])
        optimizer = AdaHessian([nn.Parameter(torch.ones(2))])
        with pytest.raises(ValueError, match=f"({words})"):
            optimizer.add_param_group({"params": [param], name: value})
        assert len(optimizer.param_groups) == 1


def test_a_tensor_lr_needs_capturable_for_foreach():
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="lr as a Tensor is not supported for capturable=False and foreach=True"):
        AdaHessian([param], lr=torch.tensor(0.1), foreach=True)


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="spatial_average_block_size"):
        AdaHessian([nn.Parameter(torch.ones(2))], spatial_average_block_size=4)


def test_a_step_without_any_curvature_says_what_to_call():
    model, batch = MLP.model(), MLP.batch()
    before = flat_parameters(model)
    optimizer = AdaHessian(model.parameters())
    MLP.loss(model, batch).backward()
    expected = r"curvature\.measure\(batch\).*loss\.backward\(create_graph=optimizer\.curvature_due\)"
    with pytest.raises(CurvatureError, match=expected):
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
    keys = {"step", "exp_avg", "hessian_rms", "hessian_age", "dropped"}
    assert all(set(optimizer.state[param]) == keys for param in model.parameters())
    assert optimizer.curvature_due
    # The run that follows is the run that would have been without it.
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
    assert all(state["hessian_age"] == 2 for state in optimizer.state.values())


def test_state_is_complete_after_the_first_step_and_keeps_its_keys():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), update_every=2)
    train(MLP, model, optimizer, batch, 1, "object")
    keys = [set(state) for state in optimizer.state.values()]
    train(MLP, model, optimizer, batch, 4, "object")
    assert [set(state) for state in optimizer.state.values()] == keys
    assert len(keys) == 4


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(5, 3, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = AdaHessian(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"does not support sparse gradients.*DenseAndSparse"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"does not support sparse gradients.*DenseAndSparse"):
        Curvature(embedding, lambda model, x: model(x).square().sum(), optimizer).measure(torch.tensor([1, 2]))
    assert torch.equal(embedding.weight, before)
    assert not optimizer.state


def test_nothing_changes_in_any_group_when_one_is_bad():
    good, bad = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([{"params": [good]}, {"params": [bad]}])
    quadratic_step(optimizer, good, bad)
    before = copy.deepcopy(optimizer.state_dict())
    place = good.detach().clone()
    good.grad, bad.grad = torch.ones(2), torch.ones(2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert torch.equal(good, place)
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]


def test_a_state_that_does_not_fit_is_refused_before_it_is_loaded():
    optimizer = AdaHessian([nn.Parameter(torch.ones(4, 6))], block_size=2)
    saved = AdaHessian([param := nn.Parameter(torch.ones(4, 5))], block_size=2)
    quadratic_step(saved, param)
    with pytest.raises(ValueError, match=re.escape("'exp_avg' of a parameter of shape (4, 6) has the shape (4, 5)")):
        optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.state
    broken = copy.deepcopy(saved.state_dict())
    broken["param_groups"][0]["block_size"] = 5
    with pytest.raises(
        ValueError, match=re.escape("'hessian_rms' of a parameter of shape (4, 5) has the shape (4, 3)")
    ):
        saved.load_state_dict(broken)


def test_blocks_that_change_under_way_are_refused_before_the_step():
    param = nn.Parameter(torch.ones(4, 6))
    optimizer = AdaHessian([param], block_size=2)
    quadratic_step(optimizer, param)
    before = param.detach().clone()
    optimizer.param_groups[0]["block_size"] = 3
    with pytest.raises(RuntimeError, match=re.escape("has the shape (4, 3), but needs (4, 2)")):
        quadratic_step(optimizer, param)
    assert torch.equal(param, before)


def test_curvature_that_does_not_fit_is_refused():
    param = nn.Parameter(torch.ones(3))
    optimizer = AdaHessian([param])
    with pytest.raises(ValueError, match="no parameter"):
        optimizer.feed_curvature({torch.ones(3): torch.ones(3)})
    with pytest.raises(ValueError, match=re.escape("one of shape (3,) on cpu, but was fed one of shape (4,)")):
        optimizer.feed_curvature({param: torch.ones(4)})
    with pytest.raises(ValueError, match="was fed a float"):
        optimizer.feed_curvature({param: 2.0})
    with pytest.raises(ValueError, match=r"gradient like itself.* but was fed a NoneType"):
        optimizer.feed_curvature({param: torch.ones(3)}, {})
    with pytest.raises(ValueError, match="no parameter"):
        optimizer.feed_curvature({"weight": torch.ones(3)})
    with pytest.raises(TypeError, match=r"takes a dict.*not a list"):
        optimizer.feed_curvature([torch.ones(3)])
    assert optimizer.curvature_due


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_a_measurement_that_is_not_finite_is_dropped_and_counted(value):
    """1e30 is finite, but its square is not in float32."""
    bad, good = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    optimizer = AdaHessian([bad, good], lr=0.1, block_size=2)

    def step(curvature_of_bad):
        bad.grad = good.grad = torch.ones(2, 3)
        optimizer.feed_curvature({bad: curvature_of_bad, good: torch.full((2, 3), 2.0)})
        optimizer.step()

    spoiled = torch.full((2, 3), 2.0)
    spoiled[1, 2] = value
    step(spoiled)  # the very first: the parameter has no curvature yet, and stands still
    assert torch.equal(bad, torch.ones(2, 3))
    step(torch.full((2, 3), 2.0))
    step(spoiled)
    assert optimizer.state[bad]["hessian_age"] == 1
    assert optimizer.state[good]["hessian_age"] == 3
    assert torch.equal(optimizer.state[bad]["hessian_rms"], torch.full((2, 2), 2.0))
    with pytest.warns(UserWarning, match="2 curvature measurements of single parameters were infinite or NaN"):
        assert optimizer.dropped_measurements == 2
    assert optimizer.dropped_measurements == 2, "the warning comes once for the same count"
    assert bad.isfinite().all()


def test_in_step_counting_a_dropped_measurement_is_made_up_for():
    param = nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([param], beta2_per="step", betas=(0.9, 0.5))
    for value in (1.0, math.nan, 3.0):
        param.grad = torch.ones(2)
        optimizer.feed_curvature({param: torch.full((2,), value)})
        optimizer.step()
    weight = (1 - 0.5**2) / (1 - 0.5**3)
    expected = math.sqrt((1 - weight) * 1 + weight * 9)
    torch.testing.assert_close(optimizer.state[param]["hessian_rms"], torch.full((2,), expected))


def test_a_nan_gradient_behaves_as_in_adamw():
    results = []
    for make in (AdaHessian, torch.optim.AdamW):
        first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = make([first, second], lr=0.1)
        if make is AdaHessian:
            optimizer.feed_curvature({first: torch.ones(2), second: torch.ones(2)})
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


def test_settings_that_are_bools_are_refused():
    for name in ("lr", "eps", "weight_decay", "hessian_power"):
        with pytest.raises(ValueError, match="learning rate|" + name):
            AdaHessian([nn.Parameter(torch.ones(2))], **{name: True})


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
def test_lr_zero_on_a_fresh_optimizer_needs_no_curvature(lr):
    param = nn.Parameter(torch.ones(3))
    optimizer = AdaHessian([param], lr=lr, weight_decay=0.1)
    param.grad = torch.ones(3)
    optimizer.step()
    assert param.eq(1).all()
    assert optimizer.state[param]["step"] == 0
    assert optimizer.curvature_due


def test_a_failing_step_does_not_use_its_measurement_twice():
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = AdaHessian([{"params": [param]} for param in params])
    quadratic_step(optimizer, *params)
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(2, dtype=torch.complex64)
    optimizer.feed_curvature({param: torch.ones(2) for param in params})
    for _ in range(2):
        with pytest.raises(RuntimeError):
            optimizer.step()
    assert optimizer.state[params[0]]["hessian_age"] == 2


def test_foreign_entries_in_the_state_do_not_disturb():
    param = nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([param])
    quadratic_step(optimizer, param)
    optimizer.state["note"] = 1
    assert optimizer.dropped_measurements == 0


def test_integers_of_numpy_are_integers():
    optimizer = AdaHessian([nn.Parameter(torch.ones(2, 8))], block_size=np.int64(4), update_every=np.int32(2))
    assert optimizer.param_groups[0]["block_size"] == 4


def test_the_state_of_another_optimizer_is_refused():
    param = nn.Parameter(torch.ones(2))
    adam = torch.optim.Adam([param])
    param.grad = torch.ones(2)
    adam.step()
    optimizer = AdaHessian([param], lr=0.5)
    with pytest.raises(ValueError, match="another optimizer"):
        optimizer.load_state_dict(adam.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_state_of_another_adahessian_is_refused():
    """As torch_optimizer and pytorch_optimizer save it."""
    param = nn.Parameter(torch.ones(2))
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-4, "weight_decay": 0.0, "hessian_power": 1, "params": [0]}
    state = {"step": 1, "exp_avg": torch.ones(2), "exp_hessian_diag_sq": torch.ones(2)}
    optimizer = AdaHessian([param], lr=0.5)
    with pytest.raises(ValueError, match="another optimizer"):
        optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    assert optimizer.param_groups[0]["lr"] == 0.5
