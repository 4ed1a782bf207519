"""Micro-batches: averaged with the same probe they are the whole batch; or the first stands for all."""

import pytest
import torch
from torch import nn

from adahessian import AdaHessian, CapturedStep, Curvature, GaussNewton
from adahessian.curvature.accumulation import WeightedMean
from cases import ATTENTION, CONVOLUTION, MLP, Case


class Rotation(nn.Module):
    """A complex parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs().square()


class Uncast(Case):
    """A model that is not cast to real numbers."""

    def model(self):
        torch.manual_seed(0)
        return self.make()


COMPLEX = Uncast("complex", Rotation, (16, 5))


def parts_of(batch, count):
    if isinstance(batch, torch.Tensor):
        return batch.chunk(count)
    return list(zip(*(tensor.chunk(count) for tensor in batch), strict=True))


def train(case, *, parts, steps=5, accumulate=True, weights=None, **settings):
    """A loop with so many micro-batches a step; the parameters after it."""
    model = case.model()
    optimizer = AdaHessian(model.parameters(), lr=0.05, eps=1e-2, update_every=2, block_size=2, **settings)
    curvature = Curvature(model, case.loss, optimizer, accumulate=accumulate)
    for number in range(steps):
        optimizer.zero_grad()
        for part, weight in zip(parts_of(case.batch(seed=number), parts), weights or [1] * parts, strict=True):
            curvature.measure(part, weight=weight)
            (case.loss(model, part) / parts).backward()
        optimizer.step()
    return torch.cat([torch.view_as_real(p).flatten() if p.is_complex() else p.flatten() for p in model.parameters()])


@pytest.mark.parametrize("case", [MLP, CONVOLUTION, ATTENTION, COMPLEX], ids=str)
@pytest.mark.parametrize("settings", [{}, {"num_probes": 2, "averaging": "signed"}], ids=str)
def test_micro_batches_are_the_whole_batch(case, settings):
    expected = train(case, parts=1, accumulate=False, **settings)
    torch.testing.assert_close(train(case, parts=2, **settings), expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(train(case, parts=1, **settings), expected, rtol=1e-12, atol=1e-12)


def test_by_choice_the_first_stands_for_all():
    model = MLP.model()
    optimizer = AdaHessian(model.parameters(), lr=0.05)
    curvature = Curvature(model, MLP.loss, optimizer)
    assert [curvature.measure(part) for part in parts_of(MLP.batch(), 4)] == [True, False, False, False]


def test_all_are_measured_until_the_step():
    model = MLP.model()
    optimizer = AdaHessian(model.parameters(), lr=0.05, update_every=2)
    curvature = Curvature(model, MLP.loss, optimizer, accumulate=True)
    for expected in ([True] * 4, [False] * 4, [True] * 4):
        optimizer.zero_grad()
        assert [curvature.measure(part) for part in parts_of(MLP.batch(), 4)] == expected
        assert not optimizer.curvature_due
        MLP.loss(model, MLP.batch()).backward()
        optimizer.step()


def test_micro_batches_count_by_their_weights():
    """Two parts of unequal size, by their sizes, are the whole."""
    model, (x, y) = MLP.model(), MLP.batch()
    found = []
    for parts in ([slice(None)], [slice(0, 3), slice(3, None)]):
        optimizer = AdaHessian(model.parameters())
        curvature = Curvature(model, MLP.loss, optimizer, accumulate=True)
        for part in parts:
            curvature.measure((x[part], y[part]), weight=len(x[part]))
        diagonal, _ = curvature._complete()
        found.append(torch.cat([each.flatten() for each in diagonal.values()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_what_is_not_a_number_in_one_is_dropped_in_all():
    model, (x, y) = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.05)
    curvature = Curvature(model, MLP.loss, optimizer, accumulate=True)
    curvature.measure((x, y))
    curvature.measure((x * torch.nan, y))
    MLP.loss(model, (x, y)).backward()
    before = [param.clone() for param in model.parameters()]
    optimizer.step()
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    with pytest.warns(UserWarning, match="dropped"):
        assert optimizer.dropped_measurements == len(before)


def test_a_micro_batch_of_no_weight_does_not_count():
    model, (x, y) = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters(), lr=0.05)
    curvature = Curvature(model, MLP.loss, optimizer, accumulate=True)
    curvature.measure((x, y))
    curvature.measure((x * torch.nan, y), weight=0)
    MLP.loss(model, (x, y)).backward()
    optimizer.step()
    assert optimizer.dropped_measurements == 0


def test_a_block_that_no_micro_batch_touched_stays_unmeasured_and_one_that_any_did_does_not():
    table = nn.Embedding(4, 3)
    optimizer = AdaHessian(table.parameters(), block_size=3)
    curvature = Curvature(table, lambda table, words: table(words).pow(4).mean(), optimizer, accumulate=True)
    curvature.measure(torch.tensor([0]))
    curvature.measure(torch.tensor([2]))
    table(torch.tensor([0, 2])).pow(4).mean().backward()
    optimizer.step()
    assert optimizer.state[table.weight]["hessian_rms"].flatten().isinf().tolist() == [False, True, False, True]


def test_gauss_newton_draws_other_labels_for_every_micro_batch():
    model, (x, _) = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters())
    curvature = GaussNewton(model, lambda model, x: model(x), optimizer, accumulate=True)
    means = []
    for _ in range(2):
        curvature.measure(x)
        means.append([each.clone() for part in curvature._mean._parts for each in part._elements])
    assert not torch.equal(means[0][0], means[1][0] / 2)


@pytest.mark.parametrize("weight", [-1.0, torch.nan, "2", None])
def test_a_weight_is_a_number(weight):
    model = MLP.model()
    curvature = Curvature(model, MLP.loss, AdaHessian(model.parameters()))
    with pytest.raises(ValueError, match="weight"):
        curvature.measure(MLP.batch(), weight=weight)


def test_whether_to_accumulate_is_yes_or_no():
    model = MLP.model()
    with pytest.raises(ValueError, match="accumulate"):
        Curvature(model, MLP.loss, AdaHessian(model.parameters()), accumulate=4)
    curvature = Curvature(model, MLP.loss, AdaHessian(model.parameters()), accumulate=True)
    with pytest.raises(ValueError, match="micro-batches"):
        CapturedStep(curvature)


def test_parameters_of_several_dtypes_have_their_means_apart():
    params = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    optimizer = AdaHessian(params)
    mean = WeightedMean(params, optimizer.measured_blocks())
    for weight, value in ((1.0, 4.0), (3.0, 8.0)):
        diagonal = [torch.full((2,), value, dtype=torch.promote_types(p.dtype, torch.float32)) for p in params]
        mean.add(diagonal, diagonal, weight)
    diagonal, _ = mean.result(None)
    assert {diagonal[param].dtype for param in params} == {torch.float32, torch.float64}
    assert {each.tolist()[0] for each in diagonal.values()} == {7.0}


def test_parameters_that_thaw_between_micro_batches_are_refused():
    model = MLP.model()
    model[0].requires_grad_(False)
    curvature = Curvature(model, MLP.loss, AdaHessian(model.parameters()), accumulate=True)
    curvature.measure(MLP.batch())
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match="between the micro-batches"):
        curvature.measure(MLP.batch())
