"""The contract of torch.optim, over the configurations that torch's own test machinery combines.

``OptimizerInfo`` is how torch's suite describes an optimizer; the tests here are ours. Their loss is the one of that
suite, a least-squares problem whose Hessian has rank one in each row. One probe can cancel to a curvature of exactly
zero there, which leaves eps alone in the denominator. So every configuration of AdaHessian has a large eps.
"""

import copy
import inspect
import io
import pickle
from functools import partial

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
from adahessian import AdaHessian, AdaHessianKron, Curvature

CPU = torch.device("cpu")
# Both optimizers, with the options that train the problem below.
BOTH = {AdaHessian: {"eps": 1.0}, AdaHessianKron: {}}
CONFIGURATIONS = {
    "default": {},
    "lr": {"lr": 0.01},
    "tensor lr": {"lr": torch.tensor(0.01)},
    "weight decay": {"weight_decay": 0.1},
    "maximize": {"weight_decay": 0.1, "maximize": True},
    "blocks": {"block_size": 2},
    "probes": {"num_probes": 2},
    "delay": {"curvature_every": 3, "curvature_warmup": 2},
    "capturable": {"capturable": True},
}
CONFIGURATIONS_OF = {
    AdaHessian: {
        "power": {"hessian_power": 0.5},
        "signed blocks": {"block_size": 2, "signed": True},
        "factored": {"averaging": "factored"},
        "steady start": {"steady_start": True},
    },
    AdaHessianKron: {"damping": {"damping": 0.5}},
}


def configurations(optimizer):
    def inputs(device, dtype=None):
        known = {**CONFIGURATIONS, **CONFIGURATIONS_OF[optimizer]}.items()
        return [OptimizerInput(None, {**BOTH[optimizer], **kwargs}, desc) for desc, kwargs in known]

    info = OptimizerInfo(
        optimizer,
        optim_inputs_func=inputs,
        supported_impls=(),
        not_og_supported_flags=(),
        has_capturable_arg=True,
    )
    for each in _get_optim_inputs_including_global_cliquey_kwargs(CPU, torch.float32, info):
        yield pytest.param(optimizer, each.kwargs, id=f"{optimizer.__name__} {each.desc}")


every_configuration = pytest.mark.parametrize(
    ("make", "kwargs"), [*configurations(AdaHessian), *configurations(AdaHessianKron)]
)


@pytest.fixture(params=[*BOTH], ids=lambda optimizer: optimizer.__name__)
def make(request):
    """One of both optimizers, with the options that train the problem."""
    return partial(request.param, **BOTH[request.param])


class Problem(nn.Module):
    """``|W x + b|^2``."""

    def __init__(self, contiguous=True):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(10, 5, generator=generator)
        self.weight = nn.Parameter(weight if contiguous else weight.t().contiguous().t())
        self.bias = nn.Parameter(torch.randn(10, generator=generator))
        self.input = torch.randn(5, generator=generator)

    @property
    def params(self):
        return [self.weight, self.bias]

    def measure(self, optimizer):
        Curvature(self, lambda problem, _: problem.loss(), optimizer, batch_fraction=1).measure(None)

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
@pytest.mark.parametrize("optimizer", BOTH)
def test_generic_errors(optimizer, given):
    assert given.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
    construction = given.optimizer_error_input
    with pytest.raises(given.error_type, match=given.error_regex):
        # Copies, because torch adds an optimizer's defaults to the groups that it was given.
        optimizer(copy.deepcopy(construction.params), **construction.kwargs)


@every_configuration
@pytest.mark.parametrize("contiguous", [True, False])
def test_steps_go_in_the_right_direction(make, kwargs, contiguous):
    problem = Problem(contiguous)
    optimizer = make(problem.params, **copy.deepcopy(kwargs))
    before = problem.loss().item()
    returned = [problem.step(optimizer).item() for _ in range(20)]
    assert returned[0] == before
    after = problem.loss().item()
    assert after > before if kwargs.get("maximize") else after < before


@every_configuration
def test_state_dicts_are_deterministic(make, kwargs):
    problem, twin = Problem(), Problem()
    optimizer = make(problem.params, **copy.deepcopy(kwargs))
    for _ in range(4):
        problem.step(optimizer)
    other = make(twin.params, **copy.deepcopy(kwargs))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.weight.data.copy_(problem.weight)
    twin.bias.data.copy_(problem.bias)
    assert set(other.state_dict()["param_groups"][0]) == set(optimizer.state_dict()["param_groups"][0])
    for _ in range(6):
        problem.step(optimizer)
        twin.step(other)
        assert torch.equal(values(problem), values(twin))


