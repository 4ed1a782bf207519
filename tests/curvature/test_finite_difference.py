"""Differences of gradients: the curvature of smooth networks, and a refusal of all others."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from test_measurement import Compilable, Once
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from adahessian import CurvatureError
from adahessian.curvature.finite_difference import (
    _problem,
    _scale,
    check_smooth,
    finite_difference_product,
    relative_step,
)
from adahessian.curvature.hutchinson import hessian_vector_product
from adahessian.lab.models.resnet import ResNet
from cases import ATTENTION, BATCH_NORM, CONVOLUTION, MLP, REGRESSION, Case, flat_parameters

GELU = Case("gelu", lambda: nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 3)), (16, 5))
SECOND_DERIVATIVE_JUMPS = Case(
    "elu", lambda: nn.Sequential(nn.Linear(5, 60), nn.ELU(), nn.Linear(60, 60), nn.CELU(2.0), nn.Linear(60, 3)), (64, 5)
)
INFINITY = float("inf")


def gradient_at(case, model, batch):
    """From values of the parameters to gradients, with the model's buffers in copies."""
    names = [name for name, _ in model.named_parameters()]

    def gradient(values):
        leaves = [value.clone().requires_grad_() for value in values]
        tensors = {
            **dict(zip(names, leaves, strict=True)),
            **{name: buffer.clone() for name, buffer in model.named_buffers()},
        }
        loss = case.loss(lambda x: functional_call(model, tensors, (x,)), batch)
        return torch.autograd.grad(loss, leaves)

    return gradient


def relative_error(case, model, batch, step=None):
    """Of a difference of gradients, against double backward, over all parameters."""
    params = list(model.parameters())
    generator = torch.Generator().manual_seed(0)
    z = [(torch.randint(2, param.shape, generator=generator) * 2 - 1).to(param) for param in params]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = case.loss(model, batch)
        gradients = torch.autograd.grad(loss, params, create_graph=True)
        exact = torch.cat([part.flatten() for part in hessian_vector_product(gradients, params, z, retain_graph=True)])
    step = relative_step(loss) if step is None else step
    found = finite_difference_product(gradient_at(case, model, batch), params, z, step)
    return float((torch.cat([part.flatten() for part in found]) - exact).norm() / exact.norm())


# The product ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [MLP, REGRESSION, GELU, CONVOLUTION, BATCH_NORM, ATTENTION], ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-7), (torch.float32, 5e-3)], ids=str)
def test_smooth_networks(case, dtype, bound):
    model, batch = case.model(dtype), case.batch(dtype)
    check_smooth(case.loss(model, batch))
    before = flat_parameters(model)
    assert relative_error(case, model, batch) < bound
    assert torch.equal(flat_parameters(model), before)


def test_a_second_derivative_that_jumps_does_no_harm():
    model, batch = SECOND_DERIVATIVE_JUMPS.model(torch.float32), SECOND_DERIVATIVE_JUMPS.batch(torch.float32)
    check_smooth(SECOND_DERIVATIVE_JUMPS.loss(model, batch))
    assert relative_error(SECOND_DERIVATIVE_JUMPS, model, batch) < 0.02


def test_with_kinks_the_error_grows_as_the_step_shrinks_and_without_it_falls(monkeypatch):
    """The numbers for which networks with kinks are refused: like the inverse square root of the step."""
    case = Case("resnet8", lambda: ResNet(8), (16, 3, 16, 16), 10)
    batch = case.batch(torch.float32)
    model = case.model(torch.float32)
    scale = _scale(list(model.parameters()))
    steps = [1e-4, 1e-3, 1e-2]

    with_kinks = [relative_error(case, model, batch, step / scale) for step in steps]
    assert min(with_kinks) > 0.8
    for error, next_error in itertools.pairwise(with_kinks):
        assert error / next_error == pytest.approx(math.sqrt(10), rel=0.4)

    monkeypatch.setattr(F, "relu", F.gelu)
    smooth = [relative_error(case, model, batch, step / scale) for step in steps]
    assert smooth == sorted(smooth)
    assert smooth[0] < 1e-2
    assert relative_error(case, model, batch) < 1e-2


