"""Parameters that are frozen, unused, shared, linear, untouched, empty or oddly shaped."""

import math

import pytest
import torch
from torch import nn

from adahessian import AdaHessian, Curvature
from cases import CONVOLUTION, MLP, flat_parameters, train


def quadratic_step(optimizer, *params, power=2):
    optimizer.zero_grad()
    sum((param**power).sum() for param in params).backward(create_graph=optimizer.curvature_due)
    optimizer.step()


def test_unused_parameters_stay_and_join_later():
    used, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = AdaHessian([used, late], lr=0.1)
    quadratic_step(optimizer, used)
    assert late not in optimizer.state
    quadratic_step(optimizer, used, late)
    assert optimizer.state[late]["step"] == 1
    assert optimizer.state[late]["hessian_rms"].eq(2).all()
    assert not late.eq(1).any()


def test_a_parameter_unused_in_the_measured_slice_stands_still_until_measured():
    """Its curvature is unknown, not zero. Divided by eps its step would be far too long."""
    used, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    model = nn.ParameterList([used, other])
    optimizer = AdaHessian(model.parameters(), curvature_every=2)
    Curvature(model, lambda model, _: model[0].square().sum(), optimizer).measure(None)
    used.grad = other.grad = torch.ones(3)
    optimizer.step()
    assert other.eq(1).all()
    assert not used.eq(1).any()
    optimizer.step()
    quadratic_step(optimizer, used, other)
    assert not other.eq(1).any()


@pytest.mark.parametrize("way", ["object", "graph"])
def test_a_parameter_in_which_the_loss_is_linear_has_curvature_zero(way):
    linear, curved = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    model = nn.ParameterList([linear, curved])
    optimizer = AdaHessian(model.parameters(), lr=0.1, eps=0.5)

    def loss_fn(model, _):
        return model[0].sum() + model[1].square().sum()

    if way == "object":
        Curvature(model, loss_fn, optimizer).measure(None)
    loss_fn(model, None).backward(create_graph=optimizer.curvature_due)
    optimizer.step()
    assert optimizer.state[linear]["hessian_rms"].eq(0).all()
    assert optimizer.state[curved]["hessian_rms"].eq(2).all()
    torch.testing.assert_close(linear, torch.full((3,), 1 - 0.1 / 0.5))


def test_a_loss_linear_in_everything_is_measured_as_flat():
    model = nn.Linear(3, 1)
    optimizer = AdaHessian(model.parameters(), lr=0.1, eps=1.0)
    curvature = Curvature(model, lambda model, x: model(x).mean(), optimizer)
    assert curvature.measure(torch.ones(2, 3))
    model(torch.ones(2, 3)).mean().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["hessian_rms"].eq(0).all()


def test_shared_parameters_count_once():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    model[1].weight = model[0].weight
    optimizer = AdaHessian(model.parameters(), lr=0.5, eps=0.0)
    weight = model[0].weight.detach().clone()
    model(torch.ones(1, 1, dtype=torch.float64)).square().sum().backward(create_graph=True)  # w^4
    optimizer.step()
    assert len(optimizer.state) == 1
    torch.testing.assert_close(optimizer.state[model[0].weight]["hessian_rms"], 12 * weight**2)
    torch.testing.assert_close(model[0].weight.detach(), weight - 0.5 * weight / 3)


def test_frozen_and_thawed_parameters():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.01)
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    train(MLP, model, optimizer, batch, 2, "object")
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    train(MLP, model, optimizer, batch, 2, "graph")
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (2, 3, 4), (2, 3, 2, 2, 2), (2, 1, 1, 3, 1, 2)], ids=str)
@pytest.mark.parametrize("averaging", ["auto", "kernel", "factored"])
def test_tensors_of_every_rank(shape, averaging):
    param, other = nn.Parameter(torch.full(shape, 2.0)), nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([param, other], block_size=2, averaging=averaging, weight_decay=0.1)
    for _ in range(3):
        quadratic_step(optimizer, param, other)
    assert param.isfinite().all()
    assert param.lt(2).all()


def test_parameters_in_other_memory_layouts():
    finals = []
    for format in (torch.contiguous_format, torch.channels_last):
        model = CONVOLUTION.model().to(memory_format=format)
        optimizer = AdaHessian(model.parameters(), lr=0.01)
        train(CONVOLUTION, model, optimizer, CONVOLUTION.batch(), 5, "object")
        finals.append(flat_parameters(model))
    torch.testing.assert_close(*finals)


