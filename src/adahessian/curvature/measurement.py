"""The curvature as an object of its own, apart from the gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.amp import GradScaler

from adahessian.curvature.engine import PRODUCTS, Engine, ProductName
from adahessian.curvature.loss_scale import ScaledLoss
from adahessian.curvature.passes import CurvaturePass, Model
from adahessian.curvature.sync_batch_norm import communicates
from adahessian.curvature.ways import Problem
from adahessian.distributed import past_wrappers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from adahessian.optimizer import AdaHessian
    from adahessian.sparse import DenseAndSparse


class Curvature(CurvaturePass[Model]):
    """Measures the curvature of a loss for an optimizer, in a pass of its own.

    The gradient's path stays as it is. The pass leaves gradients, buffers (batch-norm statistics), train and eval modes
    and random streams as it finds them: with or without it, the same dropout masks and the same data order follow.
    Hooks on parameters do not see it; those on modules do.

    Args:
        model: The model. It may be shared with, or a part of, what computes the gradient.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss, a mean over the batch: a sum would make the
            curvature depend on the size of the slice.
        optimizer: The optimizer that uses the curvature and says when it is due.
        batch_fraction: Share of each batch to measure on, above 0 and up to 1: its first examples. Every tensor of the
            batch is cut, a mask over positions too: give such a one to ``loss_fn`` by another way.
        batch_dim: The dimension of the batch's tensors that counts examples.
        product: How Hessian-vector products are computed. ``"auto"`` takes the fastest way that works for the model and
            says which; ``"double_backward"`` and ``"forward_over_reverse"`` are exact; ``"finite_difference"`` is an
            approximation by two ordinary gradients, for networks without kinks only.
        compile: Whether the pass is compiled, as one function; None does so on a GPU, for models that repay it.
        tangent_dtype: ``torch.bfloat16`` lets a compiled pass round the operands of those products that only feed
            ``H z``: faster, and the gradient of the same pass keeps every bit.
        scaler: The ``GradScaler`` of a loop in float16. The pass multiplies its loss by a scale of its own, which
            begins with the scaler's and backs off where second derivatives overflow, so that small ones do not vanish,
            and divides the curvature by it: that does not depend on the scale.
        accumulate: Whether every call of :meth:`measure` until the next step is measured, with the same probes, and
            their mean counts, as for the micro-batches of an accumulated gradient; otherwise the first alone counts.
        process_group: The processes whose gradients are averaged, and with them the curvature. ``"auto"`` takes those
            of ``DistributedDataParallel`` or of FSDP2's ``fully_shard``; None is for a model of this process alone.

    Raises:
        TypeError: If the model, the function or the optimizer is none.
        ValueError: If an argument is out of its range.

    Example:
        >>> import adahessian
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = adahessian.AdaHessian(model.parameters(), update_every=10)
        >>> curvature = Curvature(model, lambda m, batch: m(batch).square().mean(), optimizer, batch_fraction=0.25)
        >>> curvature.measure(torch.ones(8, 3))
        True
        >>> curvature.measure(torch.ones(8, 3))  # the next step has its measurement
        False
    """

    def __init__(
        self,
        model: Model,
        loss_fn: Callable[[Model, Any], Tensor],
        optimizer: AdaHessian | DenseAndSparse,
        *,
        batch_fraction: float = 1.0,
        batch_dim: int = 0,
        product: ProductName = "auto",
        compile: bool | None = None,
        tangent_dtype: torch.dtype | None = None,
        scaler: GradScaler | None = None,
        accumulate: bool = False,
        process_group: ProcessGroup | Literal["auto"] | None = "auto",
    ) -> None:
        super().__init__(
            model,
            loss_fn,
            optimizer,
            batch_fraction=batch_fraction,
            batch_dim=batch_dim,
            accumulate=accumulate,
            process_group=process_group,
        )
        if product not in PRODUCTS:
            raise ValueError(f"Invalid product: {product!r}. It must be one of {', '.join(PRODUCTS)}.")
        if not (compile is None or isinstance(compile, bool)):
            raise ValueError(f"Invalid compile value: {compile!r}. It must be True, False or None.")
        if tangent_dtype not in (None, torch.bfloat16):
            raise ValueError(f"Invalid tangent_dtype: {tangent_dtype!r}. It must be torch.bfloat16 or None.")
        if not (scaler is None or isinstance(scaler, GradScaler)):
            raise TypeError(f"scaler must be a torch.amp.GradScaler or None, but got a {type(scaler).__name__}")
        self.loss_fn = loss_fn
        self.scaler = scaler
        self._scaled_loss = ScaledLoss(loss_fn, scaler, scales_probes=product != "finite_difference")
        self._problem = Problem(
            self.model,
            self._scaled_loss if scaler is not None else loss_fn,
            self.optimizer,
            probe_scale=lambda: self._scaled_loss.of_probe,
        )
        self._engine = Engine(self._problem, product=product, compile=compile, tangent_dtype=tangent_dtype)

    @property
    def engine(self) -> Engine:
        """What computes the second derivatives."""
        return self._engine

    def _measure(self, part: Any, weight: float) -> None:
        if weight != 1 and communicates(self.model):
            raise ValueError("SyncBatchNorm makes one objective of all ranks, in which they cannot be weighted apart")
        device = next(self.model.parameters()).device
        with self._problem.gathered(), past_wrappers(self.model):
            # A product is chosen by comparison, which asks for scales at which nothing overflows: these come first.
            chooses = self._scaled_loss.is_scaled and self._engine.chooses_by_comparison
            measure = self._engine.measure_plainly if chooses else self._engine.measure
            found = self._scaled_loss.unscaled(partial(measure, part), device, self.ranks, counts=weight != 0)
            if chooses:
                self._engine.choice(part)
        self.feed(found.diagonal, found.gradients, weight=weight)