@every_configuration
def test_every_value_of_the_state_is_a_tensor(make, kwargs):
    problem = Problem()
    optimizer = make(problem.params, **copy.deepcopy(kwargs))
    problem.step(optimizer)
    assert all(isinstance(value, torch.Tensor) for state in optimizer.state.values() for value in state.values())


@every_configuration
def test_gradients_are_never_written_into(make, kwargs):
    problem = Problem()
    optimizer = make(problem.params, **copy.deepcopy(kwargs))
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
def test_copies_keep_all_public_attributes(make, kwargs):
    problem = Problem()
    optimizer = make(problem.params, **copy.deepcopy(kwargs))
    problem.step(optimizer)
    names = {name for name, _ in inspect.getmembers(optimizer) if not name.startswith("_")}
    assert names == {name for name, _ in inspect.getmembers(copy.deepcopy(optimizer)) if not name.startswith("_")}


@every_configuration
def test_without_gradients_a_step_changes_nothing(make, kwargs):
    problem = Problem()
    before = values(problem)
    optimizer = make(problem.params, **copy.deepcopy(kwargs))
    optimizer.step()
    assert torch.equal(values(problem), before)
    assert not optimizer.state


@every_configuration
def test_with_zero_gradients_and_no_decay_a_step_moves_nothing(make, kwargs):
    problem = Problem()
    optimizer = make(problem.params, **{**copy.deepcopy(kwargs), "weight_decay": 0.0})
    before = values(problem)
    for _ in range(3):
        for param in problem.params:
            param.grad = torch.zeros_like(param)
        problem.measure(optimizer)
        optimizer.step()
    assert torch.equal(values(problem), before)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: StepLR(o, step_size=5, gamma=0.9),
        lambda o: ExponentialLR(o, gamma=0.9),
        lambda o: CosineAnnealingLR(o, T_max=20),
        lambda o: OneCycleLR(o, max_lr=0.15, total_steps=21),
        ReduceLROnPlateau,
    ],
)
def test_schedulers(make, schedule):
    problem = Problem()
    optimizer = make(problem.params)
    scheduler = schedule(optimizer)
    before = problem.loss().item()
    for _ in range(20):
        loss = problem.step(optimizer)
        scheduler.step(loss.detach()) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
    assert problem.loss().item() < before


def test_hooks_run_in_order(make):
    problem, calls = Problem(), []
    optimizer = make(problem.params)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    problem.step(optimizer)
    handle.remove()
    problem.step(optimizer)
    assert calls == ["before", "after", "before"]


def test_the_closure_runs_with_gradients_enabled(make):
    problem, seen = Problem(), []
    optimizer = make(problem.params)

    def closure():
        seen.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = problem.loss()
        loss.backward(create_graph=optimizer.curvature_due)
        return loss

    with torch.no_grad():
        optimizer.step(closure)
    assert seen == [True]


def test_parameters_keep_their_identity(make):
    problem = Problem()
    optimizer = make(problem.params)
    before = [(id(param), param.data_ptr()) for param in problem.params]
    problem.step(optimizer)
    assert [(id(param), param.data_ptr()) for param in problem.params] == before


def test_repr_names_the_options(make):
    text = repr(make(Problem().params, block_size=4))
    assert "block_size: 4" in text
    assert "curvature_every: 1" in text


def test_groups_with_their_own_lr_and_decay(make):
    problem = Problem()
    groups = [{"params": [problem.weight], "lr": 0.1, "weight_decay": 0.5}, {"params": [problem.bias]}]
    optimizer = make(groups, lr=0.0)
    before = problem.bias.detach().clone()
    start = problem.loss().item()
    for _ in range(20):
        problem.step(optimizer)
    assert problem.loss().item() < start
    assert torch.equal(problem.bias, before)


def test_state_dict_hooks(make):
    problem = Problem()
    optimizer = make(problem.params)
    problem.step(optimizer)
    optimizer.register_state_dict_pre_hook(lambda o: o.state.update(note=1))
    optimizer.register_state_dict_post_hook(lambda o, saved: {**saved, "seen": saved["state"].pop("note")})
    assert optimizer.state_dict()["seen"] == 1


