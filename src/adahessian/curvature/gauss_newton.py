"""The curvature of a cross entropy from ordinary gradients, with labels that the model itself draws.

The Gauss-Newton matrix of the mean cross entropy of N rows, J_r being the Jacobian of the logits of row r, is

    B = 1/N sum_r J_r' (diag(p_r) - p_r p_r') J_r,    p_r = softmax(logits_r)

Its middle factor is the covariance of the gradient that a label drawn from p_r sends into the logits; its mean is zero.
So where rows draw independently, the mixed products of rows vanish from the square of their summed gradient:

    diag(B) = E[G * G] / N,    G = sum_r d(-log p_r[y_r]) / d theta,    y_r ~ p_r

This is the Gauss-Newton-Bartlett estimator of Sophia (Liu et al., 2023), N g * g for the mean's gradient g = G / N.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from adahessian.curvature.errors import CurvatureError
from adahessian.curvature.graph import nodes
from adahessian.curvature.hutchinson import accumulation_dtype, as_reals, refuse_sparse
from adahessian.curvature.isolation import untouched
from adahessian.curvature.labels import draw_labels
from adahessian.curvature.passes import CurvaturePass, Model

if TYPE_CHECKING:
    from adahessian.optimizer import AdaHessian


class GaussNewton(CurvaturePass[Model]):
    """Measures the Gauss-Newton diagonal of a cross entropy, in a pass of its own, by ordinary gradients.

    For classifiers and language models whose loss is the mean cross entropy of their logits. Nothing is differentiated
    twice: fused attention, cuDNN's recurrent layers, compiled models and autocast run as they are, and a measurement
    costs one forward and one backward pass. The diagonal is never negative. It lacks the part of the Hessian that comes
    from the curvature of the logits in the parameters.

    The pass leaves gradients, buffers, train and eval modes and random streams as it finds them, as
    :class:`adahessian.Curvature` does, and takes its place in the loop.

    Args:
        model: The model.
        logits_fn: ``logits_fn(model, batch)`` returns the logits, of shape (..., classes). Every row counts as one
            example of the mean. Where padding does not, select what does: ``model(tokens)[tokens != padding]``. Labels
            are not needed: the matrix is the same for all of them, smoothed ones too.
        optimizer: The optimizer that uses the curvature and says when it is due. ``num_probes`` counts draws of labels,
            each a backward pass more. Of a compiled model torch allows only one, unless it was compiled with
            ``torch._functorch.config.donated_buffer = False``.
        batch_fraction: Share of each batch to measure on, above 0 and up to 1: its first examples.
        batch_dim: The dimension of the batch's tensors that counts examples.

    Raises:
        TypeError: If the model, the function or the optimizer is none.
        ValueError: If ``batch_fraction`` or ``batch_dim`` is out of its range.

    Example:
        >>> import adahessian
        >>> model = nn.Linear(3, 10)
        >>> optimizer = adahessian.AdaHessian(model.parameters(), update_every=10)
        >>> curvature = GaussNewton(model, lambda m, batch: m(batch), optimizer)
        >>> curvature.measure(torch.ones(8, 3))
        True
    """

    function_name = "logits_fn"

    def __init__(
        self,
        model: Model,
        logits_fn: Callable[[Model, Any], Tensor],
        optimizer: AdaHessian,
        *,
        batch_fraction: float = 1.0,
        batch_dim: int = 0,
    ) -> None:
        super().__init__(model, logits_fn, optimizer, batch_fraction=batch_fraction, batch_dim=batch_dim)
        self.logits_fn = logits_fn

    def _measure(self, part: Any) -> None:
        with torch.enable_grad(), untouched(self.model):
            logits = self.logits_fn(self.model, part)
            _check(logits)
            self._measure_logits(logits.flatten(0, -2).to(accumulation_dtype(logits.dtype)))

    def _measure_logits(self, logits: Tensor) -> None:
        """Measure from logits of shape (rows, classes); their graph is freed."""
        params = self.optimizer.measured_parameters()
        group, draws = self.optimizer.param_groups[0], self.optimizer.num_probes
        diagonal: dict[Tensor, Tensor] = {}
        gradients: dict[Tensor, Tensor] = {}
        for draw in range(draws):
            labels = draw_labels(logits, group["seed"], group["measurements"], draw)
            # The sum rather than the mean: in low precision small gradients would vanish.
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
            found = torch.autograd.grad(loss, params, retain_graph=draw + 1 < draws, allow_unused=True)
            gradients = {param: g for param, g in zip(params, found, strict=True) if g is not None}
            for param, gradient in gradients.items():
                refuse_sparse(gradient)
                if param not in diagonal:
                    diagonal[param] = torch.zeros_like(gradient, dtype=accumulation_dtype(gradient.dtype))
                real = as_reals(gradient)
                as_reals(diagonal[param]).addcmul_(real, real, value=1 / (len(logits) * draws))
        if not diagonal:
            raise CurvatureError("the logits depend on none of the optimizer's parameters: is this its model?")
        self.optimizer.feed_curvature(diagonal, gradients)


def _check(logits: object) -> None:
    if not isinstance(logits, Tensor):
        raise CurvatureError(
            f"logits_fn must return the logits alone, as a tensor, but returned a {type(logits).__name__}"
        )
    if not logits.is_floating_point() or logits.dim() < 2 or logits.shape[-1] < 2 or not logits.numel():
        raise CurvatureError(
            "logits_fn must return real logits of shape (..., classes), of at least one row and two classes, but "
            f"returned a {logits.dtype} tensor of shape {tuple(logits.shape)}: a single logit x of two classes is "
            "torch.stack([torch.zeros_like(x), x], -1)"
        )
    if not logits.requires_grad:
        raise CurvatureError(
            "the logits have no graph: logits_fn must compute them from the model's parameters, without "
            "torch.no_grad() or .detach(), and at least one parameter must require a gradient"
        )
    if any(getattr(node, "_forward_cls", None) is CheckpointFunction for node in nodes([logits])):
        raise CurvatureError(
            "reentrant activation checkpointing hides its parameters from the pass. Remedy: call "
            "torch.utils.checkpoint with use_reentrant=False"
        )