def test_the_step_is_relative_to_the_scale_of_matrices():
    """A large embedding, norms of one and biases of zero do not move it."""
    matrices = [0.1 * torch.ones(4, 3), 0.2 * torch.ones(3, 2, 2), -0.4 * torch.ones(5, 2)]
    others = [100 * torch.ones(50, 4), torch.zeros(4, 4), torch.ones(3), torch.zeros(7), torch.zeros(0, 2)]
    assert _scale([*others, *matrices]) == pytest.approx(0.2)
    assert _scale([torch.tensor([3.0, -4.0]), torch.zeros(2)]) == pytest.approx(math.sqrt(12.5))
    assert _scale([torch.full((2, 2), 3 + 4j)]) == pytest.approx(math.sqrt(12.5))
    assert _scale([torch.zeros(3, 3)]) == 1
    assert _scale([torch.full((300, 300), 300, dtype=torch.float16)]) == pytest.approx(300, rel=1e-3), "no overflow"

    visited = []

    def gradient(values):
        visited.append(values)
        return [value**3 for value in values]

    (product,) = finite_difference_product(gradient, matrices[1:2], [torch.ones(3, 2, 2)], 0.01)
    assert [float(values[0].mean()) for values in visited] == pytest.approx([0.202, 0.198])
    torch.testing.assert_close(product, torch.full((3, 2, 2), 3 * 0.2**2), rtol=1e-3, atol=0)


def test_a_parameter_without_a_gradient_has_no_product():
    params = [torch.ones(2), torch.ones(3)]
    found = finite_difference_product(lambda values: [values[0] * 2, None], params, params, 0.1)
    torch.testing.assert_close(found[0], 2 * torch.ones(2))
    assert found[1] is None


def test_the_relative_step_goes_by_the_coarsest_precision_of_the_graph():
    x, y = MLP.batch(torch.float32)
    steps = {dtype: relative_step(MLP.loss(MLP.model(dtype), (x.to(dtype), y))) for dtype in (torch.float64, x.dtype)}
    assert steps[torch.float64] == pytest.approx(3.0e-6, rel=0.02)
    assert steps[torch.float32] == pytest.approx(2.5e-3, rel=0.02)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = MLP.loss(MLP.model(torch.float32), (x, y))
    assert loss.dtype == torch.float32
    assert relative_step(loss) == pytest.approx(0.1, rel=0.02)


