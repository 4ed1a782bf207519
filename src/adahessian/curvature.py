"""The curvature pass: connects the optimizer, the Hessian-vector product and the ranks that train together."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from adahessian.algorithm.options import check, is_integer, is_number
from adahessian.base.batches import choose_part, slice_batch
from adahessian.base.errors import first_line
from adahessian.base.log import warn_once
from adahessian.base.shards import check_not_tensor_parallel, mesh_of
from adahessian.hessian.double_backward import Derivatives, Request
from adahessian.hessian.engine import Engine
from adahessian.hessian.isolation import random_state_kept
from adahessian.loss_scale import LossScale
from adahessian.optimizer import AdaHessian
from adahessian.parallel.fsdp import gathered, placed_like
from adahessian.parallel.layerwise import LayerwisePass
from adahessian.parallel.mean import ProductMean, ShardedMean
from adahessian.parallel.ranks import Ranks, check_not_flattened, ranks_of

Model = TypeVar("Model", bound=nn.Module)


class Curvature(Generic[Model]):
    """A separate pass that measures the curvature of a loss for an optimizer.

    Your loop computes the gradient as before. The pass restores gradients, buffers, train and eval modes and random
    states, so batch-norm statistics, dropout masks and the order of the data stay the same. Hooks on modules run, but
    hooks on parameters do not. SyncBatchNorm uses the statistics of the local rank. Copies and pickles contain the
    model and the optimizer, but not compiled code.

    Args:
        model: The model. It may share modules with the model that computes the gradient, or be a part of that model.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss, a mean over the batch rather than a sum.
        optimizer: The optimizer that uses the curvature and knows when it is due.
        batch_fraction: Fraction of each batch to measure on, above 0 and at most 1. None means 1 for AdaHessian and
            0.25 for AdaHessianKron. Every tensor in the batch is sliced to its first examples, so pass tensors without
            a batch dimension, such as a mask, through a closure. If batches must not be cut in this way, such as
            packed sequences, pass a function that takes the batch and returns the part to measure on.
        batch_dim: Batch dimension of the tensors in a batch.
        compile: Compile the pass as one function. True gathers the whole model if it is sharded. None compiles the pass
            on a GPU if the model is large enough, unless the pass gathers one FSDP2 module at a time.
        product_dtype: ``torch.bfloat16`` makes a compiled pass faster by rounding the operands that only ``H z`` needs.
            On a slice of the batch, the gradient is not used, so all operands are rounded.
        scaler: ``GradScaler`` of a float16 loop. The pass has a loss scale of its own, which starts at the scaler's and
            decreases if second derivatives overflow.
        process_group: Process group over which gradients and curvature are averaged. ``"auto"`` uses the group of
            ``DistributedDataParallel`` or ``fully_shard``. Pass None if this process trains the model alone.

    Raises:
        TypeError: If the model, ``loss_fn``, the optimizer or the scaler has the wrong type.
        ValueError: If an argument is out of range, or the model's wrapper is not supported.

    Example:
        >>> import adahessian
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = adahessian.AdaHessian(model.parameters(), curvature_every=10)
        >>> curvature = Curvature(model, lambda m, batch: m(batch).square().mean(), optimizer, batch_fraction=0.25)
        >>> curvature.measure(torch.ones(8, 3))
        True
    """

    def __init__(
        self,
        model: Model,
        loss_fn: Callable[[Model, Any], Tensor],
        optimizer: AdaHessian,
        *,
        batch_fraction: float | Callable[[Any], Any] | None = None,
        batch_dim: int = 0,
        compile: bool | None = None,
        product_dtype: torch.dtype | None = None,
        scaler: GradScaler | None = None,
        process_group: dist.ProcessGroup | Literal["auto"] | None = "auto",
    ) -> None:
        # Trainers wrap optimizers, and a wrapper does not expose every attribute.
        while hasattr(inner := getattr(optimizer, "optimizer", None), "step"):
            optimizer = cast(AdaHessian, inner)
        if not (isinstance(model, nn.Module) and callable(loss_fn) and isinstance(optimizer, AdaHessian)):
            found = ", ".join(type(each).__name__ for each in (model, loss_fn, optimizer))
            raise TypeError(
                f"model, loss_fn, optimizer have the types {found}. Pass a torch.nn.Module, a function of the model "
                "and a batch, and an AdaHessian."
            )
        check_not_flattened(model)
        check_not_tensor_parallel(model)
        _check_arguments_of(loss_fn)
        batch_fraction = optimizer.default_batch_fraction if batch_fraction is None else batch_fraction
        is_fraction = callable(batch_fraction) or (is_number(batch_fraction) and 0 < batch_fraction <= 1)
        check("batch_fraction", batch_fraction, is_fraction, "a number above 0 and at most 1, or a function")
        check("batch_dim", batch_dim, is_integer(batch_dim) and batch_dim >= 0, "a non-negative integer")
        check("compile", compile, compile is None or isinstance(compile, bool), "True, False or None")
        check("product_dtype", product_dtype, product_dtype in (None, torch.bfloat16), "torch.bfloat16 or None")
        if not (scaler is None or isinstance(scaler, GradScaler)):
            raise TypeError(f"scaler is a {type(scaler).__name__}. Pass a torch.amp.GradScaler or None.")
        self.ranks: Ranks | None = ranks_of(model, process_group)
        # Hooks of the wrapper are only for the gradient.
        self.model = cast(Model, model.module if isinstance(model, DistributedDataParallel) else model)
        self.loss_fn, self.optimizer, self.scaler = loss_fn, optimizer, scaler
        self.batch_fraction, self.batch_dim = batch_fraction, batch_dim
        self._loss_scale = LossScale(loss_fn, scaler) if scaler is not None and scaler.is_enabled() else None
        # TrainingStep takes the gradient of a whole batch from the same pass.
        settings: Any = {"needs_gradient": batch_fraction == 1, "needs_marks": optimizer.needs_marks}
        self.engine = Engine(
            self.model, self._loss_scale or loss_fn, compile=compile, product_dtype=product_dtype, **settings
        )
        self._layerwise: LayerwisePass | None = None
        # On a mesh of one rank, nothing is sharded. A loss scale and a compiled pass need the whole model.
        is_sharded = self.ranks is not None and mesh_of(self.model) is not None and process_group == "auto"
        if is_sharded and not (self._loss_scale or compile or product_dtype):
            assert self.ranks is not None
            self._layerwise = LayerwisePass(self.model, loss_fn, self.ranks, needs_marks=optimizer.needs_marks)
        self._register_hook()

    def measure(self, batch: Any, *, weight: float = 1.0) -> bool:
        """Measure the curvature if a measurement is due, and return whether it was due.

        Call it before ``optimizer.step()``, which uses the mean over the micro-batches since the last step. All ranks
        must call it. Save checkpoints after the step, because they do not contain an unused measurement.

        If memory runs out, the measurement is dropped. A warning names a smaller ``batch_fraction`` to try, and the
        steps of this interval use the last curvature.

        Args:
            batch: The batch for ``loss_fn``: tensors in tuples, lists, dicts and dataclasses.
            weight: Weight of this batch in the mean over ranks and micro-batches. Equal weights match averaged
                gradients. If the objective is a mean over all tokens, pass the number of tokens.

        Raises:
            CurvatureError: If the loss cannot be differentiated twice. Nothing has been changed. Other ranks will be
                waiting, so let this process exit.
            torch.OutOfMemoryError: If memory runs out before the first step, or with several ranks.
            ValueError: If the batch cannot be sliced, ``batch_fraction`` returned an empty part, the weight is invalid,
                or the parameters changed within a step.
        """
        if not ((isinstance(weight, float) or is_number(weight)) and 0 <= weight < math.inf):
            raise ValueError(f"weight={weight!r} is invalid. Pass a finite, non-negative number.")
        optimizer, pending = self.optimizer, self._pending
        is_next = pending.is_next(optimizer)
        if not (is_next or optimizer.curvature_due):
            return False
        try:
            if self.batch_fraction != 1:
                batch = self._part_of(batch)
            request = optimizer._begin_measurement()
            if is_next and list(map(id, request.params)) != list(map(id, pending.request.params)):
                raise ValueError("params changed between micro-batches of a step. Change them after optimizer.step().")
            layerwise = self._layerwise
            is_sharded = bool(layerwise and (pending.is_sharded if is_next else layerwise.choose(batch, request)))
            if layerwise and is_sharded:
                derivatives = layerwise.measure(batch, request, weight)
            else:
                derivatives = self._measure_whole(batch, request, weight)
            # Reading the loss would synchronize any other device. diagnose reports dropped measurements there.
            if weight > 0 and derivatives.loss.is_cpu and not derivatives.loss.isfinite().all():
                warn_once("loss_fn returned inf or NaN, so the measurement is dropped. Check the batch and the loss.")
            pending.add(optimizer, request, derivatives, weight, is_sharded=is_sharded)
        except torch.OutOfMemoryError as error:
            self._drop_measurement(error)
        return True

    def _measure_whole(self, batch: Any, request: Request, weight: float) -> Derivatives:
        is_distributed, scale = dist.is_available() and dist.is_initialized(), self._loss_scale
        with gathered(self.model, request) if is_distributed else nullcontext(request) as whole:
            measure = partial(self.engine.measure, batch, whole)
            found = scale.unscaled(measure, whole.params, self.ranks, counts=weight > 0) if scale else measure()
            return placed_like(found, request) if is_distributed else found

    def _part_of(self, batch: Any) -> Any:
        if callable(self.batch_fraction):
            with random_state_kept(self.model):
                return choose_part(self.batch_fraction, batch)
        return slice_batch(batch, self.batch_fraction, self.batch_dim)

    def _drop_measurement(self, error: torch.OutOfMemoryError) -> None:
        """Let the next step use the last curvature, or raise the error if there is none."""
        if callable(self.batch_fraction):
            advice = "The curvature pass ran out of memory. Return a smaller part from the function batch_fraction"
        else:
            less = self.batch_fraction / 2
            advice = f"The curvature pass ran out of memory. Pass batch_fraction={less:g} or less to Curvature"
        if self.ranks is not None or not all(group["measurements"] for group in self.optimizer._measured_groups()):
            raise torch.OutOfMemoryError(f"{advice} (torch: {first_line(error)}).") from error
        warn_once(f"{advice}. This measurement is dropped, and the last curvature stays.")
        self._pending._reset()
        self.optimizer._measurement = {}  # so that none is due until the next interval

    def _register_hook(self) -> None:
        self._pending = _Pending(self.ranks)
        handle = self.optimizer.register_step_pre_hook(self._pending)
        if self.ranks is None:  # with ranks, a pending mean needs the hook even after the Curvature is gone
            weakref.finalize(self, handle.remove)

    def __getstate__(self) -> dict[str, Any]:
        # Copies of an optimizer have neither hooks nor a measurement that no step has used.
        return {name: value for name, value in self.__dict__.items() if name != "_pending"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register_hook()


class _Pending:
    """The measurement for the next step, which calls this pre-hook to average it over ranks.

    It holds no reference to the Curvature or its model, because a hook of the optimizer would keep them alive.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self._reset()

    def _reset(self, request: Request | None = None) -> None:
        self.request: Any = request
        self._accepted: object = None
        self.is_sharded = False
        self._mean: ProductMean | ShardedMean | None = None
        self._waiting: list[Any] = []  # not added to the mean yet, because a single batch needs none

    def is_next(self, optimizer: AdaHessian) -> bool:
        """Return whether the next step will use this measurement."""
        return self._accepted is not None and self._accepted is optimizer._measurement

    def add(
        self,
        optimizer: AdaHessian,
        request: Request,
        derivatives: Derivatives,
        weight: float,
        *,
        is_sharded: bool = False,
    ) -> None:
        """Add a batch, and pass the mean so far to the optimizer. Sharded products are sums over ranks already."""
        is_first = not self.is_next(optimizer)
        if is_first:
            self._reset(request)
            self.is_sharded = is_sharded
            if is_sharded:
                self._mean = ShardedMean(request.params)
        self._waiting.append((derivatives.products, derivatives.gradients, weight))
        if not is_first or self._ranks is not None:
            if self._mean is None:
                self._mean = ProductMean(request.params, optimizer._shapes(request.params), request.num_probes)
            while self._waiting:
                self._mean.add(*self._waiting.pop())
        if self._ranks is None and weight > 0:
            result = self._mean.result(None) if self._mean else self._waiting[0][:2]
            optimizer._accept(request.params, derivatives.probes, *result)
        elif is_first:
            optimizer._accept([], None, [], None)  # so that none is due. The mean over ranks follows in step
        self._accepted = optimizer._measurement

    def __call__(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._complete(optimizer)
            return None

        def measuring_closure() -> Any:  # this step uses what the closure measures
            loss = closure()
            self._complete(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": measuring_closure}

    def _complete(self, optimizer: AdaHessian) -> None:
        if self._ranks is not None and self._mean is not None and self.is_next(optimizer):
            params, num_probes, draw = self.request
            # Drawn again, because keeping the probes would take memory during the gradient's pass. A magnitude of one
            # product does not depend on its probe.
            is_signed = any(group["signed"] for group in optimizer.param_groups)
            probes = list(map(draw, range(num_probes))) if num_probes > 1 or is_signed else None
            optimizer._accept(params, probes, *self._mean.result(self._ranks))
        self._reset()


def _check_arguments_of(loss_fn: Callable[..., Any]) -> None:
    """Raise a TypeError if a loss does not take a model and a batch, such as the losses of torch.nn."""
    name = getattr(loss_fn, "__name__", "")
    is_function = bool(name) and getattr(nn.functional, name, None) is loss_fn
    if is_function or isinstance(loss_fn, nn.modules.loss._Loss):
        function = f"torch.nn.functional.{name}" if is_function else f"torch.nn.{type(loss_fn).__name__}()"
        call = f"lambda model, batch: {function}(model(batch[0]), batch[1])"
        raise TypeError(f"loss_fn takes outputs and targets, but is called with a model and a batch. Pass {call}.")
    try:
        inspect.signature(loss_fn).bind(object(), object())
    except ValueError:  # builtins may have no signature
        return
    except TypeError as error:
        raise TypeError(f"loss_fn is called as loss_fn(model, batch), but {error}. Pass a function of both.") from error
