"""The mean over micro-batches: with the same probes it is the curvature of the whole batch."""

import pytest
import torch
from torch import nn

from adahessian import AdaHessian, Curvature, diagnose
from adahessian.parallel.mean import ProductMean
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
    return list(zip(*(tensor.chunk(count) for tensor in batch), strict=True))


def train(case, *, parts, steps=5, **options):
    """A loop with several micro-batches per step; the parameters after it."""
    model = case.model()
    optimizer = AdaHessian(model.parameters(), lr=0.05, eps=1e-2, curvature_every=2, block_size=2, **options)
    curvature = Curvature(model, case.loss, optimizer)
    for number in range(steps):
        optimizer.zero_grad()
        for part in parts_of(case.batch(seed=number), parts):
            assert curvature.measure(part) is (number % 2 == 0)
            assert not optimizer.curvature_due
            (case.loss(model, part) / parts).backward()
        optimizer.step()
    return torch.cat([torch.view_as_real(p).flatten() if p.is_complex() else p.flatten() for p in model.parameters()])


@pytest.mark.parametrize("case", [MLP, CONVOLUTION, ATTENTION, COMPLEX], ids=str)
@pytest.mark.parametrize("options", [{}, {"num_probes": 2, "signed": True}, {"averaging": "factored"}], ids=str)
def test_micro_batches_are_the_whole_batch(case, options):
    expected = train(case, parts=1, **options)
    torch.testing.assert_close(train(case, parts=2, **options), expected, rtol=1e-8, atol=1e-10)


def measured(*batches, weights=None):
    """The curvature that a step has used, by parameter."""
    model = MLP.model()
    optimizer = AdaHessian(model.parameters())
    curvature = Curvature(model, MLP.loss, optimizer)
    for batch, weight in zip(batches, weights or [1] * len(batches), strict=True):
        assert curvature.measure(batch, weight=weight)
    MLP.loss(model, MLP.batch()).backward()
    optimizer.step()
    return [optimizer.state[param]["hessian_rms"] for param in model.parameters()], optimizer


def test_micro_batches_count_by_their_weights():
    """Two parts of unequal size, weighted by their sizes, are the whole."""
    x, y = MLP.batch()
    found, _ = measured((x[:3], y[:3]), (x[3:], y[3:]), weights=[3, len(x) - 3])
    expected, _ = measured((x, y))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weights", [(0, 1), (1, 0), (0, 1, 0), (0, 2, 2)], ids=str)
def test_a_micro_batch_of_weight_0_does_not_count(weights):
    x, y = MLP.batch()
    batches = [(x, y) if weight else (x * torch.nan, y) for weight in weights]
    found, optimizer = measured(*batches, weights=weights)
    torch.testing.assert_close(found, measured((x, y))[0], rtol=1e-12, atol=0)
    assert diagnose(optimizer)["dropped_measurements"] == 0


def test_nothing_is_measured_if_all_weights_are_0():
    found, optimizer = measured(MLP.batch(), MLP.batch(), weights=[0, 0])
    assert all(each.isinf().all() for each in found)
    assert diagnose(optimizer)["dropped_measurements"] == 0


def test_a_nan_in_one_micro_batch_drops_the_measurement():
    x, y = MLP.batch()
    found, optimizer = measured((x, y), (x * torch.nan, y))
    assert all(each.isinf().all() for each in found)
    with pytest.warns(UserWarning, match="dropped"):
        assert diagnose(optimizer)["dropped_measurements"] == len(found)


def test_a_block_is_unmeasured_only_if_no_micro_batch_touched_it():
    table = nn.Embedding(4, 3)
    optimizer = AdaHessian(table.parameters(), block_size=3)
    curvature = Curvature(table, lambda table, words: table(words).pow(4).mean(), optimizer)
    curvature.measure(torch.tensor([0]))
    curvature.measure(torch.tensor([2]))
    table(torch.tensor([0, 2])).pow(4).mean().backward()
    optimizer.step()
    assert optimizer.state[table.weight]["hessian_rms"].flatten().isinf().tolist() == [False, True, False, True]


@pytest.mark.parametrize("weight", [-1.0, torch.nan, "2", None, True])
def test_a_weight_is_a_number(weight):
    model = MLP.model()
    curvature = Curvature(model, MLP.loss, AdaHessian(model.parameters()))
    with pytest.raises(ValueError, match="weight"):
        curvature.measure(MLP.batch(), weight=weight)


def test_each_dtype_has_a_buffer():
    params = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    mean = ProductMean(params, AdaHessian(params)._shapes(params), num_probes=1)
    assert mean.nbytes == 4 * (2 * (2 + 2 + 1) + 1) + 8 * (2 + 2 + 1 + 1)
    for weight, value in ((1.0, 4.0), (3.0, 8.0)):
        products = [torch.full((2,), value, dtype=torch.promote_types(p.dtype, torch.float32)) for p in params]
        mean.add([products], products, weight)
    (products,), _ = mean.result(None)
    assert [each.dtype for each in products] == [torch.float32, torch.float64, torch.float32]
    assert {each.tolist()[0] for each in products} == {7.0}


def test_a_result_does_not_end_the_mean():
    param = nn.Parameter(torch.ones(2, 3))
    mean = ProductMean([param], AdaHessian([param])._shapes([param]), num_probes=2)
    for number in range(1, 4):
        product = torch.full((2, 3), float(number))
        mean.add([[product], [-product]], [product], 1.0)
        products, marks = mean.result(None)
        assert [each[0].unique().item() for each in products] == [(number + 1) / 2, -(number + 1) / 2]
        assert marks[0].all()


@pytest.mark.parametrize("change", ["thaw", "freeze"])
def test_parameters_must_not_change_between_micro_batches(change):
    model = MLP.model()
    model[0].requires_grad_(change == "freeze")
    curvature = Curvature(model, MLP.loss, AdaHessian(model.parameters()))
    curvature.measure(MLP.batch())
    model[0].requires_grad_(change == "thaw")
    with pytest.raises(ValueError, match="micro-batches"):
        curvature.measure(MLP.batch())