def test_autocast_is_rough_but_no_nonsense():
    class Autocast(Case):
        def loss(self, model, batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().loss(model, batch)

    case = Autocast("autocast", lambda: nn.Sequential(nn.Linear(50, 99), nn.Tanh(), nn.Linear(99, 10)), (256, 50), 10)
    assert relative_error(case, case.model(torch.float32), case.batch(torch.float32)) < 0.2


# What is refused -----------------------------------------------------------------------------------------------------

X = torch.linspace(-2, 2, 32).view(4, 8).requires_grad_()
Y = torch.linspace(3, -1, 32).view(4, 8)
IMAGES = torch.linspace(-1, 1, 128).view(1, 2, 8, 8).requires_grad_()
ZEROS = torch.zeros(4, 8, dtype=torch.long)
ROW = ZEROS[:, 0]


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda: F.relu(X), "Relu"),
        (lambda: torch.relu_(X * 1), "Relu"),
        (lambda: F.leaky_relu(X), "LeakyRelu"),
        (lambda: F.prelu(X, torch.tensor([0.2])), "PreluKernel"),
        (lambda: F.rrelu(X, training=True), "RreluWithNoise"),
        (lambda: F.relu6(X), "Hardtanh"),
        (lambda: F.hardtanh(X), "Hardtanh"),
        (lambda: F.hardswish(X), "Hardswish"),
        (lambda: F.hardsigmoid(X), "Hardsigmoid"),
        (lambda: F.hardshrink(X), "Hardshrink"),
        (lambda: F.softshrink(X), "Softshrink"),
        (lambda: F.threshold(X, 0.1, 0), "Threshold"),
        (lambda: F.elu(X, 2.0), "Elu"),
        (lambda: F.selu(X), "Elu"),
        (lambda: F.max_pool1d(X, 2), "MaxPool2DWithIndices"),
        (lambda: F.max_pool2d(IMAGES, 2), "MaxPool2DWithIndices"),
        (lambda: F.max_pool3d(IMAGES.unsqueeze(0), 2), "MaxPool3DWithIndices"),
        (lambda: F.adaptive_max_pool2d(IMAGES, 2), "AdaptiveMaxPool2D"),
        (lambda: F.fractional_max_pool2d(IMAGES, 2, output_size=3), "FractionalMaxPool2D"),
        (lambda: F.grid_sample(IMAGES, torch.zeros(1, 3, 3, 2), align_corners=False), "GridSampler2D"),
        (lambda: X.abs(), "Abs"),
        (lambda: torch._foreach_abs([X])[0], "Abs"),
        (lambda: F.l1_loss(X, Y), "Abs"),
        (lambda: F.smooth_l1_loss(X, Y, beta=0.0), "Abs"),
        (lambda: X.clamp(0, 1), "Clamp"),
        (lambda: torch.clamp_min(X, 0), "ClampMin"),
        (lambda: torch.clamp_max(X, 0), "ClampMax"),
        (lambda: F.triplet_margin_loss(X, Y, Y + 1), "ClampMin"),
        (lambda: F.multi_margin_loss(X, ROW), "MultiMarginLoss"),
        (lambda: F.multilabel_margin_loss(X, ZEROS), "MultilabelMarginLoss"),
        (lambda: torch.maximum(X, Y), "Maximum"),
        (lambda: torch.minimum(X, Y), "Minimum"),
        (lambda: torch.fmax(X, Y), "Fmax"),
        (lambda: X.max(), "Max"),
        (lambda: X.min(1).values, "Min"),
        (lambda: X.amax(1), "Amax"),
        (lambda: torch.aminmax(X).max, "Aminmax"),
        (lambda: X.cummax(1).values, "Cummax"),
        (lambda: X.median(), "Median"),
        (lambda: X.nanmedian(), "Nanmedian"),
        (lambda: X.sort().values, "Sort"),
        (lambda: X.topk(2).values, "Topk"),
        (lambda: X.kthvalue(2).values, "Kthvalue"),
        (lambda: X.round(), "Round"),
        (lambda: X.sign(), "Sign"),
        (lambda: X % 1, "Remainder"),
        (lambda: torch.div(X, Y, rounding_mode="floor"), "Div"),
        (lambda: torch.copysign(X, Y), "Copysign"),
        (lambda: X.renorm(2, 0, 0.5), "Renorm"),
        (lambda: X.norm(1), "LinalgVectorNorm"),
        (lambda: torch.linalg.vector_norm(X, INFINITY), "LinalgVectorNorm"),
        (lambda: F.pairwise_distance(X, Y, p=1), "Norm"),
        (lambda: torch.cdist(X, Y, p=1), "Cdist"),
        (lambda: torch.dist(X, Y, 1), "Dist"),
        (lambda: X.scatter_reduce(1, ZEROS, X, "amax"), "ScatterReduce"),
        (lambda: X.index_reduce(0, ROW, X, "amin"), "IndexReduce"),
        (lambda: torch.segment_reduce(X, "max", lengths=torch.tensor([2, 2])), "SegmentReduce"),
        (lambda: F.embedding_bag(ZEROS[:, :3], X, mode="max"), "EmbeddingBag"),
        (lambda: torch.fake_quantize_per_tensor_affine(X, 0.1, 0, 0, 255), "FakeQuantizePerTensorAffineCachemask"),
        (lambda: nn.RNN(8, 3, nonlinearity="relu")(X)[0], "Relu"),
        (lambda: nn.TransformerEncoderLayer(8, 2, 4)(X), "Relu"),
    ],
)
@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
def test_kinks_are_refused_by_name_and_with_their_remedy(function, operation):
    with pytest.raises(CurvatureError, match=rf'\b{operation} has a kink.*Remedy: take product="double_backward"'):
        check_smooth(function().sum())


