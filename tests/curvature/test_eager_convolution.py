"""Convolutions written out: the same values and derivatives as torch's own."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from second_derivatives import NEEDED_AND_ALONG, AtGradient, assert_found_alike, found_by, twice, watched_applications
from torch import nn
from torch.utils.checkpoint import checkpoint

from adahessian import AdaHessian
from adahessian.curvature import eager_convolution
from adahessian.curvature.ways import Problem, double_backward

ours = {dims: partial(eager_convolution.convolution(dims), AtGradient()) for dims in (1, 2, 3)}
torchs = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
GEOMETRIES = {
    "plain": {},
    "padded": {"padding": 1},
    "strided": {"stride": 2, "padding": 1},
    "strided past the edge": {"stride": 3},
    "dilated": {"dilation": 2, "padding": 2},
    "in groups": {"groups": 2},
    "as tuples of one": {"stride": (2,), "padding": (1,), "dilation": (1,)},
}


@pytest.fixture
def applications(monkeypatch):
    return watched_applications(monkeypatch, eager_convolution._Convolution)


def some(dims, *, groups=1, bias=True):
    generator = torch.Generator().manual_seed(dims)
    shapes = [(3, 4, *(7, 6, 5)[:dims]), (6, 4 // groups, *(3, 2, 3)[:dims]), (6,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes[: 2 + bias]]


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_values_and_both_derivatives_are_those_of_torch(dims, bias, geometry):
    inputs = some(dims, groups=geometry.get("groups", 1), bias=bias)
    found, expected = (
        twice(partial(way[dims], **geometry), inputs, [True] * len(inputs), range(len(inputs)))
        for way in (ours, torchs)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("needed", "along"), NEEDED_AND_ALONG, ids=str)
def test_what_is_not_asked_for_is_left_out(needed, along):
    found, expected = (twice(way[2], some(2), needed, along, with_zeros=False) for way in (ours, torchs))
    torch.testing.assert_close(found, expected)


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
    model = make().double().to(memory_format=layout)
    assert_found_alike(model, 5, 2, 7, 7, applications=applications)


def test_everything_is_as_it_was_afterwards():
    before = F.conv1d, F.conv2d, F.conv3d
    found_by(Model().double(), 5, 2, 7, 7, written_out=True)
    assert (F.conv1d, F.conv2d, F.conv3d) == before


def test_the_bias_may_be_written_to():
    def loss(model, x):
        bias = model.bias * 1
        y = F.conv2d(x, model.weight, bias)
        bias.add_(1)
        return y.tanh().mean() + bias.sum()

    model, x = nn.Conv2d(2, 3, 3).double(), torch.randn(5, 2, 7, 7, dtype=torch.float64)
    problem = Problem(model, loss, AdaHessian(model.parameters()))
    ours, torchs = (double_backward(problem, written_out=way)(x, problem.draw, False) for way in (True, False))
    torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize(
    "kind", ["padding by name", "sizes of numpy", "one image", "no images", "low precision", "autocast"]
)
def test_the_rest_is_torchs_own(kind, applications):
    x, weight, bias = (each.to(torch.bfloat16 if kind == "low precision" else torch.float32) for each in some(2))
    x = {"one image": x[0], "no images": x[:0]}.get(kind, x)
    how = {"padding by name": {"padding": "valid"}, "sizes of numpy": {"stride": np.int64(2)}}.get(kind, {})
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        assert torch.equal(ours[2](x, weight, bias, **how), F.conv2d(x, weight, bias, **how))
    assert not applications


@pytest.mark.parametrize("padding", [0, "some"])
def test_what_torch_refuses_is_refused_in_its_words(padding):
    x, weight, _ = some(2)
    with pytest.raises(RuntimeError) as torchs_own:
        F.conv2d(x, weight[:, :3], padding=padding)
    with pytest.raises(RuntimeError) as error:
        ours[2](x, weight[:, :3], padding=padding)
    assert str(error.value) == str(torchs_own.value)
