"""The contract of torch.optim, over the configurations that torch's own test machinery combines.

``OptimizerInfo`` is how torch's suite describes an optimizer; the tests here are ours. Their loss is the one of that
suite, a least-squares problem whose Hessian has rank one in each row. One probe can cancel to a curvature of exactly
zero there, which leaves eps alone in the denominator. So every configuration has a large eps.
"""

import copy
import inspect

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    get_error_inputs_for_all_optims,
)

import reference
from adahessian import AdaHessian

CPU = torch.device("cpu")


def optimizer_inputs(device, dtype=None):
    configurations = {
        "default": {},
        "lr": {"lr": 0.01},
        "tensor lr": {"lr": torch.tensor(0.01)},
        "weight decay": {"weight_decay": 0.1},
        "maximize": {"weight_decay": 0.1, "maximize": True},
        "power": {"hessian_power": 0.5},
        "blocks": {"block_size": 2, "signed": True},
        "factored": {"averaging": "factored"},
        "probes": {"num_probes": 2},
        "delay": {"curvature_every": 3, "curvature_warmup": 2},
        "steady start": {"steady_start": True},
        "capturable": {"capturable": True},
    }
    return [OptimizerInput(None, {"eps": 1.0, **kwargs}, desc) for desc, kwargs in configurations.items()]


INFO = OptimizerInfo(
    AdaHessian,
    optim_inputs_func=optimizer_inputs,
    supported_impls=(),
    not_og_supported_flags=(),
    has_capturable_arg=True,
)


every_configuration = pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param(each.kwargs, id=each.desc)
        for each in _get_optim_inputs_including_global_cliquey_kwargs(CPU, torch.float32, INFO)
    ],
)


