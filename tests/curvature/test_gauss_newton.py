"""The Gauss-Newton diagonal of a cross entropy: right on average, by labels of its own, and without a trace."""

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from test_measurement import Compilable, Everything, Once, assert_same, snapshot
from torch import nn
from torch.func import functional_call, jacrev

import reference
from adahessian import AdaHessian, CurvatureError
from adahessian.curvature import gauss_newton, labels
from adahessian.curvature.gauss_newton import GaussNewton
from adahessian.curvature.labels import draw_labels
from cases import BATCH_NORM, MLP, flat_parameters

ACCELERATORS = [torch.device("cuda")] if torch.cuda.is_available() else []


def logits_of(model, batch):
    return model(batch[0] if isinstance(batch, tuple) else batch)


def measured(model, batch, logits_fn=logits_of, measurement=0, **settings):
    """What a measurement feeds: the diagonal of each parameter that took part."""
    optimizer = AdaHessian(model.parameters(), **settings)
    optimizer.param_groups[0]["measurements"] = measurement
    optimizer.param_groups[0]["staleness"] = 1
    fed = []
    optimizer.feed_curvature = lambda diagonal, gradients: fed.append((diagonal, gradients))
    assert GaussNewton(model, logits_fn, optimizer).measure(batch)
    ((diagonal, gradients),) = fed
    assert diagonal.keys() == gradients.keys()
    return diagonal


def joined(diagonal):
    return torch.cat([values.flatten() for values in diagonal.values()])