def test_a_gradient_that_depends_on_foreign_parameters_only_is_flat():
    """Two optimizers on one model: d(a w)/da = w carries a graph, but none of it leads back to a."""
    mine, foreign = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = AdaHessian([mine], lr=0.1, eps=0.5)
    (mine * foreign**2).sum().backward(create_graph=True)
    optimizer.step()
    assert optimizer.state[mine]["hessian_rms"].eq(0).all()
    torch.testing.assert_close(mine.detach(), torch.full((3,), 1 - 0.1 / 0.5))


def test_a_group_added_after_the_measurement_is_measured_too():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([first], curvature_every=10)
    optimizer.set_curvature({first: torch.ones(2)})
    optimizer.add_param_group({"params": [second]})
    assert optimizer.curvature_due
    quadratic_step(optimizer, first, second)
    assert optimizer.state[second]["hessian_rms"].eq(2).all()


@pytest.mark.parametrize("options", [{}, {"block_size": 2}, {"averaging": "factored"}], ids=str)
def test_rows_that_no_measurement_has_touched_take_no_step(options):
    """Their curvature is unknown, not zero. Divided by eps their step would be far too long."""
    embedding = nn.Embedding(5, 4)
    before = embedding.weight.detach().clone()
    optimizer = AdaHessian(embedding.parameters(), curvature_every=10, **options)

    def loss_fn(model, words):
        return (model(words) ** 4).mean()

    curvature = Curvature(embedding, loss_fn, optimizer, batch_fraction=0.5)
    for step in range(11):
        words = torch.tensor([0, 1, 2, 3] if step < 10 else [2, 0, 1, 3])
        curvature.measure(words)
        optimizer.zero_grad()
        loss_fn(embedding, words).backward()
        optimizer.step()
        moved = (embedding.weight.detach() - before).ne(0).any(dim=1)
        # Words 0 and 1 are in the first slice, 2 in the second; 3 is in the batch only, and 4 nowhere.
        assert moved.tolist() == [True, True, step == 10, False, False]
        assert (embedding.weight - before).abs().max() < 1


def test_a_row_that_is_seen_late_has_the_momentum_of_the_formula():
    """Its curvature counts as zero in the losses that did not depend on it, once it has been measured at all."""
    table = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    optimizer = AdaHessian([table], betas=(0.9, 0.5))
    for rows in ([0], [0], [0, 1], [0]):
        optimizer.zero_grad()
        (table[rows] ** 2).sum().backward(create_graph=True)
        optimizer.step()
    squares = [0.0, 0.0, 4.0, 0.0]
    expected = sum(0.5 * 0.5 ** (3 - i) * square for i, square in enumerate(squares)) / (1 - 0.5**4)
    rms = optimizer.state[table]["hessian_rms"]
    torch.testing.assert_close(rms[1], torch.full((3,), math.sqrt(expected), dtype=torch.float64))
    torch.testing.assert_close(rms[0], torch.full((3,), 2.0, dtype=torch.float64))


def test_a_parameter_frozen_after_backward_keeps_no_graph():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters())
    MLP.loss(model, batch).backward(create_graph=True)
    model[0].requires_grad_(False)
    optimizer.step()
    assert all(not param.grad.requires_grad for param in model.parameters())


@pytest.mark.parametrize("way", ["graph", "object"])
def test_hooks_on_parameters_see_the_gradient_alone(way):
    model, batch, seen = MLP.model(), MLP.batch(), []
    outside = nn.Parameter(torch.ones((), dtype=torch.float64))  # in the loss and the optimizer, but not in the model
    for param in (*model.parameters(), outside):
        param.register_hook(lambda _: seen.append(1))
    optimizer = AdaHessian([*model.parameters(), outside], lr=0.01)

    def loss_fn(model, batch):
        return MLP.loss(model, batch) * outside**3

    curvature = Curvature(model, loss_fn, optimizer)
    if way == "object":
        curvature.measure(batch)
    loss_fn(model, batch).backward(create_graph=optimizer.curvature_due)
    optimizer.step()
    assert len(seen) == len(list(model.parameters())) + 1
    assert optimizer.state[outside]["hessian_rms"] > 0