class Problem:
    """``|W x + b|^2``."""

    def __init__(self, contiguous=True):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(10, 5, generator=generator)
        self.weight = nn.Parameter(weight if contiguous else weight.t().contiguous().t())
        self.bias = nn.Parameter(torch.randn(10, generator=generator))
        self.input = torch.randn(5, generator=generator)

    @property
    def params(self):
        return [self.weight, self.bias]

    def loss(self):
        return (self.weight.mv(self.input) + self.bias).pow(2).sum()

    def step(self, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward(create_graph=optimizer.curvature_due)
            return loss

        return optimizer.step(closure)


def values(problem):
    return torch.cat([param.detach().flatten() for param in problem.params])


@pytest.mark.parametrize(
    "given",
    get_error_inputs_for_all_optims(CPU, torch.float32),
    ids=lambda given: given.optimizer_error_input.desc,
)
def test_generic_errors(given):
    assert given.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
    construction = given.optimizer_error_input
    with pytest.raises(given.error_type, match=given.error_regex):
        AdaHessian(construction.params, **construction.kwargs)


@every_configuration
@pytest.mark.parametrize("contiguous", [True, False])
def test_steps_go_in_the_right_direction(kwargs, contiguous):
    problem = Problem(contiguous)
    optimizer = AdaHessian(problem.params, **copy.deepcopy(kwargs))
    before = problem.loss().item()
    returned = [problem.step(optimizer).item() for _ in range(20)]
    assert returned[0] == before
    after = problem.loss().item()
    assert after > before if kwargs.get("maximize") else after < before


@every_configuration
def test_state_dicts_are_deterministic(kwargs):
    problem, twin = Problem(), Problem()
    optimizer = AdaHessian(problem.params, **copy.deepcopy(kwargs))
    for _ in range(4):
        problem.step(optimizer)
    other = AdaHessian(twin.params, **copy.deepcopy(kwargs))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.weight.data.copy_(problem.weight)
    twin.bias.data.copy_(problem.bias)
    assert set(other.state_dict()["param_groups"][0]) == set(optimizer.state_dict()["param_groups"][0])
    for _ in range(6):
        problem.step(optimizer)
        twin.step(other)
        assert torch.equal(values(problem), values(twin))


@every_configuration
def test_every_value_of_the_state_is_a_tensor(kwargs):
    problem = Problem()
    optimizer = AdaHessian(problem.params, **copy.deepcopy(kwargs))
    problem.step(optimizer)
    assert all(isinstance(value, torch.Tensor) for state in optimizer.state.values() for value in state.values())


@every_configuration
def test_gradients_are_never_written_into(kwargs):
    problem = Problem()
    optimizer = AdaHessian(problem.params, **copy.deepcopy(kwargs))
    problem.step(optimizer)
    for param in problem.params:
        param.grad = torch.randn_like(param)
    kept = [(param.grad, param.grad._version, param.grad.clone()) for param in problem.params]
    optimizer.step()
    for param, (grad, version, value) in zip(problem.params, kept, strict=True):
        assert param.grad is grad
        assert grad._version == version
        assert torch.equal(grad, value)


@every_configuration
def test_copies_keep_all_public_attributes(kwargs):
    problem = Problem()
    optimizer = AdaHessian(problem.params, **copy.deepcopy(kwargs))
    problem.step(optimizer)
    names = {name for name, _ in inspect.getmembers(optimizer) if not name.startswith("_")}
    assert names == {name for name, _ in inspect.getmembers(copy.deepcopy(optimizer)) if not name.startswith("_")}


@every_configuration
def test_without_gradients_a_step_changes_nothing(kwargs):
    problem = Problem()
    before = values(problem)
    optimizer = AdaHessian(problem.params, **copy.deepcopy(kwargs))
    optimizer.step()
    assert torch.equal(values(problem), before)
    assert not optimizer.state


@every_configuration
def test_with_zero_gradients_and_no_decay_a_step_moves_nothing(kwargs):
    problem = Problem()
    optimizer = AdaHessian(problem.params, **{**copy.deepcopy(kwargs), "weight_decay": 0.0})
    before = values(problem)
    for _ in range(3):
        for param in problem.params:
            param.grad = torch.zeros_like(param)
        optimizer.set_curvature({param: torch.ones_like(param) for param in problem.params})
        optimizer.step()
    assert torch.equal(values(problem), before)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: StepLR(o, step_size=5, gamma=0.9),
        lambda o: ExponentialLR(o, gamma=0.9),
        lambda o: CosineAnnealingLR(o, T_max=20),
        lambda o: OneCycleLR(o, max_lr=0.15, total_steps=21),
        ReduceLROnPlateau,
    ],
)
def test_schedulers(make):
    problem = Problem()
    optimizer = AdaHessian(problem.params, eps=1.0)
    scheduler = make(optimizer)
    before = problem.loss().item()
    for _ in range(20):
        loss = problem.step(optimizer)
        scheduler.step(loss.detach()) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
    assert problem.loss().item() < before


def test_hooks_run_in_order():
    problem, calls = Problem(), []
    optimizer = AdaHessian(problem.params, eps=1.0)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    problem.step(optimizer)
    handle.remove()
    problem.step(optimizer)
    assert calls == ["before", "after", "before"]


def test_the_closure_runs_with_gradients_enabled():
    problem, seen = Problem(), []
    optimizer = AdaHessian(problem.params, eps=1.0)

    def closure():
        seen.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = problem.loss()
        loss.backward(create_graph=optimizer.curvature_due)
        return loss

    with torch.no_grad():
        optimizer.step(closure)
    assert seen == [True]


def test_parameters_keep_their_identity():
    problem = Problem()
    optimizer = AdaHessian(problem.params, eps=1.0)
    before = [(id(param), param.data_ptr()) for param in problem.params]
    problem.step(optimizer)
    assert [(id(param), param.data_ptr()) for param in problem.params] == before


def test_repr_names_the_options():
    text = repr(AdaHessian(Problem().params, block_size=4))
    assert "block_size: 4" in text
    assert "hessian_power: 1.0" in text