@pytest.mark.parametrize(
    "function",
    [
        lambda: F.gelu(X) + F.silu(X) + F.mish(X) + X.tanh() + F.softplus(X) + X.sigmoid() + F.logsigmoid(X),
        lambda: F.elu(X) + F.celu(X, 2.0),
        lambda: F.huber_loss(X, Y) + F.smooth_l1_loss(X, Y),
        lambda: F.softmax(X, -1) + F.log_softmax(X, -1) + X.logsumexp(-1, keepdim=True),
        lambda: X.norm() + torch.linalg.vector_norm(X, 3) + F.cosine_similarity(X, Y) + F.pairwise_distance(X, Y),
        lambda: torch.cdist(X, Y) + torch.dist(X, Y) + (X / Y.exp()).std(),
        lambda: F.cross_entropy(X, ROW) + F.binary_cross_entropy_with_logits(X, Y.sigmoid()) + F.mse_loss(X, Y),
        lambda: X.scatter_reduce(1, ZEROS, X, "mean") + F.embedding_bag(ZEROS[:, :3], X, mode="mean"),
        lambda: F.dropout(X, 0.5).masked_fill(Y > 0, 0),
        lambda: F.avg_pool2d(IMAGES, 2) + F.adaptive_avg_pool2d(IMAGES, 4),
        lambda: F.max_unpool2d(IMAGES, F.max_pool2d(torch.ones(1, 2, 16, 16), 2, return_indices=True)[1], 2),
        lambda: nn.LSTM(8, 3)(X)[0],
        lambda: nn.TransformerEncoderLayer(8, 2, 4, activation="gelu")(X),
        lambda: torch.utils.checkpoint.checkpoint(torch.tanh, X, use_reentrant=False),
    ],
)
def test_smooth_operations_are_not_refused(function):
    check_smooth(function().sum())


def test_every_kink_is_named_wherever_it_is():
    """A ReLU inside a model, called as a function, and a pooling before it."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3)

        def forward(self, x):
            return F.relu(F.max_pool2d(self.conv(x), 2)).tanh().sum()

    with pytest.raises(CurvatureError, match="MaxPool2DWithIndices has a kink, Relu has a kink"):
        check_smooth(Hidden()(IMAGES.detach()))
    model = ResNet(8)
    with pytest.raises(CurvatureError, match=r"differences: Relu has a kink\."):
        check_smooth(model(torch.zeros(2, 3, 8, 8)).sum())


def test_what_cannot_be_looked_into_is_refused():
    with pytest.raises(CurvatureError, match="Once is a function of its own, which may have a kink"):
        check_smooth(Once.apply(X).sum())
    with pytest.raises(CurvatureError, match="CheckpointFunction is a function of its own"):
        check_smooth(torch.utils.checkpoint.checkpoint(torch.tanh, X, use_reentrant=True).sum())
    assert "CppNode<roi_align> is a function" in _problem(SimpleNamespace(name=lambda: "CppNode<roi_align>"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_cannot_be_looked_into():
    x, y = MLP.batch()
    loss = MLP.loss(torch.compile(Compilable(), backend="aot_eager"), (x, y))
    with pytest.raises(CurvatureError, match="CompiledFunction is a function of its own"):
        check_smooth(loss)
