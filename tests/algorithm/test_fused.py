"""The fused kernels against plain expressions: on CUDA, or on a CPU by Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from adahessian import AdaHessian
from adahessian.algorithm import fused
from adahessian.algorithm.fused import FusedTensors, can_fuse
from adahessian.algorithm.probes import draw_like, probe_key
from adahessian.algorithm.shapes import Blocks, Factored

pytest.importorskip("triton")
# The interpreter computes with NumPy, which warns of infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

BLOCKS = [
    Blocks(()),
    Blocks((1,)),
    Blocks((2500,)),
    Blocks((3, 70), row_length=8),
    Blocks((8, 64), row_length=8),
    Blocks((5, 33), row_length=32),
    Blocks((5, 33), kernel_dims=1),
    Blocks((2, 4100), row_length=33),
    Blocks((3, 2080), row_length=32),
    Blocks((2, 2048), row_length=64),
    Blocks((4, 3, 3, 3), kernel_dims=2),
    Blocks((6, 5, 7), kernel_dims=1),
    Blocks((6, 5, 7), row_length=2),
    Blocks((2, 3, 2, 3, 2), kernel_dims=3),
    Blocks((0, 4)),
]
GROUP = {"fused": True, "capturable": False, "lr": 0.1}
SCALARS = {
    "gradient_scale": 1.0,
    "step_scale": -0.2,
    "decay": 0.9,
    "momentum_weight": 0.1,
    "eps": 0.1,
    "power": 1.0,
}


def randn(shapes, seed, dtype=torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def tensors_for(params, shapes=BLOCKS, *, signed=False) -> FusedTensors:
    assert all(can_fuse(param, shape, GROUP, None) for param, shape in zip(params, shapes, strict=True))
    return FusedTensors(params, shapes, range(len(params)), signed=signed)


def over_blocks(function, elements: Tensor, blocks: Blocks) -> Tensor:
    if blocks.kernel_dims:
        return function(elements, dim=tuple(range(-blocks.kernel_dims, 0)), keepdim=True)
    if blocks.row_length == 1:
        return elements
    return torch.cat([function(part, dim=-1, keepdim=True) for part in elements.split(blocks.row_length, -1)], -1)


def spread(values: Tensor, blocks: Blocks) -> Tensor:
    if blocks.row_length == 1:
        return values.expand(blocks.shape)
    return values.repeat_interleave(blocks.row_length, -1)[..., : blocks.shape[-1]]


class Step:
    """Random arguments of a step, and what they become by float64 expressions."""

    def __init__(self, dtype=torch.float32, shapes=BLOCKS, order=lambda tensor: tensor):
        sizes = [blocks.shape for blocks in shapes]
        self.shapes = shapes
        self.params, self.grads, self.exp_avgs = ([order(t) for t in randn(sizes, seed, dtype)] for seed in range(3))
        self.rms = [rms.abs() for rms in randn([blocks.stored_shape for blocks in shapes], 3)]
        for rms in self.rms[2:]:
            rms.view(-1)[-1:] = torch.inf  # a block that was never measured

    def expected(self, scalars) -> tuple[list[Tensor], list[Tensor]]:
        params, exp_avgs = [], []
        for p, g, m, rms, blocks in zip(self.params, self.grads, self.exp_avgs, self.rms, self.shapes, strict=True):
            m = m.double() + (g.double() * scalars["gradient_scale"] - m.double()) * scalars["momentum_weight"]
            denominator = spread(rms, blocks).double() ** scalars["power"] + scalars["eps"]
            params.append(p.double() * scalars["decay"] + scalars["step_scale"] * m / denominator)
            exp_avgs.append(m)
        return params, exp_avgs

    def check(self, scalars=None, tensors=None, **tolerance):
        scalars = SCALARS | (scalars or {})
        params, exp_avgs = self.expected(scalars)
        tensors = tensors or tensors_for(self.params, self.shapes)
        tensors.step(self.params, self.grads, self.exp_avgs, self.rms, **scalars)
        for found, wanted in zip(self.params + self.exp_avgs, params + exp_avgs, strict=True):
            torch.testing.assert_close(found.double(), wanted, **{"rtol": 1e-5, "atol": 1e-6} | tolerance)


@pytest.mark.parametrize(
    "scalars",
    [
        {},
        {"gradient_scale": -1.0, "decay": 1.0},
        {"power": 0.5, "step_scale": 0.3},
        {"power": 0.0, "momentum_weight": 1.0},
        {"power": 1, "eps": 1, "decay": 1, "momentum_weight": 1},  # integers
    ],
    ids=str,
)
def test_steps_of_every_shape(scalars):
    Step().check(scalars)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_steps_of_narrow_parameters_round_once(dtype, digits):
    Step(dtype).check(rtol=digits, atol=1e-4)


def as_channels_last(tensor: Tensor) -> Tensor:
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if tensor.dim() > 2 else tensor


CHANNELS_LAST = [
    blocks for blocks in BLOCKS if len(blocks.shape) < 3 or blocks.kernel_dims == len(blocks.shape) - 2
] + [Blocks((4, 8, 1, 1), kernel_dims=2)]


def test_steps_in_channels_last():
    step = Step(shapes=CHANNELS_LAST, order=as_channels_last)
    step.check()
    step.grads = [grad.contiguous() for grad in step.grads]
    step.check()


def test_steps_of_memory_that_is_not_aligned():
    """The neighbours of what a kernel writes keep their values."""
    step = Step(shapes=[Blocks((5000,)), Blocks((2, 2048), row_length=64)])
    whole = [torch.full((tensor.numel() + 2,), 7.0, device=DEVICE) for tensor in step.params + step.exp_avgs]
    inner = [
        part[1:-1].view_as(like).copy_(like) for part, like in zip(whole, step.params + step.exp_avgs, strict=True)
    ]
    step.params, step.exp_avgs = inner[:2], inner[2:]
    step.check()
    assert all(part[0] == part[-1] == 7.0 for part in whole)


def test_gradients_of_another_dtype_are_cast():
    step = Step()
    step.grads = [grad.double() for grad in step.grads]
    step.check()


def test_autograd_notices_a_step():
    step = Step(shapes=[Blocks((3,))])
    param = step.params[0].requires_grad_()
    loss = (param**2).sum()
    with torch.no_grad():
        step.check()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tables_are_uploaded_only_when_an_address_changes(monkeypatch):
    step = Step()
    tensors = tensors_for(step.params)
    step.check(tensors=tensors)
    uploads = []
    monkeypatch.setattr(tensors, "_upload", lambda table: uploads.append(table) or table.to(DEVICE))
    step.check(tensors=tensors)
    assert not uploads
    step.grads[2] = step.grads[2].clone()
    step.params[3].data = step.params[3].clone()
    step.check(tensors=tensors)
    assert len(uploads) == 1


def test_a_selection_is_the_same_for_some_parameters():
    step = Step()
    chosen = (2, 5, 8)
    selected = FusedTensors([step.params[i] for i in chosen], [BLOCKS[i] for i in chosen], chosen, signed=False)
    out = [torch.empty_like(step.params[i]) for i in chosen]
    selected.draw(out, probe_key(1, 2, 3))
    for i, signs in zip(chosen, out, strict=True):
        assert torch.equal(signs, draw_like(step.params[i], probe_key(1, 2, 3), i))
    for name in ("params", "grads", "exp_avgs", "rms", "shapes"):
        setattr(step, name, [getattr(step, name)[i] for i in chosen])
    step.check(tensors=selected)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("order", [None, as_channels_last])
def test_reductions_of_every_shape(signed, with_gradients, order):
    shapes = BLOCKS if order is None else CHANNELS_LAST
    params, diagonals, gradients = (randn([blocks.shape for blocks in shapes], seed) for seed in range(3))
    for diagonal, gradient in zip(diagonals, gradients, strict=True):
        if diagonal.dim() > 1 and diagonal.numel():
            diagonal[0] = gradient[0] = 0.0  # took no part
            diagonal[1] = 0.0  # took part, but is flat
    if order is not None:
        params = list(map(order, params))
    tensors = tensors_for(params, shapes, signed=signed)
    values, not_finite = tensors.reduce(diagonals, gradients if with_gradients else None)
    assert not_finite.tolist() == [0] * len(shapes)
    assert not_finite.dtype == torch.int32
    for found, blocks, d, g in zip(values, shapes, diagonals, gradients, strict=True):
        wanted = over_blocks(torch.mean, d if signed else d.abs(), blocks).abs()
        if with_gradients:
            wanted[over_blocks(torch.any, (d != 0) | (g != 0), blocks).logical_not()] = -1.0
        assert found.shape == blocks.stored_shape
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e20])
def test_measurements_whose_square_is_not_finite_are_flagged(value):
    shapes = [Blocks((3000,)), Blocks((3, 70), row_length=8), Blocks((4, 4), kernel_dims=1)]
    diagonals = randn([blocks.shape for blocks in shapes], 0)
    diagonals[0][-1] = value
    diagonals[2][1] = value
    tensors = tensors_for(diagonals, shapes)
    assert tensors.reduce(diagonals, None)[1].tolist() == [1, 0, 1]
    assert tensors.reduce(diagonals, diagonals)[1].tolist() == [1, 0, 1]


def test_folds_of_every_shape():
    params = randn([blocks.shape for blocks in BLOCKS], 0)
    before, values = ([t.abs() for t in randn([blocks.stored_shape for blocks in BLOCKS], seed)] for seed in (1, 2))
    for rms, value in zip(before, values, strict=True):
        if rms.numel() > 3:
            rms.view(-1)[:2] = torch.inf
            value.view(-1)[1:3] = -1.0
    weights = torch.linspace(0.1, 1.0, len(BLOCKS), device=DEVICE)
    not_finite = torch.zeros(len(BLOCKS), dtype=torch.int32, device=DEVICE)
    not_finite[4] = 1
    after = [rms.clone() for rms in before]
    tensors_for(params).fold(after, values, not_finite, weights)
    for i, (rms, value, found) in enumerate(zip(before, values, after, strict=True)):
        previous, square = rms.square().where(rms.isfinite(), 0.0), value.clamp(min=0.0).square()
        wanted = previous.lerp(square, weights[i]).sqrt().masked_fill(rms.isinf() & (value < 0), torch.inf)
        torch.testing.assert_close(found, rms if i == 4 else wanted, rtol=1e-6, atol=0.0)


def test_a_weight_of_one_gives_exactly_the_new_value():
    rms, value = (t.abs() for t in randn([(3000,)] * 2, 0))
    tensors = tensors_for([rms], [Blocks((3000,))])
    zero, one = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.ones(1, device=DEVICE)
    tensors.fold([rms], [value], zero, one)
    assert torch.equal(rms, value.square().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("measurement", [0, 2**40])
def test_probes_are_the_signs_of_draw_like(dtype, measurement):
    params = randn([blocks.shape for blocks in BLOCKS], 0, dtype)
    positions = [3 * i + 10**6 * (i == 2) for i in range(len(params))]
    tensors = FusedTensors(params, BLOCKS, positions, signed=False)
    for probe in (0, 3):
        key = probe_key(-7, measurement, probe)
        out = [torch.empty_like(param) for param in params]
        tensors.draw(out, key)
        for param, position, signs in zip(params, positions, out, strict=True):
            assert torch.equal(signs, draw_like(param, key, position))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: [out[0].double(), out[1]],
        lambda out: [out[0].t().contiguous().t(), out[1]],
        lambda out: [out[0][:2].contiguous(), out[1]],
        lambda out: out[:1],
    ],
    ids=["dtype", "strides", "shape", "number"],
)
def test_probes_are_not_drawn_into_tensors_unlike_the_parameters(spoil):
    params = [torch.zeros(4, 6, device=DEVICE), torch.zeros(3, device=DEVICE)]
    tensors = tensors_for(params, [Blocks((4, 6)), Blocks((3,))])
    out = spoil([torch.zeros_like(param) for param in params])
    with pytest.raises(ValueError, match="out"):
        tensors.draw(out, probe_key(1, 2, 3))
    assert not any(each.any() for each in out)


def test_what_the_kernels_take():
    matrix, rows = torch.zeros(4, 6, device=DEVICE), Blocks((4, 6), row_length=2)
    state = {"exp_avg": torch.zeros_like(matrix), "hessian_rms": torch.zeros(4, 3, device=DEVICE)}
    assert can_fuse(matrix, rows, GROUP, None)
    assert can_fuse(matrix, rows, GROUP, state)
    assert not can_fuse(matrix, rows, GROUP | {"fused": False}, None)
    assert not can_fuse(matrix, Factored((4, 6)), GROUP, None)
    assert not can_fuse(matrix.double(), rows, GROUP, None)
    assert not can_fuse(matrix.t(), Blocks((6, 4)), GROUP, None)
    assert not can_fuse(matrix, rows, GROUP, state | {"exp_avg": torch.zeros(6, 4, device=DEVICE).t()})
    assert not can_fuse(matrix, rows, GROUP, state | {"hessian_rms": torch.zeros(3, 4, device=DEVICE).t()})
    images = as_channels_last(torch.zeros(4, 3, 2, 2, device=DEVICE))
    assert can_fuse(images, Blocks((4, 3, 2, 2), kernel_dims=2), GROUP, None)
    assert not can_fuse(images, Blocks((4, 3, 2, 2), row_length=2), GROUP, None)


def test_the_default_leaves_what_is_on_a_cpu_or_must_be_captured_to_lists(monkeypatch):
    param, blocks = torch.zeros(3, device=DEVICE), Blocks((3,))
    group = GROUP | {"fused": None}
    assert can_fuse(param, blocks, group, None) == param.is_cuda
    assert not can_fuse(param, blocks, group | {"capturable": True}, None)
    assert not can_fuse(param, blocks, group | {"lr": torch.tensor(0.1)}, None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="fused"):
        can_fuse(torch.zeros(3), blocks, GROUP, None)


def test_the_kernels_need_a_gpu_that_triton_supports_and_a_c_compiler(monkeypatch):
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


# Through the optimizer ------------------------------------------------------------------------------------------------

SHAPES = [(), (1,), (2500,), (3, 70), (8, 64), (2, 2080), (4, 3, 3, 3), (6, 5, 7), (0, 4)]


def pair(options, dtype=torch.float32) -> list[AdaHessian]:
    """Optimizers of the same parameters, with kernels and with lists."""
    optimizers = []
    for is_fused in (True, False):
        params = [param.requires_grad_() for param in randn(SHAPES, 0, dtype)]
        params.append(torch.zeros(4, 4, dtype=torch.float64, device=DEVICE, requires_grad=True))  # never fused
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.02}]
        options = {"lr": 0.1, "weight_decay": 0.1, "eps": 0.1} | options
        optimizers.append(AdaHessian(groups, fused=is_fused, **options))
    return optimizers


def params_of(optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def random_step(optimizer, seed, *, measure=True, spoil=None, skip=None, still=None):
    """Take a step with random gradients and curvature."""
    params = params_of(optimizer)
    sizes = [param.shape for param in params]
    gradients, diagonal = (dict(zip(params, randn(sizes, 2 * seed + i), strict=True)) for i in (0, 1))
    for i, param in enumerate(params):
        param.grad = None if i == still else gradients[param].to(param.dtype)
        if param.dim() > 1 and param.numel():
            diagonal[param][0] = gradients[param][0] = 0.0
        if i == spoil:
            diagonal[param].view(-1)[-1] = torch.inf
    diagonal.pop(params[skip] if skip is not None else None, None)
    if measure:
        slopes = {param: gradients[param].to(param.dtype) for param in diagonal}
        optimizer.set_curvature(diagonal, slopes if seed % 2 else None)
    optimizer.step()


def assert_alike(kernels, lists, **tolerance):
    for a, b in zip(params_of(kernels), params_of(lists), strict=True):
        torch.testing.assert_close(a, b, **tolerance)
        for key, value in lists.state[b].items():
            torch.testing.assert_close(kernels.state[a][key], value, **tolerance, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 32, "signed": True},
        {"averaging": "row", "block_size": 2, "hessian_power": 0.5, "maximize": True},
        {"averaging": "kernel", "betas": (0.0, 0.0), "weight_decay": 0.0},
        {"block_size": 8, "steady_start": True},
    ],
    ids=str,
)
def test_the_optimizer_gives_the_same_with_kernels_and_with_lists(options):
    optimizers = pair(options)
    for seed, variant in enumerate(
        [{}, {"measure": False}, {"spoil": 4, "still": 2}, {"skip": 5}, {"measure": False}], start=1
    ):
        for optimizer in optimizers:
            random_step(optimizer, seed, **variant)
        assert_alike(*optimizers, rtol=2e-5, atol=1e-6)
    kernels = optimizers[0]
    assert [bucket.kernels is not None for bucket in kernels._plan.buckets] == [True, True, False]
    assert [int(kernels.state[param]["dropped"]) for param in params_of(kernels)] == [int(i == 4) for i in range(10)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_optimizer_gives_about_the_same_for_narrow_parameters(dtype):
    optimizers = pair({"block_size": 8}, dtype)
    for seed in (1, 2, 3):
        for optimizer in optimizers:
            random_step(optimizer, seed)
    # A kernel rounds once per step, lists round after each operation.
    for a, b in zip(*map(params_of, optimizers), strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)
        rms = [optimizer.state[param]["hessian_rms"] for optimizer, param in zip(optimizers, (a, b), strict=True)]
        torch.testing.assert_close(*rms, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"fused": 1}, {"fused": True, "capturable": True}])
def test_options_that_do_not_go_together(options):
    with pytest.raises(ValueError, match="fused"):
        AdaHessian([torch.zeros(1, requires_grad=True)], **options)
