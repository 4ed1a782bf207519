"""Convolutions: torch's values and derivatives, to any order."""

from functools import partial

import pytest
import torch
from requested import assert_alike, derivatives, squares
from torch import nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from adahessian.hessian import convolution
from adahessian.hessian.convolution import conv_forward
from adahessian.hessian.engine import SUBSTITUTES
from adahessian.hessian.isolation import isolated

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
GEOMETRIES = {
    "plain": {},
    "padded": {"padding": 1},
    "strided": {"stride": 2, "padding": 1},
    "strided past the edge": {"stride": 3},
    "dilated": {"dilation": 2, "padding": 2},
    "in groups": {"groups": 2},
    "all of these": {"stride": 2, "padding": 1, "dilation": 2, "groups": 2},
}


@pytest.fixture
def applications(monkeypatch):
    """Record the convolutions that the library computes itself."""
    seen, original = [], convolution._gradient
    monkeypatch.setattr(convolution, "_gradient", lambda *args: (seen.append(args), original(*args))[1])
    return seen


def layer(dims, channels=(4, 6), **settings):
    torch.manual_seed(dims)
    return KINDS[dims](*channels, (3, 2, 3)[:dims], dtype=torch.float64, **settings)


def images(dims, channels=4, batch=3):
    return torch.randn((batch, channels, *(7, 6, 5)[:dims]), dtype=torch.float64)


def twice(forward, model, x):
    """The value, its gradients, and a product with the Hessian, of a loss that weighs every element."""
    generator = torch.Generator().manual_seed(1)
    values = [x.detach().clone().requires_grad_(), *model.parameters()]
    y = forward(values[0])
    weights = torch.arange(y.numel()).view_as(y)
    gradients = torch.autograd.grad((y.sin() * weights).sum(), values, create_graph=True)
    along = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in gradients]
    return y, gradients, torch.autograd.grad(gradients, values, along)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_values_and_both_derivatives_are_torchs(dims, bias, geometry):
    model = layer(dims, bias=bias, **geometry)
    x = images(dims)
    torch.testing.assert_close(twice(partial(conv_forward, model), model, x), twice(model, model, x))


@pytest.mark.parametrize(
    ("dims", "geometry"),
    [*((1, each) for each in GEOMETRIES.values()), (2, GEOMETRIES["all of these"])],
    ids=[*GEOMETRIES, "all of these in 2 dimensions"],
)
def test_derivatives_of_the_third_order_are_right(dims, geometry):
    model = layer(dims, channels=(2, 2), **geometry)
    leaves = [images(dims, 2, 1).requires_grad_(), *model.parameters()]
    assert gradcheck(lambda x, *_: conv_forward(model, x), leaves)
    assert gradgradcheck(lambda x, *_: conv_forward(model, x), leaves)

    def gradients(x, *params):
        return torch.autograd.grad(conv_forward(model, x).sin().sum(), (x, *params), create_graph=True)

    assert gradgradcheck(gradients, leaves)


@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("needs_w", [True, False])
@pytest.mark.parametrize("needs_bias", [True, False])
def test_only_what_is_needed_is_saved_and_computed(needs_x, needs_w, needs_bias, applications):
    model, x = layer(2), images(2).requires_grad_(needs_x)
    model.weight.requires_grad_(needs_w)
    model.bias.requires_grad_(needs_bias)
    y = conv_forward(model, x)
    assert y.requires_grad == (needs_x or needs_w or needs_bias)
    if y.requires_grad:
        saved = y.grad_fn.saved_tensors
        assert [each is not None for each in saved] == [False, needs_w, needs_x]
        applications.clear()
        y.sum().backward()
        assert len(applications) == needs_x + needs_w


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 3, 3, stride=2, bias=False)

    def forward(self, x):
        return self.second(self.first(x).tanh()).mean((2, 3))


