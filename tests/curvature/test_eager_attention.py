"""Attention written out: the same values and derivatives as torch's own."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from second_derivatives import (
    NEEDED_AND_ALONG,
    AtGradient,
    assert_found_alike,
    found_by,
    squares,
    twice,
    watched_applications,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from adahessian import AdaHessian, Curvature
from adahessian.curvature import eager_attention
from adahessian.curvature.ways import Problem, double_backward

ours = partial(eager_attention.attention, AtGradient())
torchs = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def kernel_with_a_second_derivative():
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture
def applications(monkeypatch):
    return watched_applications(monkeypatch, eager_attention._Attention)


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def some(*heads, queries=5, keys=7, width=4, out=6):
    sizes = (queries, width), (keys, width), (keys, out)
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*heads, *size, generator=generator, dtype=torch.float64) for size in sizes]


def shut_for_a_query():
    mask = drawn(5, 7) > 0
    mask[2] = False
    return mask


HOW = {
    "all": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "mask": {"attn_mask": drawn(5, 7) > -0.5},
    "mask of heads": {"attn_mask": drawn(2, 3, 5, 7) > -0.5},
    "mask of sequences": {"attn_mask": drawn(2, 1, 1, 7) > -0.5},
    "bias": {"attn_mask": drawn(5, 7)},
    "bias of keys": {"attn_mask": drawn(1, 7)},
    "bias of heads": {"attn_mask": drawn(3, 5, 7), "scale": 2.0},
    "a query without keys": {"attn_mask": shut_for_a_query()},
    "by minus infinity": {"attn_mask": torch.zeros(5, 7).double().masked_fill(~shut_for_a_query(), -torch.inf)},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_values_and_both_derivatives_are_those_of_torch(how, applications):
    found, expected = (twice(partial(way, **how), some(2, 3)) for way in (ours, torchs))
    assert len(applications) == 1
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("heads", [(1,), (4,), (2, 1), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("sizes", [{"queries": 1}, {"keys": 1}, {"width": 1, "out": 1}], ids=str)
def test_sizes_of_all_kinds(heads, sizes, applications):
    found, expected = (twice(way, some(*heads, **sizes)) for way in (ours, torchs))
    assert applications
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("needed", "along"), NEEDED_AND_ALONG, ids=str)
def test_what_is_not_asked_for_is_left_out(needed, along):
    found, expected = (twice(way, some(2, 3), needed, along) for way in (ours, torchs))
    torch.testing.assert_close(found, expected)


def test_any_order_of_memory():
    """As heads are, that are cut out of one product."""
    joined = drawn(2, 5, 3, 3, 4)

    def attend(way, x):
        return way(*x.permute(2, 0, 3, 1, 4), is_causal=True).transpose(1, 2)

    found, expected = (twice(partial(attend, way), [joined], [True], [0]) for way in (ours, torchs))
    torch.testing.assert_close(found, expected)


def test_it_keeps_its_digits_in_single_precision():
    inputs = [4 * each for each in some(2, 3, queries=64, keys=64)]
    exact = twice(partial(torchs, is_causal=True), inputs)[2]
    found = twice(partial(ours, is_causal=True), [each.float() for each in inputs])[2]
    for of_ours, of_exact in zip(found, exact, strict=True):
        assert (of_ours.double() - of_exact).norm() <= 1e-5 * of_exact.norm()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 12), nn.Linear(4, 1)

    def attend(self, x):
        query, key, value = self.first(x).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def forward(self, x):
        return self.second(self.attend(x))


class Module(Model):
    """Torch's own layer, which looks the function up by its name."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def attend(self, x):
        x = self.first(x)
        return self.attention(x, x, x, need_weights=False)[0]


class WrittenTo(Model):
    """As by dropout that saves memory."""

    def attend(self, x):
        return super().attend(x).mul_(2)


class Hooked(Model):
    """Its gradients are written to on their way."""

    def attend(self, x):
        query, key, value = self.first(x).chunk(3, -1)
        query.register_hook(lambda gradient: gradient.mul_(2))
        return F.scaled_dot_product_attention(query, key, value)


class Taught(Model):
    """By a teacher that does not train, on the same batch."""

    def forward(self, x):
        with torch.inference_mode():
            taught = self.attend(x).sum().item()
        return super().forward(x) - taught


class Checkpointed(Model):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("make", [Model, Module, WrittenTo, Hooked, Taught, Checkpointed])
def test_a_pass_finds_the_same(make, applications):
    model = make().double()
    assert_found_alike(model, 5, 6, 3, applications=applications)


def test_it_is_in_full_precision_where_the_loss_is():
    def precisely(model, x):
        with torch.autocast("cpu", enabled=False):
            return squares(model, x)

    model, x = Model(), torch.randn(5, 6, 3)
    problem = Problem(model, precisely, AdaHessian(model.parameters()))
    with torch.autocast("cpu", enabled=False):
        expected = double_backward(problem, written_out=False)(x, problem.draw, False).diagonal
    with torch.autocast("cpu", torch.bfloat16):
        found = double_backward(problem)(x, problem.draw, False).diagonal
    # The linear layers before it are torch's own, and rounded; what comes behind it shows its own precision.
    torch.testing.assert_close(found[2:], expected[2:], rtol=2e-2, atol=1e-3)


def test_the_engine_compares_it_though_no_module_tells(said, monkeypatch):
    right = eager_attention._centred
    monkeypatch.setattr(eager_attention, "_centred", lambda u, weights: right(u, weights).mul_(1.5))
    model = Model()
    Curvature(model, squares, AdaHessian(model.parameters())).measure(torch.randn(5, 6, 3))
    assert any("all is left to torch" in message for message in said.messages)


def test_everything_is_as_it_was_afterwards():
    before = F.scaled_dot_product_attention
    found_by(Model().double(), 5, 6, 3, written_out=True)
    assert F.scaled_dot_product_attention is before


@pytest.mark.parametrize(
    "kind",
    ["dropout", "shared keys", "learned mask", "mask of a class of its own", "no heads", "low precision", "autocast"],
)
def test_the_rest_is_torchs_own(kind, applications):
    query, key, value = (each.to(torch.bfloat16 if kind == "low precision" else torch.float32) for each in some(4))
    how = {
        "dropout": {"dropout_p": 0.5},
        "shared keys": {"enable_gqa": True},
        "learned mask": {"attn_mask": torch.zeros(5, 7, requires_grad=True)},
        "mask of a class of its own": {"attn_mask": causal_lower_right(5, 7)},
    }.get(kind, {})
    if kind == "shared keys":
        query, key, value = query[None], key[None, :2], value[None, :2]
    if kind == "mask of a class of its own":
        query, key, value = query[None], key[None], value[None]
    if kind == "no heads":
        query, key, value = query[0], key[0], value[0]
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        found, expected = (
            torch.manual_seed(0) and way(query, key, value, **how) for way in (ours, F.scaled_dot_product_attention)
        )
    assert torch.equal(found, expected)
    assert not applications


WRONG = {
    "a mask and causal": {"attn_mask": torch.ones(5, 7, dtype=torch.bool), "is_causal": True},
    "mask of another size": {"attn_mask": torch.zeros(5, 6).double()},
}


@pytest.mark.parametrize("how", WRONG.values(), ids=WRONG)
def test_what_torch_refuses_is_refused_in_its_words(how):
    inputs = some(2, 3)
    with pytest.raises(RuntimeError) as torchs_own:
        torchs(*inputs, **how)
    with pytest.raises(RuntimeError) as error:
        ours(*inputs, **how)
    assert str(error.value) == str(torchs_own.value)
