"""The fused kernels against their plain twins: on CUDA, or on a CPU by Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from adahessian import AdaHessian

pytest.importorskip("triton")
# The interpreter computes with NumPy, which warns of infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

SHAPES = [
    (),
    (1,),
    (2500,),
    (3, 70),
    (8, 64),
    (5, 33),
    (2, 4100),
    (3, 2080),
    (4, 3, 3, 3),
    (6, 5, 7),
    (2, 3, 2, 3, 2),
    (0, 4),
]
SETTINGS = [
    {},
    {"block_size": 8},
    {"block_size": 32, "averaging": "signed"},
    {"blocks": "none", "hessian_power": 0.5},
    {"blocks": "row", "block_size": 2, "hessian_power": 0.0},
    {"blocks": "kernel", "maximize": True, "beta2_per": "step"},
    {"betas": (0.0, 0.0), "weight_decay": 0.0},
    {"block_size": 8, "steady_start": True},
]


def pair(settings, dtype=torch.float32, shapes=SHAPES, channels_last=False) -> tuple[AdaHessian, AdaHessian]:
    """The same parameters, for the kernels and for plain code."""
    optimizers = []
    for way in ({"fused": True}, {"fused": False, "foreach": True}):
        generator = torch.Generator().manual_seed(0)
        params = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
        if channels_last:
            params = [as_channels_last(param) for param in params]
        params = [param.requires_grad_() for param in params]
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.02}]
        optimizers.append(AdaHessian(groups, **{"lr": 0.1, "weight_decay": 0.1, "eps": 0.1, **settings, **way}))
    return optimizers[0], optimizers[1]


def as_channels_last(param: Tensor) -> Tensor:
    return param.movedim(1, -1).contiguous().movedim(-1, 1) if param.dim() > 2 else param


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def random_step(optimizer, seed, *, measure, spoil=None, skip=None):
    generator = torch.Generator().manual_seed(seed)
    diagonal, gradients = {}, {}
    for i, param in enumerate(params_of(optimizer)):
        param.grad = torch.randn(param.shape, generator=generator).to(param)
        values = torch.randn(param.shape, generator=generator).to(DEVICE)
        gradient = torch.randn(param.shape, generator=generator).to(param)
        if param.dim() > 1 and param.numel():
            values[0], gradient[0] = 0.0, 0.0  # blocks that took no part
        if i == spoil:
            values.view(-1)[-1] = torch.inf
        if i != skip:
            diagonal[param], gradients[param] = values, gradient
    if measure:
        optimizer.feed_curvature(diagonal, gradients if seed % 2 else None)
    optimizer.step()


def assert_alike(fused, plain, **tolerance):
    for a, b in zip(params_of(fused), params_of(plain), strict=True):
        torch.testing.assert_close(a, b, **tolerance)
        for key, value in plain.state[b].items():
            torch.testing.assert_close(fused.state[a][key], value, **tolerance, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_steps_and_measurements_of_every_shape(settings):
    fused, plain = pair(settings)
    for seed, measure in enumerate([True, False, True, True, False], start=1):
        for optimizer in (fused, plain):
            random_step(optimizer, seed, measure=measure)
        assert_alike(fused, plain, rtol=2e-5, atol=1e-6)


def test_a_measurement_that_is_not_finite_is_dropped_and_counted():
    fused, plain = pair({"block_size": 8})
    for seed in (1, 2, 3):
        for optimizer in (fused, plain):
            random_step(optimizer, seed, measure=True, spoil=4 if seed == 2 else None)
    assert_alike(fused, plain, rtol=2e-5, atol=1e-6)
    assert [int(state["dropped"]) for state in fused.state.values()] == [int(i == 4) for i in range(len(SHAPES))]


def test_a_parameter_that_was_not_measured_keeps_its_average():
    fused, plain = pair({"block_size": 8})
    for seed in (1, 2):
        for optimizer in (fused, plain):
            random_step(optimizer, seed, measure=True, skip=5 if seed == 2 else None)
    assert_alike(fused, plain, rtol=2e-5, atol=1e-6)
    assert fused.state[params_of(fused)[5]]["hessian_age"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters(dtype):
    fused, plain = pair({"block_size": 8}, dtype)
    for seed in (1, 2, 3):
        for optimizer in (fused, plain):
            random_step(optimizer, seed, measure=True)
    # The kernel rounds once a step, the plain code after each operation.
    for a, b in zip(params_of(fused), params_of(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)
        torch.testing.assert_close(fused.state[a]["hessian_rms"], plain.state[b]["hessian_rms"], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"blocks": "row", "block_size": 2}], ids=str)
def test_channels_last(settings):
    """Kernels in another order of memory; row blocks there are left to plain code."""
    fused, plain = pair(settings, channels_last=True)
    for seed, measure in enumerate([True, False, True], start=1):
        for optimizer in (fused, plain):
            random_step(optimizer, seed, measure=measure)
    assert_alike(fused, plain, rtol=2e-5, atol=1e-6)


def test_addresses_that_are_not_aligned():
    optimizers = []
    for way in ({"fused": True}, {"fused": False}):
        flat = torch.arange(5001.0, device=DEVICE)
        param = flat[1:].requires_grad_()
        param.grad = torch.ones(5002, device=DEVICE)[2:]
        optimizers.append(AdaHessian([param], **way))
        optimizers[-1].feed_curvature({param: torch.linspace(1, 2, 5000, device=DEVICE)})
        optimizers[-1].step()
    assert_alike(*optimizers, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probes_are_the_same_signs(dtype):
    fused, plain = pair({"seed": -7}, dtype)
    for optimizer in (fused, plain):
        optimizer.param_groups[1]["measurements"] = 2**40
    for probe in (0, 3):
        for a, b in zip(fused.draw_probes(probe), plain.draw_probes(probe), strict=True):
            assert a.dtype == dtype
            assert torch.equal(a, b)


def test_probes_can_be_drawn_into_given_tensors():
    for optimizer in pair({}):
        out = [torch.zeros_like(param) for param in params_of(optimizer)]
        drawn = optimizer.draw_probes(1, out=out)
        for a, b, c in zip(out, drawn, optimizer.draw_probes(1), strict=True):
            assert a is b
            assert torch.equal(a, c)


def test_what_the_kernels_cannot_take_is_left_to_plain_code():
    params = [torch.randn(4, 4, dtype=dtype, device=DEVICE) for dtype in (torch.float64, torch.complex64)]
    params += [torch.randn(4, 6, device=DEVICE).t(), torch.randn(3, device=DEVICE)]
    optimizers = []
    for fused in (True, False):
        copies = [param.clone().requires_grad_() for param in params]
        optimizers.append(AdaHessian(copies, fused=fused, block_size=2))
        for param in copies:
            param.grad = torch.ones_like(param)
        optimizers[-1].feed_curvature({param: torch.ones_like(param) for param in copies})
        optimizers[-1].step()
    assert_alike(*optimizers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"foreach": True}, "cannot both be True"),
        ({"capturable": True}, "capturable=False"),
        ({"lr": torch.tensor(0.1)}, "lr as a float"),
        ({"fused": 1}, "Invalid fused value"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message):
        AdaHessian([torch.zeros(1, requires_grad=True)], **{"fused": True, **settings})


def test_the_kernels_need_a_gpu_that_triton_knows_and_a_compiler_of_c(monkeypatch):
    from adahessian import fused

    find = fused._has_triton.__wrapped__
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(fused.shutil, "which", lambda name: name)
    monkeypatch.delenv("CC", raising=False)
    assert find(torch.device("cuda"))
    monkeypatch.setattr(fused.shutil, "which", lambda name: None)
    assert not find(torch.device("cuda"))
    monkeypatch.setenv("CC", "/opt/cc")
    assert find(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert not find(torch.device("cuda"))


def test_a_stride_of_a_dimension_of_size_one_means_nothing():
    from adahessian.fused import _strided

    kernel = torch.empty_strided((4, 1, 1, 1), (1, 1, 4, 4))
    assert _strided(kernel, (1, 1, 1, 1)) is kernel
    assert _strided(torch.zeros(2, 3), (1, 2)).stride() == (1, 2)
