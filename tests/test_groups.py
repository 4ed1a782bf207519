"""Parameter groups made from a model."""

import math

import pytest
import torch
from torch import nn

from adahessian import AdaHessian, param_groups


class Vision(nn.Module):
    """What is three-dimensional and what is a kernel are two things."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.positions = nn.Parameter(torch.zeros(1, 16, 8))
        self.experts = nn.Parameter(torch.zeros(2, 8, 8))
        self.up = nn.ConvTranspose1d(8, 4, 3)
        self.norm = nn.LayerNorm((2, 8))
        self.head = nn.Linear(8, 5)
        self.tied = nn.Linear(8, 5, bias=False)
        self.tied.weight = self.head.weight


def names(groups, **settings):
    return {
        name
        for group in groups
        if all(group[key] == value for key, value in settings.items())
        for name, _ in group["params"]
    }


def test_convolutions_are_kernels_and_nothing_else_is():
    groups = param_groups(Vision())
    assert names(groups, blocks="kernel") == {"patches.weight", "patches.bias", "up.weight", "up.bias"}
    rest = {"positions", "experts", "norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert names(groups, blocks="row") == rest


def test_decay_for_all_or_for_matrices_only():
    model = Vision()
    everything = {name for name, _ in model.named_parameters()}
    assert names(param_groups(model, weight_decay=0.1), weight_decay=0.1) == everything
    groups = param_groups(model, weight_decay=0.1, decay_bias_and_norm=False)
    exempt = {"patches.bias", "up.bias", "norm.weight", "norm.bias", "head.bias"}
    assert names(groups, weight_decay=0.0) == exempt
    assert names(groups, weight_decay=0.1) == everything - exempt


def test_every_parameter_once():
    model = Vision()
    found = [param for group in param_groups(model) for _, param in group["params"]]
    assert len(found) == len(set(found)) == len(list(model.parameters()))


def test_the_optimizer_takes_them():
    model = Vision()
    optimizer = AdaHessian(param_groups(model, weight_decay=0.1, decay_bias_and_norm=False), block_size=4)
    sum((param**2).sum() for param in model.parameters()).backward(create_graph=True)
    optimizer.step()
    shapes = {name: optimizer.state[param]["hessian_rms"].shape for name, param in model.named_parameters()}
    assert shapes["patches.weight"] == (8, 3, 1, 1)
    assert shapes["up.weight"] == (8, 4, 1)
    assert shapes["positions"] == (1, 16, 2)
    assert shapes["experts"] == (2, 8, 2)
    assert shapes["norm.weight"] == (2, 2)
    assert shapes["head.bias"] == (5,)


def test_settings_of_a_group_are_heeded():
    first, second = (nn.Parameter(torch.full((2, 4), 3.0)) for _ in range(2))
    optimizer = AdaHessian([{"params": [first], "lr": 0.0}, {"params": [second], "eps": 1.0, "block_size": 4}], lr=0.5)
    for param in (first, second):
        param.grad = torch.ones_like(param)
    optimizer.feed_curvature({param: torch.ones_like(param) for param in (first, second)})
    optimizer.step()
    assert first.eq(3).all()
    assert optimizer.state[second]["hessian_rms"].shape == (2, 1)
    torch.testing.assert_close(second.detach(), torch.full((2, 4), 3 - 0.5 / 2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("averaging", ["magnitude", "signed"])
def test_both_averages(averaging):
    param = nn.Parameter(torch.zeros(1, 4))
    optimizer = AdaHessian([param], block_size=4, averaging=averaging)
    param.grad = torch.ones(1, 4)
    optimizer.feed_curvature({param: torch.tensor([[1.0, -3.0, 5.0, 1.0]])})
    optimizer.step()
    assert optimizer.state[param]["hessian_rms"].item() == (2.5 if averaging == "magnitude" else 1.0)


def test_betas_of_a_group_are_heeded():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = AdaHessian([{"params": [first], "betas": (0.0, 0.0)}, {"params": [second], "betas": (0.5, 0.5)}])
    for value in (1.0, 3.0):
        for param in (first, second):
            param.grad = torch.full((2,), value)
        optimizer.feed_curvature({param: torch.full((2,), value) for param in (first, second)})
        optimizer.step()
    assert optimizer.state[first]["exp_avg"].eq(3).all()
    assert optimizer.state[second]["exp_avg"].eq(0.25 + 1.5).all()
    torch.testing.assert_close(optimizer.state[first]["hessian_rms"], torch.full((2,), 3.0))
    torch.testing.assert_close(optimizer.state[second]["hessian_rms"], torch.full((2,), math.sqrt((1 + 2 * 9) / 3)))


def test_every_kind_of_norm_is_exempt_and_the_order_is_that_of_the_model():
    model = nn.Sequential(nn.RMSNorm((2, 8)), nn.LayerNorm((2, 8)), nn.Linear(8, 4), nn.Linear(4, 2))
    groups = param_groups(model, weight_decay=0.1, decay_bias_and_norm=False)
    found = {group["weight_decay"]: [name for name, _ in group["params"]] for group in groups}
    assert found == {0.0: ["0.weight", "1.weight", "1.bias", "2.bias", "3.bias"], 0.1: ["2.weight", "3.weight"]}


def test_the_decay_of_the_optimizer_counts_unless_the_groups_have_their_own():
    model = Vision()
    optimizer = AdaHessian(param_groups(model), weight_decay=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1]
    optimizer = AdaHessian(param_groups(model, decay_bias_and_norm=False), weight_decay=0.1)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}


def test_parametrized_convolutions_are_kernels():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)), nn.Linear(3, 2))
    groups = param_groups(model)
    assert names(groups, blocks="kernel") == {"0.bias", "0.parametrizations.weight.original"}


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="pass the model itself"):
        param_groups(Vision().parameters())


def test_a_group_that_was_removed_is_not_kept_alive():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = AdaHessian([{"params": [first]}, {"params": [second]}])
    for param in (first, second):
        param.grad = torch.ones(2)
    optimizer.feed_curvature({first: torch.ones(2), second: torch.ones(2)})
    optimizer.step()
    third = nn.Parameter(torch.ones(2))
    third.grad = torch.ones(2)
    optimizer.param_groups.pop()
    optimizer.add_param_group({"params": [third]})
    optimizer.feed_curvature({first: torch.ones(2), third: torch.ones(2)})
    optimizer.step()
    assert len(optimizer._stepping) == 2
