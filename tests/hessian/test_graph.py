"""Operations whose second derivative is silently wrong are found in graphs."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adahessian import AdaHessian, Curvature
from adahessian.base.errors import CurvatureError
from adahessian.hessian.graph import check_twice_differentiable


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return 2 * g


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def of_once():
    return Once.apply(nn.Linear(4, 4)(X)).square().mean()


def of_reentrant_checkpointing():
    return checkpoint(nn.Linear(4, 4), X.clone().requires_grad_(), use_reentrant=True).mean()


def of_weight_norm():
    weight, norm = torch.randn(3, 4, requires_grad=True), torch.ones(3, 1, requires_grad=True)
    return torch._weight_norm(weight, norm).square().mean()


def of_penalty(layer):
    model, x = nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh()), X.clone().requires_grad_()
    return torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0].square().mean()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (of_once, "Once cannot"),
        (of_reentrant_checkpointing, "use_reentrant=False"),
        (of_weight_norm, "weight_norm"),
        (lambda: of_penalty(nn.LayerNorm(4)), "layer_norm"),
        (lambda: of_penalty(nn.BatchNorm1d(4)), "batch_norm"),
        (lambda: of_penalty(nn.Sequential(nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4))), "batch_norm"),
        (lambda: of_penalty(nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval())), "batch_norm"),
    ],
)
def test_what_is_wrong_is_found(make, named):
    with pytest.raises(CurvatureError, match=named):
        check_twice_differentiable([make()], of_loss=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: checkpoint(nn.Linear(4, 4), X.clone().requires_grad_(), use_reentrant=False).mean(),
        lambda: nn.LayerNorm(4)(X).square().mean(),
        lambda: of_penalty(nn.BatchNorm1d(4).eval()),
        lambda: of_penalty(nn.GroupNorm(2, 4)),
        lambda: of_penalty(nn.RMSNorm(4)),
    ],
)
def test_what_is_right_is_not(make):
    check_twice_differentiable([make()], of_loss=True)


def test_gradients_of_norms_are_normal_in_gradients():
    layer = nn.LayerNorm(4)
    gradients = torch.autograd.grad(layer(X).square().mean(), list(layer.parameters()), create_graph=True)
    check_twice_differentiable(gradients)
    (gradient,) = torch.autograd.grad(of_once_kept(layer), layer.weight, create_graph=True)
    with pytest.raises(CurvatureError, match="once_differentiable"):
        check_twice_differentiable([gradient])


class Fused(torch.autograd.Function):
    """A square whose backward computes what autograd does not see, as a kernel of Triton."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.detach() ** 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (2 * g * x).detach()


class Straight(torch.autograd.Function):
    """Rounding whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


@pytest.mark.parametrize(("function", "is_hidden"), [(Fused, True), (Straight, False)])
def test_a_gradient_without_a_graph_is_an_error_that_names_its_function(function, is_hidden):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    curvature = Curvature(
        model, lambda m, x: m[1](function.apply(m[0](x))).square().mean(), AdaHessian(model.parameters())
    )
    with pytest.raises(CurvatureError, match=r"Fused .* a graph") if is_hidden else nullcontext():
        assert curvature.measure(X)


class FusedLoss(torch.autograd.Function):
    """A mean of fourth powers whose gradient is computed in the forward pass, as fused cross-entropies do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(4 * x**3 / x.numel())
        return (x**4).mean()

    @staticmethod
    def backward(ctx, g):
        (gradient,) = ctx.saved_tensors
        return g * gradient


@pytest.mark.parametrize(
    ("loss_of", "is_hidden"),
    [
        (FusedLoss.apply, True),
        (lambda output: 0.5 * FusedLoss.apply(output), True),
        (lambda output: Straight.apply(output.square().mean()), False),
    ],
)
def test_a_loss_whose_gradient_is_computed_in_its_forward_is_an_error(loss_of, is_hidden):
    model = nn.Linear(4, 2)
    curvature = Curvature(model, lambda m, x: loss_of(m(x)), AdaHessian(model.parameters()))
    with pytest.raises(CurvatureError, match=r"FusedLoss .* a graph") if is_hidden else nullcontext():
        assert curvature.measure(X)


def of_once_kept(layer):
    return Once.apply(layer(X)).square().mean()
