"""What people use around an optimizer: low precision, clipping, averages of weights, compiled models."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from adahessian import AdaHessian, Curvature
from cases import BATCH_NORM, MLP

OPTIONS = {"lr": 0.05, "eps": 1e-2, "curvature_every": 2}


def step(model, curvature, optimizer, batch, loss_fn, clip=None):
    curvature.measure(batch)
    optimizer.zero_grad()
    loss = loss_fn(model, batch)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()


def losses(dtype, loss_fn=MLP.loss, compile=None):
    model, batch = MLP.model(dtype), MLP.batch(dtype)
    optimizer = AdaHessian(model.parameters(), **OPTIONS)
    curvature = Curvature(model, loss_fn, optimizer, compile=compile)
    found = [step(model, curvature, optimizer, batch, loss_fn) for _ in range(30)]
    assert curvature.engine.description.startswith("compiled") == bool(compile)
    return found


@pytest.mark.parametrize("compile", [False, True])
def test_autocast_learns_as_full_precision_does(compile, quick_compiler):
    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return MLP.loss(model, batch)

    full, mixed = losses(torch.float32, compile=compile), losses(torch.float32, loss_fn, compile)
    assert mixed[-1] < 0.7 * mixed[0]
    assert mixed[-1] == pytest.approx(full[-1], rel=0.1)


def test_parameters_in_bfloat16_learn_too():
    """Use a learning rate that they can resolve: a step below 1/256 of a weight is lost."""
    found = losses(torch.bfloat16)
    assert found[-1] < 0.8 * found[0]


def test_clipping_acts_on_the_gradient_alone():
    states = []
    for clip in (None, 1e-3):
        model = MLP.model()
        optimizer = AdaHessian(model.parameters(), **OPTIONS)
        step(model, Curvature(model, MLP.loss, optimizer), optimizer, MLP.batch(), MLP.loss, clip)
        states.append([optimizer.state[param] for param in model.parameters()])
    for free, clipped in zip(*states, strict=True):
        assert torch.equal(free["hessian_rms"], clipped["hessian_rms"])
    norms = [sum(float(state["exp_avg"].square().sum()) for state in each) ** 0.5 for each in states]
    assert norms[1] == pytest.approx(1e-3 * 0.1, rel=1e-3)
    assert norms[0] > norms[1]


def test_averages_of_weights_do_not_disturb_the_run():
    runs = []
    for averaged in (False, True):
        model = BATCH_NORM.model()
        optimizer = AdaHessian(model.parameters(), **OPTIONS)
        curvature = Curvature(model, BATCH_NORM.loss, optimizer)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        swa, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
        for number in range(6):
            step(model, curvature, optimizer, BATCH_NORM.batch(seed=number), BATCH_NORM.loss)
            schedule.step()
            if averaged:
                ema.update_parameters(model)
                swa.update_parameters(model)
        if averaged:
            update_bn([BATCH_NORM.batch(seed=number) for number in range(6)], swa)
            for averages in (ema, swa):
                assert not torch.equal(next(averages.parameters()), next(model.parameters()))
        runs.append(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_a_compiled_model_trains_as_the_plain_one():
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model = MLP.model()
        called = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = AdaHessian(model.parameters(), **OPTIONS)
        curvature = Curvature(called, MLP.loss, optimizer)
        for number in range(4):
            step(called, curvature, optimizer, MLP.batch(seed=number), MLP.loss)
        results.append(list(model.parameters()))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)
