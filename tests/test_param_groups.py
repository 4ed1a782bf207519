"""Parameter groups made from a model, and what the optimizer makes of groups."""

import math

import pytest
import torch
from torch import nn

from adahessian import AdaHessian, param_groups


class Vision(nn.Module):
    """Three dimensions do not make a kernel."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.positions = nn.Parameter(torch.zeros(1, 16, 8))
        self.experts = nn.Parameter(torch.zeros(2, 8, 8))
        self.grid = nn.Parameter(torch.zeros(1, 8, 4, 4))
        self.up = nn.ConvTranspose1d(8, 4, 3)
        self.norm = nn.LayerNorm((2, 8))
        self.head = nn.Linear(8, 5)
        self.tied = nn.Linear(8, 5, bias=False)
        self.tied.weight = self.head.weight


def names(groups, **options):
    return {
        name
        for group in groups
        if all(group.get(key) == value for key, value in options.items())
        for name, _ in group["params"]
    }


def test_convolutions_are_kernels_and_nothing_else_is():
    groups = param_groups(Vision())
    assert names(groups, averaging="kernel") == {"patches.weight", "patches.bias", "up.weight", "up.bias"}
    rest = {"positions", "experts", "norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert names(groups, averaging=None) == rest
    assert names(groups, averaging="row") == {"grid"}  # which the optimizer would take for kernels


def test_decay_for_all_or_for_matrices_only():
    model = Vision()
    everything = {name for name, _ in model.named_parameters()}
    assert names(param_groups(model, weight_decay=0.1), weight_decay=0.1) == everything
    groups = param_groups(model, weight_decay=0.1, decay_bias_and_norm=False)
    exempt = {"patches.bias", "up.bias", "norm.weight", "norm.bias", "head.bias"}
    assert names(groups, weight_decay=0.0) == exempt
    assert names(groups, weight_decay=0.1) == everything - exempt


def test_every_parameter_once_even_if_frozen():
    model = Vision()
    model.head.requires_grad_(False)
    found = [param for group in param_groups(model) for _, param in group["params"]]
    assert len(found) == len(set(found)) == len(list(model.parameters()))


def test_every_kind_of_norm_is_exempt_and_the_order_is_the_model_s():
    model = nn.Sequential(nn.RMSNorm((2, 8)), nn.LayerNorm((2, 8)), nn.Linear(8, 4), nn.Linear(4, 2))
    groups = param_groups(model, weight_decay=0.1, decay_bias_and_norm=False)
    found = {group["weight_decay"]: [name for name, _ in group["params"]] for group in groups}
    assert found == {0.0: ["0.weight", "1.weight", "1.bias", "2.bias", "3.bias"], 0.1: ["2.weight", "3.weight"]}


def test_parametrized_convolutions_are_kernels():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)), nn.Linear(3, 2))
    groups = param_groups(model)
    assert names(groups, averaging="kernel") == {"0.bias", "0.parametrizations.weight.original"}


def test_anything_but_a_model_is_rejected():
    with pytest.raises(TypeError, match="model"):
        param_groups(Vision().parameters())


# Sparse tables -------------------------------------------------------------------------------------------------------


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(20, 4, sparse=True)
        self.tags = nn.Embedding(5, 4, sparse=True)
        self.again = nn.Embedding(20, 4, sparse=True)
        self.again.weight = self.words.weight
        self.dense = nn.Embedding(5, 4)
        self.top = nn.Linear(4, 1)
        self.tags.requires_grad_(False)


def test_sparse_tables_form_the_last_group():
    *others, tables = param_groups(Ranker(), weight_decay=0.1, decay_bias_and_norm=False, sparse_lr=0.02)
    assert [name for name, _ in tables.pop("params")] == ["words.weight", "tags.weight"]
    assert tables == {"sparse": True, "lr": 0.02, "weight_decay": 0.0}
    assert names(others, averaging=None) == {"dense.weight", "top.weight", "top.bias"}


def test_sparse_tables_stay_in_ordinary_groups_without_a_learning_rate():
    groups = param_groups(Ranker())
    assert names(groups, averaging=None) == {name for name, _ in Ranker().named_parameters()}
    assert not any("sparse" in group for group in groups)


def test_a_learning_rate_for_no_sparse_table_is_rejected():
    with pytest.raises(ValueError, match="sparse_lr"):
        param_groups(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1)), sparse_lr=0.01)


def test_a_model_of_sparse_tables_has_one_group():
    assert len(param_groups(nn.Embedding(3, 2, sparse=True), sparse_lr=0.01)) == 1


# In the optimizer ----------------------------------------------------------------------------------------------------


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


def test_the_weight_decay_of_the_optimizer_applies_to_groups_without_one():
    model = Vision()
    optimizer = AdaHessian(param_groups(model), weight_decay=0.1)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1}
    optimizer = AdaHessian(param_groups(model, decay_bias_and_norm=False), weight_decay=0.1)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}


def test_each_group_has_its_own_options():
    first, second = (nn.Parameter(torch.full((2, 4), 3.0)) for _ in range(2))
    optimizer = AdaHessian([{"params": [first], "lr": 0.0}, {"params": [second], "eps": 1.0, "block_size": 4}], lr=0.5)
    for param in (first, second):
        param.grad = torch.ones_like(param)
    optimizer.set_curvature({param: torch.ones_like(param) for param in (first, second)})
    optimizer.step()
    assert first.eq(3).all()
    assert optimizer.state[second]["hessian_rms"].shape == (2, 1)
    torch.testing.assert_close(second.detach(), torch.full((2, 4), 3 - 0.5 / 2), rtol=1e-6, atol=0)


def test_each_group_has_its_own_betas():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = AdaHessian([{"params": [first], "betas": (0.0, 0.0)}, {"params": [second], "betas": (0.5, 0.5)}])
    for value in (1.0, 3.0):
        for param in (first, second):
            param.grad = torch.full((2,), value)
        optimizer.set_curvature({param: torch.full((2,), value) for param in (first, second)})
        optimizer.step()
    assert optimizer.state[first]["exp_avg"].eq(3).all()
    assert optimizer.state[second]["exp_avg"].eq(0.25 + 1.5).all()
    torch.testing.assert_close(optimizer.state[first]["hessian_rms"], torch.full((2,), 3.0))
    torch.testing.assert_close(optimizer.state[second]["hessian_rms"], torch.full((2,), math.sqrt((1 + 2 * 9) / 3)))


@pytest.mark.parametrize(("signed", "expected"), [(False, 2.5), (True, 1.0)])
def test_means_of_magnitudes_or_of_signed_values(signed, expected):
    param = nn.Parameter(torch.zeros(1, 4))
    optimizer = AdaHessian([param], block_size=4, signed=signed)
    param.grad = torch.ones(1, 4)
    optimizer.set_curvature({param: torch.tensor([[1.0, -3.0, 5.0, 1.0]])})
    optimizer.step()
    assert optimizer.state[param]["hessian_rms"].item() == expected


def test_groups_may_be_exchanged():
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = AdaHessian([{"params": [first]}, {"params": [second]}])
    for other in (second, third):
        if other is third:
            optimizer.param_groups.pop()
            optimizer.add_param_group({"params": [third]})
        for param in (first, other):
            param.grad = torch.ones(2)
        optimizer.set_curvature({param: torch.ones(2) for param in (first, other)})
        optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in (first, second, third)] == [2, 1, 1]