class Checkpointed(Model):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("make", [Model, Checkpointed])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["usual", "channels last"])
def test_a_pass_finds_the_same(make, layout, applications):
    model, x = make().double().to(memory_format=layout), torch.randn(5, 2, 7, 7, dtype=torch.float64)
    expected = derivatives(model, squares, x, substitutes={}, num_probes=2)
    assert not applications
    assert_alike(derivatives(model, squares, x, num_probes=2), expected)
    forwards = sum(args[1] is None and len(args) == 5 for args in applications)
    assert forwards == 2 if make is Model else forwards > 2, "also when layers are computed again"


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize(
    "kind",
    [
        "padding by name",
        "padding mode",
        "one image",
        "no images",
        "low precision",
        "two dtypes",
        "complex",
        "autocast",
        "vmap",
        "torch.func.grad",
        "forward derivative",
        "subclass of tensors",
        "subclass of layers",
    ],
)
def test_the_rest_is_torchs_own(kind, applications):
    class Subclass(torch.Tensor):
        pass

    class Doubled(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, 2 * weight, bias)

    settings = {"padding by name": {"padding": "same"}, "padding mode": {"padding": 1, "padding_mode": "circular"}}
    model = (Doubled if kind == "subclass of layers" else nn.Conv2d)(4, 6, 3, **settings.get(kind, {}))
    x = images(2).float()
    dtype = {"low precision": torch.bfloat16, "complex": torch.complex64}.get(kind, torch.float32)
    model, x = model.to(dtype), x.to(dtype)
    if kind == "two dtypes":
        with pytest.raises(RuntimeError) as torchs_own:
            model(x.double())
        with pytest.raises(RuntimeError) as error:
            conv_forward(model, x.double())
        assert str(error.value) == str(torchs_own.value)
        return
    x = {"one image": x[0], "no images": x[:0], "subclass of tensors": x.as_subclass(Subclass)}.get(kind, x)

    def compute(forward):
        if kind == "vmap":
            return torch.func.vmap(forward)(x[None])
        if kind == "torch.func.grad":
            return torch.func.grad(lambda x: forward(x).sin().sum())(x)
        if kind == "forward derivative":
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(forward(forward_ad.make_dual(x, x))).tangent
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            return forward(x)

    assert torch.equal(compute(partial(conv_forward, model)), compute(model))
    assert not applications


def test_parametrized_layers_are_computed_once(applications):
    class Counted(nn.Module):
        calls = 0

        def forward(self, weight):
            Counted.calls += 1
            return weight.tanh()

    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Conv1d(3, 1, 3, padding="same")).double()
    for each in model:
        parametrize.register_parametrization(each, "weight", Counted())
    x = torch.randn(4, 2, 5, dtype=torch.float64)
    expected = derivatives(model, squares, x, substitutes={})
    Counted.calls = 0
    assert_alike(derivatives(model, squares, x), expected)
    assert Counted.calls == 2
    assert applications


def test_gradients_of_several_outputs_at_once_in_the_loss():
    def jacobian(model, x):
        x = x.detach().requires_grad_()
        y = model(x).sin().sum((0, 2))
        rows = torch.eye(len(y), dtype=y.dtype)
        return torch.autograd.grad(y, x, rows, is_grads_batched=True, create_graph=True)[0].square().sum()

    model, x = nn.Conv1d(3, 4, 2).double(), torch.randn(2, 3, 5, dtype=torch.float64)
    assert_alike(derivatives(model, jacobian, x), derivatives(model, jacobian, x, substitutes={}))


def test_gradients_under_vmap():
    model, x = layer(1), images(1)
    rows = torch.eye(6, dtype=torch.float64)
    with isolated(model, SUBSTITUTES):
        y = model(x).sin().sum((0, 2))
    found = torch.func.vmap(lambda v: torch.autograd.grad(y, model.weight, v, retain_graph=True)[0])(rows)
    y = model(x).sin().sum((0, 2))
    expected = [torch.autograd.grad(y, model.weight, row, retain_graph=True)[0] for row in rows]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.filterwarnings("ignore:.*autocast")
def test_a_gradient_under_an_autocast_that_the_layer_was_not_under():
    model, x = layer(2), images(2)

    def loss(model, x):
        x = x.detach().requires_grad_()
        y = model(x).sin().sum()
        with torch.autocast("cpu", torch.bfloat16):
            slope = torch.autograd.grad(y, x, create_graph=True)[0]
        return slope.square().mean()

    assert_alike(derivatives(model, loss, x), derivatives(model, loss, x, substitutes={}), rtol=1e-2, atol=1e-6)


def test_torchs_errors_are_raised():
    model = layer(2)
    with pytest.raises(RuntimeError) as torchs_own:
        model(images(2, channels=3))
    with pytest.raises(RuntimeError) as error:
        conv_forward(model, images(2, channels=3))
    assert str(error.value) == str(torchs_own.value)
