"""Delayed curvature: when it is measured, counted in Hessian-vector products."""

import warnings

import pytest
import torch
from torch import nn

from adahessian import AdaHessian, Curvature
from adahessian.curvature import hutchinson
from cases import MLP, train


@pytest.fixture
def products(monkeypatch):
    """Counts Hessian-vector products."""
    calls = []
    original = hutchinson.hessian_vector_product

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(hutchinson, "hessian_vector_product", counted)
    return calls


@pytest.mark.parametrize("way", ["object", "graph", "closure"])
@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        ({}, 7, 7),
        ({"update_every": 2}, 7, 4),
        ({"update_every": 3}, 7, 3),
        ({"update_every": 10}, 21, 3),
        ({"update_every": 100}, 7, 1),
        ({"update_every": 3, "warmup_steps": 4}, 10, 4 + 2),
        ({"update_every": 3, "warmup_steps": 1}, 7, 3),
        ({"warmup_steps": 4}, 6, 6),
        ({"num_probes": 4}, 3, 12),
        ({"num_probes": 4, "update_every": 2}, 5, 12),
    ],
    ids=str,
)
def test_products_taken(way, settings, steps, expected, products):
    model = MLP.model()
    optimizer = AdaHessian(model.parameters(), lr=0.01, **settings)
    train(MLP, model, optimizer, MLP.batch(), steps, way)
    assert len(products) == expected


def test_steps_that_measure():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.01, update_every=4, warmup_steps=3)
    due = []
    for _ in range(12):
        due.append(optimizer.curvature_due)
        train(MLP, model, optimizer, batch, 1, "object")
    assert [i for i, is_due in enumerate(due) if is_due] == [0, 1, 2, 6, 10]


def test_without_a_new_measurement_the_hessian_momentum_stands_still():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.01, update_every=5)
    train(MLP, model, optimizer, batch, 1, "object")
    before = [state["hessian_rms"].clone() for state in optimizer.state.values()]
    train(MLP, model, optimizer, batch, 4, "object")
    for state, rms in zip(optimizer.state.values(), before, strict=True):
        assert torch.equal(state["hessian_rms"], rms)
        assert state["hessian_age"] == 1
        assert state["step"] == 5


@pytest.mark.parametrize(("per", "age"), [("measurement", 3), ("step", 9)])
def test_what_beta2_counts(per, age):
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.01, update_every=4, beta2_per=per)
    train(MLP, model, optimizer, batch, 10, "object")
    assert all(state["hessian_age"] == age for state in optimizer.state.values())


def test_a_graph_that_was_not_asked_for_is_let_go_and_not_used(products):
    """Trainers in timm's style keep the graph at every step."""
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.01, update_every=3)
    assert optimizer.is_second_order
    for _ in range(6):
        optimizer.zero_grad()
        MLP.loss(model, batch).backward(create_graph=optimizer.is_second_order)
        optimizer.step()
        assert all(not param.grad.requires_grad for param in model.parameters())
    assert len(products) == 2


def test_a_late_group_is_measured_with_all_others_at_once():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model[0].parameters(), lr=0.01, update_every=10)
    train(MLP, model, optimizer, batch, 3, "object")
    assert not optimizer.curvature_due
    optimizer.add_param_group({"params": model[2].parameters()})
    assert optimizer.curvature_due
    train(MLP, model, optimizer, batch, 1, "object")
    assert not optimizer.curvature_due
    assert [group["measurements"] for group in optimizer.param_groups] == [2, 1]


def test_the_most_demanding_group_sets_the_pace(products):
    model, batch = MLP.model(), MLP.batch()
    groups = [
        {"params": model[0].parameters(), "update_every": 4, "num_probes": 2},
        {"params": model[2].parameters(), "update_every": 2},
    ]
    optimizer = AdaHessian(groups, lr=0.01)
    train(MLP, model, optimizer, batch, 4, "object")
    assert len(products) == 2 * 2


def test_empty_frozen_and_unused_groups_do_not_ask_for_more(products):
    model, batch = MLP.model(), MLP.batch()
    unused = torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    groups = [{"params": model.parameters()}, {"params": []}, {"params": [frozen]}, {"params": [unused]}]
    optimizer = AdaHessian(groups, lr=0.01, update_every=3)
    train(MLP, model, optimizer, batch, 6, "object")
    train(MLP, model, optimizer, batch, 6, "graph")
    assert len(products) == 4
    assert torch.equal(unused, torch.ones(3))
    assert torch.equal(frozen, torch.ones(3))


def test_a_measurement_waits_for_a_step_that_is_skipped(products):
    """As when a gradient scaler finds an overflow: the update of the curvature is skipped with the step."""
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.01)
    curvature = Curvature(model, MLP.loss, optimizer)
    assert curvature.measure(batch)
    assert not optimizer.state
    assert not curvature.measure(batch)
    MLP.loss(model, batch).backward()
    optimizer.step()
    assert len(products) == 1
    assert all(state["hessian_age"] == 1 for state in optimizer.state.values())


def test_overdue_by_more_than_two_intervals_warns_once():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.01, update_every=2)
    train(MLP, model, optimizer, batch, 1, "object")

    def first_order_step():
        optimizer.zero_grad()
        MLP.loss(model, batch).backward()
        optimizer.step()

    for _ in range(6):  # due after one more, and then not missing for more than two intervals
        first_order_step()
    with pytest.warns(UserWarning, match="7 steps old but update_every is 2: call curvature.measure") as caught:
        first_order_step()
    assert caught[0].filename == __file__, "the warning points at the user's line"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            first_order_step()


def test_a_late_measurement_does_not_warn():
    param = nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([param], update_every=1)
    optimizer.feed_curvature({param: torch.ones(2)})
    param.grad = torch.ones(2)
    for _ in range(4):
        optimizer.step()
    optimizer.feed_curvature({param: torch.ones(2)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize("demanding", [0, 1])
def test_the_largest_number_of_probes_counts_wherever_it_stands(demanding):
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [param], "num_probes": 3 if i == demanding else 1} for i, param in enumerate(params)]
    assert AdaHessian(groups).num_probes == 3
