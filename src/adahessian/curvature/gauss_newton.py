"""The curvature of a cross entropy from ordinary gradients, with labels that the model itself draws.

The Gauss-Newton matrix of the mean cross entropy of N rows, J_r being the Jacobian of the logits of row r, is

    B = 1/N sum_r J_r' (diag(p_r) - p_r p_r') J_r,    p_r = softmax(logits_r)

Its middle factor is the covariance of the gradient that a label drawn from p_r sends into the logits; its mean is zero.
So where rows draw independently, the mixed products of rows vanish from the square of their summed gradient:

    diag(B) = E[G * G] / N,    G = sum_r d(-log p_r[y_r]) / d theta,    y_r ~ p_r

This is the Gauss-Newton-Bartlett estimator of Sophia (Liu et al., 2023), N g * g for the mean's gradient g = G / N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from adahessian.curvature.errors import CurvatureError
from adahessian.curvature.graph import nodes
from adahessian.curvature.hutchinson import accumulation_dtype, refuse_sparse
from adahessian.curvature.isolation import untouched
from adahessian.curvature.labels import draw_labels
from adahessian.curvature.passes import CurvaturePass, Model
from adahessian.distributed import Ranks, past_wrappers
from adahessian.sharding import is_sharded, refuse_waiting_gradients, reshard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from adahessian.optimizer import AdaHessian
    from adahessian.sparse import DenseAndSparse


class GaussNewton(CurvaturePass[Model]):
    """Measures the Gauss-Newton diagonal of a cross entropy, in a pass of its own, by ordinary gradients.

    For classifiers and language models whose loss is the mean cross entropy of their logits. Nothing is differentiated
    twice: fused attention, cuDNN's recurrent layers, compiled models and autocast run as they are, and a measurement
    costs one forward and one backward pass. The diagonal is never negative. It lacks the part of the Hessian that comes
    from the curvature of the logits in the parameters. A draw of labels leaves it close to zero in many blocks, which a
    step would divide by: give the optimizer a larger ``eps``, such as 1e-2, or ``hessian_power=0.5``. Else training
    soon diverges.

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
        accumulate: Whether every call of :meth:`measure` until the next step is measured, with other labels, and their
            mean counts; otherwise the first alone counts.
        process_group: The processes whose gradients are averaged, and with them the curvature. ``"auto"`` takes those
            of ``DistributedDataParallel`` or of FSDP2's ``fully_shard``; None is for a model of this process alone.

    Raises:
        TypeError: If the model, the function or the optimizer is none.
        ValueError: If an argument is out of its range.

    Example:
        >>> import adahessian
        >>> model = nn.Linear(3, 10)
        >>> optimizer = adahessian.AdaHessian(model.parameters(), eps=1e-2, update_every=10)
        >>> curvature = GaussNewton(model, lambda m, batch: m(batch), optimizer)
        >>> curvature.measure(torch.ones(8, 3))
        True
    """

    function_name = "logits_fn"

    def __init__(
        self,
        model: Model,
        logits_fn: Callable[[Model, Any], Tensor],
        optimizer: AdaHessian | DenseAndSparse,
        *,
        batch_fraction: float = 1.0,
        batch_dim: int = 0,
        accumulate: bool = False,
        process_group: ProcessGroup | Literal["auto"] | None = "auto",
    ) -> None:
        super().__init__(
            model,
            logits_fn,
            optimizer,
            batch_fraction=batch_fraction,
            batch_dim=batch_dim,
            accumulate=accumulate,
            process_group=process_group,
        )
        self.logits_fn = logits_fn
        self._micro_batch = 0

    @property
    def _ranks_to_ask(self) -> Ranks | None:
        return None  # the gradients of all ranks are added up before they are squared

    def _measure(self, part: Any, weight: float) -> None:
        params, draws = self.optimizer.measured_parameters(), self.optimizer.num_probes
        sharded = any(map(is_sharded, params))
        self._micro_batch = self._micro_batch + 1 if self._goes_on else 0
        diagonal: list[Tensor | None] = [None] * len(params)
        gradients: Sequence[Tensor | None] = diagonal
        if sharded:
            reshard(self.model)
            refuse_waiting_gradients(self.model)
        with torch.enable_grad(), untouched(self.model), past_wrappers(self.model):
            logits = self._logits(part)
            weight = weight if len(logits) else 0.0
            first_row, total_weight = 0, weight
            if self.ranks is not None:
                first_row, total_weight = self.ranks.place_among(len(logits), weight, logits.device)
            # The square of the sum over ranks is then the diagonal of the weighted mean. This is the root of what makes
            # a sum a mean: in low precision the gradients of a mean would vanish.
            scale = math.sqrt(weight / (total_weight * max(len(logits), 1))) if total_weight else math.nan
            for draw in range(draws):
                if draw and sharded:  # a backward pass through FSDP2 cannot be repeated
                    logits = self._logits(part)
                loss = scale * self._drawn_loss(logits, self._micro_batch * draws + draw, first_row)
                if sharded:
                    gradients = self._through_fsdp(loss, params)
                else:
                    gradients = self._alone(loss, params, retain_graph=draw + 1 < draws)
                for i, gradient in enumerate(gradients):
                    if gradient is not None:
                        diagonal[i] = _plus_squares(diagonal[i], gradient, 1 / draws)
        if not any(gradient is not None for gradient in gradients):
            raise CurvatureError("the logits depend on none of the optimizer's parameters: is this its model?")
        self.feed(diagonal, gradients, weight=total_weight)

    def _logits(self, part: Any) -> Tensor:
        """Logits of shape (rows, classes), with their graph."""
        logits = self.logits_fn(self.model, part)
        # Other ranks would wait for one that has no rows and raises.
        _check(logits, least_rows=1 if self.ranks is None else 0)
        return logits.flatten(0, -2).to(accumulation_dtype(logits.dtype))

    def _drawn_loss(self, logits: Tensor, draw: int, first_row: int) -> Tensor:
        group = self.optimizer.param_groups[0]
        labels = draw_labels(logits, group["seed"], group["measurements"], draw, first_row)
        return nn.functional.cross_entropy(logits, labels, reduction="sum")

    def _alone(self, loss: Tensor, params: Sequence[Tensor], *, retain_graph: bool) -> Sequence[Tensor | None]:
        """Gradients past all wrappers, then their sums over ranks."""
        gradients = torch.autograd.grad(loss, params, retain_graph=retain_graph, allow_unused=True)
        for gradient in gradients:
            refuse_sparse(gradient)
        if self.ranks is None:
            return gradients
        wide = [g if g is None else g.to(accumulation_dtype(g.dtype)) for g in gradients]
        return self.ranks.sum_each(wide, params)

    def _through_fsdp(self, loss: Tensor, params: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Gradients by the ordinary backward pass of FSDP2, which spreads their mean over ranks."""
        size = 1 if self.ranks is None else self.ranks.size
        (loss * size).backward()
        gradients = [param.grad for param in params]
        for param in params:
            param.grad = None
        # What FSDP2 does not spread it does not sum either.
        own = [i for i, param in enumerate(params) if not is_sharded(param)]
        if self.ranks is not None and own:
            parts = [None if (g := gradients[i]) is None else g.to(accumulation_dtype(g.dtype)) / size for i in own]
            for i, total in zip(own, self.ranks.sum_each(parts, [params[i] for i in own]), strict=True):
                gradients[i] = total
        return gradients


def _plus_squares(squares: Tensor | None, gradient: Tensor, share: float) -> Tensor:
    """Squares of a gradient, of the real and of the imaginary part if it has two, on top of what there is."""
    wide = gradient.detach().to(accumulation_dtype(gradient.dtype))
    new = torch.complex(wide.real.square(), wide.imag.square()) if wide.is_complex() else wide.square()
    return new * share if squares is None else squares + new * share


def _check(logits: object, *, least_rows: int = 1) -> None:
    if not isinstance(logits, Tensor):
        raise CurvatureError(
            f"logits_fn must return the logits alone, as a tensor, but returned a {type(logits).__name__}"
        )
    has_classes = logits.is_floating_point() and logits.dim() > 1 and logits.shape[-1] > 1
    if not has_classes or logits[..., 0].numel() < least_rows:
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