def test_groups_with_their_own_lr_and_decay():
    problem = Problem()
    groups = [{"params": [problem.weight], "lr": 0.1, "weight_decay": 0.5}, {"params": [problem.bias]}]
    optimizer = AdaHessian(groups, lr=0.0, eps=1.0)
    before = problem.bias.detach().clone()
    start = problem.loss().item()
    for _ in range(20):
        problem.step(optimizer)
    assert problem.loss().item() < start
    assert torch.equal(problem.bias, before)


def test_state_dict_hooks():
    problem = Problem()
    optimizer = AdaHessian(problem.params, eps=1.0)
    problem.step(optimizer)
    optimizer.register_state_dict_pre_hook(lambda o: o.state.update(note=1))
    optimizer.register_state_dict_post_hook(lambda o, saved: {**saved, "seen": saved["state"].pop("note")})
    assert optimizer.state_dict()["seen"] == 1


def test_global_step_hooks():
    problem, calls = Problem(), []
    optimizer = AdaHessian(problem.params, eps=1.0)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    try:
        problem.step(optimizer)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("saved_with_names", [True, False])
@pytest.mark.parametrize("loaded_with_names", [True, False])
def test_state_goes_between_named_and_unnamed_parameters(saved_with_names, loaded_with_names):
    def make(problem, named):
        names = ("weight", "bias")
        params = zip(names, problem.params, strict=True) if named else problem.params
        return AdaHessian(params, eps=1.0)

    problem, twin = Problem(), Problem()
    optimizer, other = make(problem, saved_with_names), make(twin, loaded_with_names)
    problem.step(optimizer)
    twin.step(other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    problem.step(optimizer)
    twin.step(other)
    assert torch.equal(values(problem), values(twin))


real_dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])
any_dtype = real_dtypes | st.sampled_from([torch.complex64, torch.complex128])


@settings(max_examples=150, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), max_size=4).map(tuple),
    dtype=any_dtype,
    block_size=st.integers(1, 6),
    averaging=st.sampled_from(["auto", "kernel", "row", "none", "factored"]),
    power=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_two_steps_of_any_shape_block_and_dtype(shape, dtype, block_size, averaging, power, seed):
    """Against the formula in float64."""
    assume(not (dtype.is_complex and averaging == "factored"))
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64

    def draw():
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)

    def parts(tensor):
        tensor = tensor.detach().to(wide)
        return [tensor.real, tensor.imag] if dtype.is_complex else [tensor]

    param = nn.Parameter(draw())
    optimizer = AdaHessian(
        [param], lr=0.1, betas=(0.5, 0.25), eps=0.1, weight_decay=0.1, hessian_power=power, block_size=block_size,
        averaging=averaging,
    )  # fmt: skip
    theta = [part.numpy().ravel().copy() for part in parts(param)]
    m = [0.0] * len(theta)
    v: list = [[0.0, 0.0] for _ in theta]
    for t in (1, 2):
        gradient, curvature = draw(), draw()
        param.grad = gradient
        optimizer.set_curvature({param: curvature})
        optimizer.step()
        for i, (g, d) in enumerate(zip(parts(gradient), parts(curvature), strict=True)):
            squares = reference.squares(d.numpy().ravel(), shape, averaging, block_size, signed=False)
            m[i] = 0.5 * m[i] + 0.5 * g.numpy().ravel()
            v[i] = [0.25 * old + 0.75 * new for old, new in zip(v[i], squares, strict=False)]
            rms = reference.root([each / (1 - 0.25**t) for each in v[i]], shape, averaging, block_size)
            denominator = rms**power + 0.1
            theta[i] = 0.99 * theta[i] - 0.1 * m[i] / (1 - 0.5**t) / denominator
    tolerance = {torch.bfloat16: 4e-2, torch.float16: 1e-2}.get(dtype, 1e-5 if wide != dtype else 1e-12)
    for found, expected in zip(parts(param), theta, strict=True):
        np.testing.assert_allclose(found.numpy().ravel(), expected, rtol=tolerance, atol=tolerance)
