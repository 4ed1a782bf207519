"""H z by double backward, d(g . z) / d theta, which works for every model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adahessian.base.errors import CurvatureError, explain
from adahessian.hessian.graph import check_twice_differentiable, watch_functions
from adahessian.hessian.isolation import Forward, isolated

# draw(probe, out=None, only=None) returns Rademacher signs with the shapes and dtypes of the parameters, or of the
# parameters in ``only``. If ``out`` is given, it receives the signs.
Draw = Callable[..., list[Tensor]]


class Request(NamedTuple):
    """The parts of an optimizer that a Hessian-vector product needs."""

    params: list[Tensor]  # to differentiate with respect to
    num_probes: int
    draw: Draw


class Derivatives(NamedTuple):
    """First and second derivatives of a loss, in the order of the request's parameters."""

    loss: Tensor  # detached
    gradients: list[Tensor | None]  # None: the parameter took no part in the loss
    probes: list[list[Tensor]]  # z, one list per probe
    # H z, one list per probe, at least in float32. None where the gradient is None, zeros where the loss is linear.
    products: list[list[Tensor | None]]


def double_backward(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Any,
    request: Request,
    *,
    keep_buffers: bool = False,
    substitutes: Mapping[Forward, Forward] | None = None,
    check_graph: bool = True,
) -> Derivatives:
    """Differentiate ``loss_fn(model, batch)`` twice, in an isolated pass on the model itself.

    Raise a CurvatureError if that is impossible. ``check_graph`` also searches the graph for operations whose second
    derivative PyTorch silently gets wrong.
    """
    with isolated(model, substitutes or {}, request.params, keep_buffers=keep_buffers), torch.enable_grad():
        loss = loss_fn(model, batch)
        _check_loss(loss)
        if check_graph:
            check_twice_differentiable([loss], of_loss=True)
            watch_functions(loss)
        gradients = _differentiate([loss], request.params, [torch.ones_like(loss)], create_graph=True)
        if all(gradient is None for gradient in gradients):
            raise CurvatureError(
                "loss_fn returned a loss that depends on none of the optimizer's parameters. Pass the model that the "
                "optimizer trains."
            )
        probes, products = products_of(gradients, request)
        return Derivatives(loss.detach(), [g if g is None else g.detach() for g in gradients], probes, products)


def products_of(
    gradients: Sequence[Tensor | None], request: Request
) -> tuple[list[list[Tensor]], list[list[Tensor | None]]]:
    """Draw the probes, compute H z for each probe, as in :class:`Derivatives`, and free the graph after the last one.

    The gradients carry their graph. A gradient without a graph is constant, so its products are zero.
    """
    for gradient in gradients:
        reject_sparse(gradient)
    probes: list[list[Tensor]] = []
    products: list[list[Tensor | None]] = []
    for probe in range(request.num_probes):
        probes.append(request.draw(probe))
        is_kept = probe + 1 < request.num_probes
        hz = _differentiate(gradients, request.params, probes[-1], retain_graph=is_kept, materialize_grads=True)
        known = [None if gradient is None else product for gradient, product in zip(gradients, hz, strict=True)]
        products.append([p if p is None else p.to(torch.promote_types(p.dtype, torch.float32)) for p in known])
    return probes, products


def _differentiate(
    outputs: Sequence[Tensor | None], inputs: Sequence[Tensor], along: Sequence[Tensor | None], **options: bool
) -> Sequence[Tensor | None]:
    """Call ``torch.autograd.grad``, where None stands for zeros, and raise its errors with a remedy."""
    pairs = [(y, v) for y, v in zip(outputs, along, strict=True) if y is not None and y.requires_grad and v is not None]
    try:
        return torch.autograd.grad([y for y, _ in pairs], inputs, [v for _, v in pairs], allow_unused=True, **options)
    except RuntimeError as error:
        raise explain(error) from error


def reject_sparse(gradient: Tensor | None) -> None:
    """Raise a RuntimeError if a gradient is sparse."""
    if gradient is not None and gradient.is_sparse:
        raise RuntimeError(
            "AdaHessian does not support sparse gradients. Create the embedding with sparse=False, or train it with "
            "Adagrad by passing adahessian.param_groups(model, sparse_lr=0.01) to AdaHessian."
        )


def _check_loss(loss: object) -> None:
    """Raise a CurvatureError unless a loss is a real scalar with a graph."""
    if not isinstance(loss, Tensor):
        raise CurvatureError(f"loss_fn returned a {type(loss).__name__}. Return only the loss, as a tensor.")
    if loss.numel() != 1 or loss.is_complex():
        raise CurvatureError(
            f"loss_fn returned a {loss.dtype} tensor of shape {tuple(loss.shape)}. Return a real scalar, for example "
            "by reducing the loss with .mean()."
        )
    if not loss.requires_grad:
        raise CurvatureError(
            "loss_fn returned a loss without a graph. Compute it from the model's parameters, without torch.no_grad(), "
            "torch.inference_mode(), .detach() or .item(), and let at least one parameter require a gradient."
        )