def test_global_step_hooks(make):
    problem, calls = Problem(), []
    optimizer = make(problem.params)
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
def test_state_goes_between_named_and_unnamed_parameters(make, saved_with_names, loaded_with_names):
    def made(problem, named):
        names = ("weight", "bias")
        params = zip(names, problem.params, strict=True) if named else problem.params
        return make(params)

    problem, twin = Problem(), Problem()
    optimizer, other = made(problem, saved_with_names), made(twin, loaded_with_names)
    problem.step(optimizer)
    twin.step(other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    problem.step(optimizer)
    twin.step(other)
    assert torch.equal(values(problem), values(twin))


@every_configuration
@pytest.mark.parametrize("way", ["file", "pickle", "deepcopy"])
def test_it_goes_on_after(make, kwargs, way):
    """A file that holds weights only, a pickle and a copy."""
    problem = Problem()
    optimizer = make(problem.params, **copy.deepcopy(kwargs))
    for _ in range(2):
        problem.step(optimizer)
    if way == "file":
        twin = copy.deepcopy(problem)
        torch.save(optimizer.state_dict(), file := io.BytesIO())
        other = make(twin.params, **copy.deepcopy(kwargs))
        other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    else:
        both = problem, optimizer
        twin, other = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    for _ in range(4):
        problem.step(optimizer)
        twin.step(other)
    assert torch.equal(values(problem), values(twin))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_loading_casts_the_momentum_to_the_dtype_of_its_parameter(make, dtype):
    problem, twin = Problem(), Problem().to(dtype)
    optimizer, other = make(problem.params), make(twin.params)
    for _ in range(3):
        problem.step(optimizer)
    other.load_state_dict(optimizer.state_dict())
    for param, state in other.state.items():
        assert state.pop("exp_avg").dtype == dtype
        assert {value.dtype for value in state.values()} <= {torch.float32, torch.promote_types(dtype, torch.float32)}
        assert state["measurements"].dtype == state["dropped"].dtype == torch.promote_types(dtype, torch.float32)
        assert param.dtype == dtype


def test_parameters_of_several_dtypes_in_one_group(make):
    problem = Problem()
    problem.bias.data = problem.bias.data.bfloat16()
    optimizer = make(problem.params)
    before = problem.loss().item()
    for _ in range(10):
        problem.step(optimizer)
    assert problem.loss().item() < before
    assert [optimizer.state[param]["exp_avg"].dtype for param in problem.params] == [torch.float32, torch.bfloat16]


def test_a_group_that_is_added_trains_with_its_own_options(make):
    problem = Problem()
    optimizer = make([problem.weight], curvature_every=10, curvature_warmup=0)
    problem.step(optimizer)
    assert not optimizer.curvature_due
    before = problem.bias.detach().clone()
    optimizer.add_param_group({"params": [problem.bias], "lr": 0.5})
    assert optimizer.curvature_due
    problem.step(optimizer)
    assert not torch.equal(problem.bias, before)
    assert set(optimizer.param_groups[0]) == set(optimizer.param_groups[1])
    assert [group["lr"] for group in optimizer.param_groups] == [optimizer.defaults["lr"], 0.5]


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_a_tensor_lr_is_the_float(make, lr, shape):
    problem, twin = Problem(), Problem()
    optimizer, other = make(problem.params, lr=lr), make(twin.params, lr=torch.full(shape, lr, dtype=torch.float64))
    for _ in range(3):
        problem.step(optimizer)
        twin.step(other)
    assert torch.equal(values(problem), values(twin))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(make, set_to_none):
    problem = Problem()
    optimizer = make(problem.params)
    problem.loss().backward(create_graph=optimizer.curvature_due)
    optimizer.step()
    optimizer.zero_grad(set_to_none)
    assert all(param.grad is None if set_to_none else not param.grad.any() for param in problem.params)


def test_a_profile_names_its_steps(make):
    problem = Problem()
    optimizer = make(problem.params)
    with torch.profiler.profile(acc_events=True) as profile:
        problem.step(optimizer)
    assert f"Optimizer.step#{type(optimizer).__name__}.step" in {event.key for event in profile.key_averages()}


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