def exact_diagonal(model, x):
    """The diagonal of the mean over rows of J' (diag(p) - p p') J, from the whole Jacobian."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    jacobians = jacrev(lambda params: functional_call(model, params, (x,)))(params)
    with torch.no_grad():
        logits = model(x)
    jacobian = torch.cat([part.flatten(2) for part in jacobians.values()], -1)
    p = logits.softmax(-1)
    covariance = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    return torch.einsum("nci,ncd,ndi->i", jacobian, covariance, jacobian) / len(x)


# The diagonal --------------------------------------------------------------------------------------------------------


def test_over_all_labels_the_mean_is_the_gauss_newton_diagonal(monkeypatch):
    """Every way to label three rows, weighted by its probability: no sampling error is left."""
    model, x = MLP.model(), MLP.batch()[0][:3]
    with torch.no_grad():
        p = model(x).softmax(-1)
    mean = 0
    for chosen in itertools.product(range(3), repeat=3):
        monkeypatch.setattr(gauss_newton, "draw_labels", lambda *_, chosen=chosen: torch.tensor(chosen))
        mean = mean + p[range(3), chosen].prod() * joined(measured(model, x))
    torch.testing.assert_close(mean, exact_diagonal(model, x))


def test_over_many_measurements_the_mean_is_the_gauss_newton_diagonal():
    model, (x, _) = MLP.model(), MLP.batch()
    found = torch.stack([joined(measured(model, x, measurement=i, num_probes=30)) for i in range(100)])
    mean, exact = found.mean(0), exact_diagonal(model, x)
    assert ((mean - exact) / (found.std(0) / 10)).abs().max() < 5  # standard deviations
    torch.testing.assert_close(mean, exact, rtol=0.15, atol=0)


def test_several_draws_are_averaged(monkeypatch):
    model, (x, _) = MLP.model(), MLP.batch()
    one_by_one = []
    for number in range(3):
        monkeypatch.setattr(gauss_newton, "draw_labels", lambda *args, n=number: draw_labels(*args[:3], n))
        one_by_one.append(joined(measured(model, x)))
    monkeypatch.undo()
    assert not torch.equal(one_by_one[0], one_by_one[1])
    torch.testing.assert_close(joined(measured(model, x, num_probes=3)), torch.stack(one_by_one).mean(0))


def test_all_leading_dimensions_are_rows_and_padding_can_be_left_out():
    model, (x, _) = MLP.model(), MLP.batch()
    flat = joined(measured(model, x))
    assert torch.equal(joined(measured(model, x.view(2, 4, 2, 5))), flat)

    padded = torch.cat([x, torch.zeros(3, 5, dtype=x.dtype)]).view(19, 1, 5)
    counts = (torch.arange(19) < 16).view(19, 1)
    assert torch.equal(joined(measured(model, padded, lambda model, x: model(x)[counts])), flat)


def test_a_complex_parameter_is_a_pair_of_real_ones():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))

        def forward(self, x):
            return (x.to(torch.complex128) @ self.weight * (1 - 2j)).real

    class Pair(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = nn.Parameter(torch.view_as_real(weight.detach()).clone())

        def forward(self, x):
            return (x.to(torch.complex128) @ torch.view_as_complex(self.weight) * (1 - 2j)).real

    model, (x, _) = Complex(), MLP.batch()
    (found,) = measured(model, x).values()
    (expected,) = measured(Pair(model.weight), x).values()
    torch.testing.assert_close(torch.view_as_real(found), expected)


@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
def test_low_precision_is_measured_in_float32(way, monkeypatch):
    chosen = torch.arange(16) % 3
    monkeypatch.setattr(gauss_newton, "draw_labels", lambda logits, *_: chosen)
    expected = joined(measured(MLP.model(torch.float32), MLP.batch(torch.float32)))
    if way == "bfloat16":
        model, batch = MLP.model(torch.bfloat16), MLP.batch(torch.bfloat16)
        found = joined(measured(model, batch))
        assert torch.equal(found, joined(measured(model, batch, lambda *args: logits_of(*args).float())))
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = joined(measured(MLP.model(torch.float32), MLP.batch(torch.float32)))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03 * float(expected.max()))
    assert not torch.equal(found, expected)


def test_what_has_no_second_derivative_is_measured():
    """The square that refuses to be differentiated twice, and the one of torch."""
    model, (x, _) = MLP.model(), MLP.batch()
    found = measured(model, x, lambda model, x: Once.apply(model(x)))
    torch.testing.assert_close(joined(found), joined(measured(model, x, lambda model, x: model(x).square())))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_are_measured_as_they_are():
    (x, _), compiled = MLP.batch(), []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    model = Compilable()
    found = joined(measured(torch.compile(model, backend=backend), x))
    assert len(compiled) == 1
    torch.testing.assert_close(found, joined(measured(model, x)))


def test_what_took_no_part_gets_no_entry():
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(4, 3), "frozen": nn.Linear(3, 3)})
    model.frozen.requires_grad_(False)
    found = measured(model, torch.randn(8, 4), lambda model, x: model.frozen(model.used(x)))
    assert set(found) == set(model.used.parameters())


def test_words_that_did_not_occur_wait_for_their_measurement():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    optimizer = AdaHessian(model.parameters())
    words = torch.tensor([0, 2, 2, 3])
    assert GaussNewton(model, logits_of, optimizer).measure(words)
    model(words).square().mean().backward()
    optimizer.step()
    waits = optimizer.state[model[0].weight]["hessian_rms"].isinf().all(-1)
    assert waits.tolist() == [False, True, False, False, True]


# The pass ------------------------------------------------------------------------------------------------------------


def test_the_pass_leaves_no_trace():
    model = Everything()
    model.dropout.eval()  # a mode of its own
    x = torch.randn(16, 4)
    model(x).square().mean().backward()
    optimizer = AdaHessian(model.parameters(), num_probes=2)

    def meddling_logits(model, batch):
        return model.train()(batch)

    before = snapshot(model)
    assert GaussNewton(model, meddling_logits, optimizer).measure(x)
    assert_same(before, snapshot(model))


def test_a_pass_that_fails_leaves_no_trace_either():
    model, x = Everything(), torch.randn(16, 4)
    optimizer = AdaHessian(model.parameters())
    before = snapshot(model)
    with pytest.raises(CurvatureError, match="no graph"):
        GaussNewton(model, lambda model, x: model.eval()(x).detach(), optimizer).measure(x)
    assert_same(before, snapshot(model))
    assert optimizer.curvature_due


def test_it_works_where_gradients_are_disabled_and_hooks_do_not_see_it():
    model, (x, _) = BATCH_NORM.model(), BATCH_NORM.batch()
    next(model.parameters()).register_hook(lambda _: pytest.fail("a hook was run"))
    with torch.no_grad():
        measured(model, x)


def test_batch_fraction_measures_on_the_first_examples():
    model, batch = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters())
    fed = []
    optimizer.feed_curvature = lambda diagonal, gradients: fed.append(diagonal)
    assert GaussNewton(model, logits_of, optimizer, batch_fraction=0.25).measure(batch)
    assert torch.equal(joined(fed[0]), joined(measured(model, batch[0][:4])))


def test_a_resumed_run_goes_on_bit_by_bit():
    (x, y), finals = MLP.batch(), []

    def steps(model, optimizer, count):
        curvature = GaussNewton(model, logits_of, optimizer)
        for _ in range(count):
            curvature.measure((x, y))
            optimizer.zero_grad()
            MLP.loss(model, (x, y)).backward()
            optimizer.step()

    for parts in ([7], [3, 4]):
        model = MLP.model()
        optimizer = AdaHessian(model.parameters(), lr=0.01, eps=1e-2, update_every=2, seed=5)
        for part in parts:
            model, saved = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
            optimizer = AdaHessian(model.parameters())
            optimizer.load_state_dict(saved)
            torch.manual_seed(part)
            steps(model, optimizer, part)
        finals.append(flat_parameters(model))
    assert torch.equal(*finals)


def test_it_trains():
    model, batch = MLP.model(torch.float32), MLP.batch(torch.float32)
    optimizer = AdaHessian(model.parameters(), lr=0.02, eps=1e-3, update_every=5, warmup_steps=5)
    curvature = GaussNewton(model, logits_of, optimizer, batch_fraction=0.5)
    losses = []
    for _ in range(60):
        curvature.measure(batch)
        optimizer.zero_grad()
        loss = MLP.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.param_groups[0]["measurements"] == 16


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits_fn", "message"),
    [
        (lambda model, x: (model(x), x), "the logits alone, as a tensor, but returned a tuple"),
        (lambda model, x: model(x).argmax(-1, keepdim=True), r"real logits.*torch.int64 tensor of shape \(16, 1\)"),
        (lambda model, x: model(x).to(torch.complex128), "real logits.*torch.complex128"),
        (lambda model, x: model(x)[:, 0], r"of shape \(16,\): a single logit x of two classes is torch.stack"),
        (lambda model, x: model(x)[:, :1], r"two classes, but returned a torch.float64 tensor of shape \(16, 1\)"),
        (lambda model, x: model(x)[:0], r"at least one row.*of shape \(0, 3\)"),
        (lambda model, x: model(x).detach(), r"no graph: logits_fn must compute them.*without torch.no_grad\(\)"),
        (lambda model, x: torch.zeros(4, 3, requires_grad=True) * 2, "depend on none of the optimizer's parameters"),
        (
            lambda model, x: model[2](
                torch.utils.checkpoint.checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
            ),
            "reentrant activation checkpointing hides.*use_reentrant=False",
        ),
    ],
)
def test_wrong_logits(logits_fn, message):
    model, (x, _) = MLP.model(), MLP.batch()
    optimizer = AdaHessian(model.parameters())
    with pytest.raises(CurvatureError, match=message):
        GaussNewton(model, logits_fn, optimizer).measure(x)
    assert optimizer.curvature_due


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        GaussNewton(model, logits_of, AdaHessian(model.parameters())).measure(torch.tensor([0, 2]))


def test_arguments_in_the_wrong_place_are_named():
    model = MLP.model()
    with pytest.raises(TypeError, match=r"GaussNewton takes \(model, logits_fn, optimizer\).*but got function"):
        GaussNewton(logits_of, model, AdaHessian(model.parameters()))


# The labels ----------------------------------------------------------------------------------------------------------


def test_labels_are_those_of_the_probes_stream_and_of_exact_sums():
    logits = 3 * torch.randn(50, 7, dtype=torch.float64)
    bits = reference.signs(50 * 30, seed=3, measurement=2, probe=1, parameter=-1).reshape(50, 30) > 0
    found = draw_labels(logits, seed=3, measurement=2, draw=1)
    for row, label in enumerate(found.tolist()):
        uniform = sum(int(bit) << place for place, bit in enumerate(bits[row])) / 2**30
        cumulated = np.cumsum(logits[row].softmax(-1).numpy())
        assert cumulated[label] > uniform - 1e-6
        assert label == 0 or cumulated[label - 1] <= uniform + 1e-6


def test_labels_are_as_frequent_as_they_are_probable():
    rows = 200_000
    p = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.04, 0.01, 0.0])
    counts = torch.bincount(draw_labels(p.log().expand(rows, 7), 0, 0, 0), minlength=7)
    assert counts[p == 0].eq(0).all()
    expected = rows * p[p > 0]
    assert ((counts[p > 0] - expected).square() / expected).sum() < 18.5  # chi squared, one in a thousand


@pytest.mark.parametrize("what", ["seed", "measurement", "draw"])
def test_labels_are_independent_across_everything_they_depend_on(what):
    rows, key = 20_000, {"seed": 0, "measurement": 0, "draw": 0}
    logits = torch.zeros(rows, 2)
    first = draw_labels(logits, **key)
    assert torch.equal(draw_labels(logits[:100], **key), first[:100]), "a label is its row's, however many there are"
    other = draw_labels(logits, **{**key, what: 1})
    for pair in ((first, other), (first[1:], first[:-1])):
        assert abs(pair[0].eq(pair[1]).double().mean() - 0.5) < 2.5 / rows**0.5  # five standard deviations


@pytest.mark.parametrize("uniform", [0, 2**30 - 1])
@pytest.mark.parametrize("classes", [2, 50_257])
def test_labels_at_the_ends_of_the_distribution(uniform, classes, monkeypatch):
    """Whatever the rounding, the label is a class that can be."""
    monkeypatch.setattr(labels, "_uniform_integers", lambda first, count, *_: torch.full((count,), uniform))
    logits = torch.randn(16, classes + 2)
    logits[:, 0] = logits[:, -1] = -torch.inf
    found = draw_labels(logits, 0, 0, 0)
    assert found.ge(1).all()
    assert found.le(classes).all()


def test_a_row_that_is_not_a_number_gets_a_label_and_its_measurement_is_dropped():
    logits = torch.zeros(3, 4)
    logits[1] = torch.nan
    assert draw_labels(logits, 0, 0, 0).lt(4).all()

    model = nn.Linear(2, 3)
    optimizer = AdaHessian(model.parameters())
    x = torch.tensor([[0.0, torch.nan]])
    assert GaussNewton(model, logits_of, optimizer).measure(x)
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="were dropped"):
        assert optimizer.dropped_measurements == 2


@pytest.mark.parametrize("device", ACCELERATORS, ids=str)
def test_labels_on_an_accelerator_are_those_of_the_host(device):
    logits = torch.randn(1000, 300)
    found = draw_labels(logits.to(device), 1, 2, 3).cpu()
    # Softmax rounds differently, by which a label at a border may move.
    assert found.ne(draw_labels(logits, 1, 2, 3)).sum() < 3
