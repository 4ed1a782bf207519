"""Delayed curvature: when it is measured, counted in Hessian-vector products."""

import warnings

import pytest
import torch
from torch import nn

from adahessian import AdaHessian, Curvature
from cases import MLP, train


@pytest.fixture
def products(monkeypatch):
    """Counts Hessian-vector products: gradients of gradients."""
    calls = []
    original = torch.autograd.grad

    def counted(outputs, inputs, grad_outputs=None, *args, **kwargs):
        calls.extend([1] * (grad_outputs is not None and not kwargs.get("create_graph")))
        return original(outputs, inputs, grad_outputs, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    return calls


@pytest.mark.parametrize("way", ["object", "graph", "closure"])
@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        ({}, 7, 7),
        ({"curvature_every": 2}, 7, 4),
        ({"curvature_every": 3}, 7, 3),
        ({"curvature_every": 10}, 21, 3),
        ({"curvature_every": 100}, 7, 1),
        ({"curvature_every": 3, "curvature_warmup": 4}, 10, 4 + 2),
        ({"curvature_every": 3, "curvature_warmup": 1}, 7, 3),
        ({"curvature_warmup": 4}, 6, 6),
        ({"num_probes": 4}, 3, 12),
        ({"num_probes": 4, "curvature_every": 2}, 5, 12),
    ],
    ids=str,
)
def test_products_taken(way, options, steps, expected, products):
    model = MLP.model()
    optimizer = AdaHessian(model.parameters(), lr=0.01, **options)
    train(MLP, model, optimizer, MLP.batch(), steps, way)
    assert len(products) == expected


def test_steps_that_measure():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.01, curvature_every=4, curvature_warmup=3)
    due = []
    for _ in range(12):
        due.append(optimizer.curvature_due)
        train(MLP, model, optimizer, batch, 1, "object")
    assert [i for i, is_due in enumerate(due) if is_due] == [0, 1, 2, 6, 10]


def test_measure_says_whether_it_measured():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.01, curvature_every=2)
    curvature = Curvature(model, MLP.loss, optimizer)
    measured = []
    for _ in range(5):
        measured.append(curvature.measure(batch))
        optimizer.zero_grad()
        MLP.loss(model, batch).backward()
        optimizer.step()
    assert measured == [True, False, True, False, True]


def test_without_a_new_measurement_the_hessian_momentum_stands_still():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.01, curvature_every=5)
    train(MLP, model, optimizer, batch, 1, "object")
    before = [state["hessian_rms"].clone() for state in optimizer.state.values()]
    train(MLP, model, optimizer, batch, 4, "object")
    for state, rms in zip(optimizer.state.values(), before, strict=True):
        assert torch.equal(state["hessian_rms"], rms)
        assert state["measurements"] == 1
        assert state["step"] == 5


def test_beta2_decays_per_measurement():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.01, curvature_every=4)
    train(MLP, model, optimizer, batch, 10, "object")
    assert all(state["measurements"] == 3 for state in optimizer.state.values())


def test_a_graph_that_was_not_due_is_freed_and_not_used(products):
    """Trainers in timm's style keep the graph at every step."""
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.01, curvature_every=3)
    assert optimizer.is_second_order
    for _ in range(6):
        optimizer.zero_grad()
        MLP.loss(model, batch).backward(create_graph=optimizer.is_second_order)
        optimizer.step()
        assert all(not param.grad.requires_grad for param in model.parameters())
    assert len(products) == 2


def test_a_late_group_is_measured_with_all_others_at_once():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model[0].parameters(), lr=0.01, curvature_every=10)
    train(MLP, model, optimizer, batch, 3, "object")
    assert not optimizer.curvature_due
    optimizer.add_param_group({"params": model[2].parameters()})
    assert optimizer.curvature_due
    train(MLP, model, optimizer, batch, 1, "object")
    assert not optimizer.curvature_due
    assert [group["measurements"] for group in optimizer.param_groups] == [2, 1]


@pytest.mark.parametrize("demanding", [0, 1])
def test_the_most_demanding_group_sets_the_pace(demanding, products):
    """A measurement is due as soon as one group wants it, and takes the largest number of probes."""
    model, batch = MLP.model(), MLP.batch()
    options = [{"curvature_every": 4, "num_probes": 2}, {"curvature_every": 2}]
    groups = [
        {"params": model[0].parameters(), **options[demanding]},
        {"params": model[2].parameters(), **options[1 - demanding]},
    ]
    optimizer = AdaHessian(groups, lr=0.01)
    train(MLP, model, optimizer, batch, 4, "object")
    assert len(products) == 2 * 2


def test_empty_frozen_and_unused_groups_do_not_ask_for_more(products):
    model, batch = MLP.model(), MLP.batch()
    unused = nn.Parameter(torch.ones(3))
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    groups = [{"params": model.parameters()}, {"params": []}, {"params": [frozen]}, {"params": [unused]}]
    optimizer = AdaHessian(groups, lr=0.01, curvature_every=3)
    train(MLP, model, optimizer, batch, 6, "object")
    train(MLP, model, optimizer, batch, 6, "graph")
    assert len(products) == 4
    assert torch.equal(unused, torch.ones(3))
    assert torch.equal(frozen, torch.ones(3))


def test_all_measurements_before_a_step_are_one():
    """As for micro-batches, and where a gradient scaler has skipped a step: their mean is one measurement."""
    finals = []
    for times in (1, 3):
        model, batch = MLP.model(), MLP.batch()
        optimizer = AdaHessian(model.parameters(), lr=0.01)
        curvature = Curvature(model, MLP.loss, optimizer)
        assert all(curvature.measure(batch) for _ in range(times))
        assert not optimizer.curvature_due
        assert not optimizer.state
        MLP.loss(model, batch).backward()
        optimizer.step()
        assert all(state["measurements"] == 1 for state in optimizer.state.values())
        finals.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    torch.testing.assert_close(*finals, rtol=1e-12, atol=0)


def first_order_step(model, optimizer, batch):
    optimizer.zero_grad()
    MLP.loss(model, batch).backward()
    optimizer.step()


def test_measure_forgotten_for_long_warns_once():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.01, curvature_every=2)
    train(MLP, model, optimizer, batch, 1, "object")
    for _ in range(6):  # due after one more, and then not missing for more than two intervals
        first_order_step(model, optimizer, batch)
    with pytest.warns(UserWarning, match="curvature_every") as caught:
        first_order_step(model, optimizer, batch)
    assert [warning.filename for warning in caught] == [__file__], "one warning, at the line that steps"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            first_order_step(model, optimizer, batch)
        train(MLP, model, optimizer, batch, 1, "object")
        for _ in range(20):  # forgotten again: once per optimizer is enough
            first_order_step(model, optimizer, batch)


def test_a_late_measurement_does_not_warn():
    param = nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([param], curvature_every=1)
    optimizer.set_curvature({param: torch.ones(2)})
    param.grad = torch.ones(2)
    for _ in range(4):
        optimizer.step()
    optimizer.set_curvature({param: torch.ones(2)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
