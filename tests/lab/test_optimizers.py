from dataclasses import replace

import pytest
import torch
from torch import nn

from adahessian.lab.optimizers import UnsuitableOptimizerError, curvature_options, make_optimizer
from adahessian.lab.settings import OPTIMIZER_NAMES, Settings

SETTINGS = Settings(epochs=1, batch_size=1, lr=0.5, betas=(0.8, 0.9), eps=0.1, weight_decay=0.01, momentum=0.7)


def make(name, model, settings=SETTINGS):
    return make_optimizer(name, model, settings, seed=3, steps_per_epoch=10)


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_settings_arrive(name):
    group = make(name, nn.Linear(2, 2)).param_groups[0]
    assert group["lr"] == 0.5
    assert group["weight_decay"] == 0.01
    if name != "sgd":
        assert group["eps"] == 0.1
    if name in ("adam", "adamw", "adahessian"):
        assert group["betas"] == (0.8, 0.9)
    if name in ("sgd", "rmsprop"):
        assert group["momentum"] == 0.7
    if name == "rmsprop":
        assert group["alpha"] == 0.9


def test_settings_of_the_curvature_arrive():
    settings = Settings(
        epochs=1,
        batch_size=1,
        lr=0.5,
        block_size=4,
        hessian_power=0.5,
        averaging="signed",
        num_probes=2,
        update_every=5,
        measured_epochs=1.5,
        tangents="bfloat16",
        batch_fraction=0.25,
        steady_start=True,
    )
    group = make("adahessian", nn.Linear(2, 2), settings).param_groups[0]
    expected = {
        "block_size": 4,
        "hessian_power": 0.5,
        "signed": True,
        "num_probes": 2,
        "curvature_every": 5,
        "curvature_warmup": 15,
        "steady_start": True,
        "seed": 3,
    }
    assert {name: group[name] for name in expected} == expected
    compiled = {"batch_fraction": 0.25, "compile": True, "product_dtype": torch.bfloat16}
    assert curvature_options(settings, compiled=True) == compiled
    assert curvature_options(settings, compiled=False) == {**compiled, "compile": False, "product_dtype": None}


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_biases_and_norms_decay_unless_told_not_to(name):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    matrices = {model[0].weight, model[3].weight}
    everything = set(model.parameters())

    def decaying(settings):
        groups = make(name, model, settings).param_groups
        assert {param for group in groups for param in group["params"]} == everything
        assert {group["weight_decay"] for group in groups} <= {0.0, 0.01}
        return {param for group in groups if group["weight_decay"] for param in group["params"]}

    assert decaying(SETTINGS) == everything
    assert decaying(replace(SETTINGS, decay_bias_and_norm=False)) == matrices


def test_sparse_embeddings():
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    plain = Settings(epochs=1, batch_size=1, lr=0.5)
    dense, embeddings = make("adahessian", model, plain).param_groups
    assert (dense.get("sparse", False), embeddings["sparse"]) == (False, True)
    assert (dense["lr"], embeddings["lr"]) == (0.5, 0.01)
    for name in ("adagrad", "sgd"):
        optimizer = make(name, model, plain)
        model(torch.tensor([1])).sum().backward()
        with torch.sparse.check_sparse_tensor_invariants(False):
            optimizer.step()
        optimizer.zero_grad()
    for name, settings in (("adamw", plain), ("sgd", SETTINGS)):
        with pytest.raises(UnsuitableOptimizerError, match="choose adahessian"):
            make(name, model, settings)
    optimizer = make("adahessian", model, replace(SETTINGS, decay_bias_and_norm=False))
    decays = {param: group["weight_decay"] for group in optimizer.param_groups for param in group["params"]}
    assert decays == {model[0].weight: 0.0, model[1].weight: 0.01, model[1].bias: 0.0}
