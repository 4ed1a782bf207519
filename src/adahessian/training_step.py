"""A whole training step in one call, compiled and replayed as CUDA graphs."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from adahessian.algorithm.plan import updates_compiled
from adahessian.base.batches import SeenSignatures, map_tensors, tensors_in
from adahessian.base.errors import first_line
from adahessian.base.log import info_once, logger
from adahessian.base.shards import mesh_of
from adahessian.cuda_graphs import CannotCapture, CapturedFunction, Memory, autocast_cache_disabled, cuda_device_of
from adahessian.curvature import Curvature
from adahessian.hessian.double_backward import Derivatives
from adahessian.hessian.engine import Engine
from adahessian.hessian.isolation import buffers_restored, random_state_kept
from adahessian.optimizer import AdaHessian
from adahessian.parallel.ranks import Ranks, is_flattened, ranks_of

Loss: TypeAlias = Callable[[Any], Tensor]
Gradient: TypeAlias = tuple[Tensor, list[Tensor | None]]  # with the loss in front

_MOST_UPDATES = 64  # captured updates. Each kind of batch has two, one for the roots and one for the step
_TENSORS = operator.attrgetter("_parameters", "_buffers")


class TrainingStep:
    """A whole training step in one call: gradient, curvature when it is due, and update.

    Derivatives are compiled if the model is large enough. On a GPU, CUDA graphs replay them, which removes the overhead
    of Python and of launches. They also replay the arithmetic of AdaHessianKron. The update stays an ordinary
    ``optimizer.step()``, so schedules, hooks, evaluation and checkpoints work as in any loop. Batches of other shapes
    run uncaptured until a shape becomes frequent.

    Gradients are replaced, not accumulated, and the next step overwrites the tensors in ``param.grad``. Hooks on
    parameters do not run. To clip gradients, use ``optimizer.register_step_pre_hook``. A graph repeats the Python
    values that ``loss_fn`` read during capture. Only the batch and the train and eval modes of modules may change.

    If the model is a ``DistributedDataParallel``, all ranks must call the step. ``loss_fn`` receives the module inside
    the wrapper. Gradients are averaged over ranks before the update. The returned loss is the loss of the local batch.
    Buffers are broadcast from the first rank before the step if the wrapper has ``broadcast_buffers=True``.
    Communication hooks and ``no_sync`` have no effect.

    Args:
        curvature: The :class:`adahessian.Curvature` of an AdaHessian. Its ``compile`` applies to the gradient too. For
            any other PyTorch optimizer, pass ``(model, loss_fn, optimizer)`` instead.
        compile: Compile the gradient. None compiles it on a GPU, for models of at least 100,000 parameters.
        capture: Capture CUDA graphs. This has no effect on other devices.

    Raises:
        TypeError: If an argument has the wrong type, or an AdaHessian is passed without its Curvature.
        ValueError: If ``capture`` or ``compile`` is out of range. Also if the training uses FSDP, a GradScaler, groups
            with ``sparse=True``, an optimizer that needs a closure or a DistributedDataParallel inside the model. On
            several ranks, also if the model has SyncBatchNorm or embeddings with ``sparse=True``.

    Example:
        >>> import adahessian
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = adahessian.AdaHessian(model.parameters(), curvature_every=10)
        >>> curvature = adahessian.Curvature(model, lambda m, batch: m(batch).square().mean(), optimizer)
        >>> step = TrainingStep(curvature, capture=False)
        >>> loss = step(torch.ones(8, 3))
    """

    def __init__(
        self,
        curvature: Curvature[Any] | nn.Module,
        loss_fn: Callable[..., Tensor] | None = None,
        optimizer: Any = None,
        /,
        *,
        compile: bool | None = None,
        capture: bool = True,
    ) -> None:
        if not isinstance(capture, bool) or compile not in (None, True, False):
            raise ValueError(f"capture={capture!r} or compile={compile!r} is invalid. Pass bools, or None for compile.")
        self._curvature: Curvature[Any] | None = None
        if isinstance(curvature, Curvature):
            if any(other is not None for other in (loss_fn, optimizer, compile)):
                raise TypeError("curvature has its own loss_fn, optimizer and compile. Pass these to Curvature.")
            self._curvature, self._engine = curvature, curvature.engine
            self._model, self._loss_fn, self._optimizer = curvature.model, curvature.loss_fn, curvature.optimizer
            self._ranks = curvature.ranks
        else:
            inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps optimizers
            is_plain = isinstance(optimizer, Optimizer) and not isinstance(inner, AdaHessian)
            if not (isinstance(curvature, nn.Module) and callable(loss_fn) and is_plain):
                types = ", ".join(type(each).__name__ for each in (curvature, loss_fn, inner))
                raise TypeError(
                    f"TrainingStep received ({types}). Pass adahessian.Curvature(model, loss_fn, optimizer) for "
                    "AdaHessian, or a torch.nn.Module, a loss_fn and a torch.optim.Optimizer for other optimizers."
                )
            _reject("FSDP", mesh_of(curvature) is not None or is_flattened(curvature))
            is_wrapped = isinstance(curvature, DistributedDataParallel)
            self._ranks = ranks_of(curvature, "auto" if is_wrapped else None)
            self._model, self._loss_fn, self._optimizer = curvature, loss_fn, optimizer
            if isinstance(curvature, DistributedDataParallel):
                self._model = curvature.module
            # This engine computes nothing. It decides whether to compile, by the same rule as the curvature pass.
            self._engine = Engine(self._model, self._loss_fn, compile=compile, product_dtype=None)
        _check_supported(self._model, self._optimizer, self._curvature, self._ranks)
        self._capture = capture
        self._device: torch.device | None = None
        self._compiles = self._captures = False
        self._seen = SeenSignatures()
        self._losses: dict[Hashable, Loss] = {}
        # Graphs for each kind of batch, or None if capture failed. Below are their memory and what they depend on.
        self._graphs: dict[Hashable, _Graphs | None] = {}
        self._updates: dict[Hashable, CapturedFunction[Any] | None] = {}
        self._captures_updates = True
        # Updates have separate memory, because other graphs could be captured into memory that the updates reuse.
        self._memory: Memory
        self._update_memory: Memory
        self._modules: list[nn.Module] = []
        self._look: object = None

    def __call__(self, batch: Any) -> Tensor:
        """Take one step and return the loss. Reading its value synchronizes with the device.

        Args:
            batch: The batch for ``loss_fn``, on the model's device.

        Raises:
            CurvatureError: If the curvature cannot be computed. Nothing has been changed in that case.
        """
        params = []
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    params.append(param)
                else:
                    param.grad = None  # that of an earlier step
        if params and params[0].device != self._device:
            self._device = params[0].device
            self._compiles = self._engine.why_not_compiled(params) is None
            self._captures = self._capture and cuda_device_of(self._model) is not None
            if self._capture and not self._captures:
                info_once("Nothing is captured, because CUDA graphs need the whole model on one CUDA device")
        if self._ranks is not None and self._ranks.broadcasts_buffers:
            self._ranks.broadcast_(self._model.buffers())
        curvature = self._curvature if self._curvature and self._curvature.optimizer.curvature_due else None
        key = self._seen.key(batch) if self._compiles or self._captures else None
        is_captured = self._captures and key is not None
        run = self._run_updates if is_captured and self._captures_updates else None
        with updates_compiled(is_captured and self._compiles, run):
            if is_captured and curvature is not None and callable(curvature.batch_fraction):
                info_once("Measurements are not captured, because batch_fraction is a function of the batch")
                curvature.measure(batch)  # a graph would reuse the part of an earlier batch
                curvature = None
            found = self._replay(key, batch, params, curvature) if is_captured else None
            loss, gradients = found or self._compute(key, batch, params, curvature)
            if self._ranks is not None:  # here, because a CUDA graph must not contain communication
                gradients = self._ranks.average_gradients(gradients, params)
            for param, gradient in zip(params, gradients, strict=True):
                if param.grad is not gradient:
                    param.grad = gradient
            self._optimizer.step()
        return loss.clone()  # a copy, because the next step overwrites a captured loss

    def _compute(self, key: Hashable, batch: Any, params: list[Tensor], curvature: Curvature[Any] | None) -> Gradient:
        """Compute the gradient and, if it is due, the curvature."""
        if curvature is not None and curvature.batch_fraction != 1:
            curvature.measure(batch)
        elif curvature is not None:
            try:
                request = curvature.optimizer._begin_measurement()
                found = self._engine.derivatives(batch, request, keep_buffers=True)
                curvature._pending.add(curvature.optimizer, request, found, 1.0)
                return found.loss, _as_backward_leaves(found.gradients, params)
            except torch.OutOfMemoryError as error:
                curvature._drop_measurement(error)
        return _differentiate(self._loss(key, batch, params), batch, params)

    def _replay(
        self, key: Hashable, batch: Any, params: list[Tensor], curvature: Curvature[Any] | None
    ) -> Gradient | None:
        """Compute the same with CUDA graphs, or return None if the batch must run uncaptured."""
        with torch.cuda.device(self._device):
            if self._has_moved():
                # A module that replaces buffers counts as moved at each step. Failed captures are not repeated.
                self._graphs = {kind: None for kind, graphs in self._graphs.items() if graphs is None}
                self._updates, self._memory, self._update_memory = {}, Memory(), Memory()
            autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
            kind = key, tuple(map(id, params)), tuple([module.training for module in self._modules]), autocast
            try:
                if kind not in self._graphs:
                    self._graphs[kind] = _Graphs(self, key, batch, params)
                graphs = self._graphs[kind]
                return None if graphs is None else graphs.replay(batch, curvature)
            except CannotCapture as reason:
                self._graphs[kind], self._memory = None, Memory()  # PyTorch may have lost track of its pool
                logger.warning("The step is not captured for batches of this kind: %s", reason)
                return None

    def _run_updates(self, key: Hashable, updates: Sequence[Callable[[], Any]]) -> None:
        """Run independent updates. Capture them together at their second call with this key."""
        captured = self._updates.get(key)
        try:
            if captured is None and key in self._updates:  # the first call has compiled
                with torch.cuda.device(self._device):
                    together = partial(self._update_memory.side_by_side, updates)
                    captured = CapturedFunction(together, self._model, self._update_memory, rehearse=False)
            if captured is not None:
                self._updates[key] = captured
                captured.replay()
                return
            if len(self._updates) >= _MOST_UPDATES:
                self._updates.clear()
            self._updates[key] = None
        except (CannotCapture, torch.OutOfMemoryError) as reason:
            logger.warning("The update is not captured: %s", first_line(reason))
            self._updates, self._captures_updates = {}, False
        for update in updates:
            update()

    def _has_moved(self) -> bool:
        """Return whether modules, parameters or buffers were replaced or moved. Graphs know only their addresses.

        PyTorch does not report such changes. Walking the module tree at each step would take six times as long.
        """
        if self._modules and _look(self._modules) == self._look:
            return False
        self._modules = list(self._model.modules())
        self._look = _look(self._modules)
        return True

    def _loss(self, key: Hashable, batch: Any, params: list[Tensor]) -> Loss:
        """Return the loss as a function of the batch, compiled for batches of this kind if enabled and possible."""

        def loss_of(batch: Any) -> Tensor:
            return self._loss_fn(self._model, batch)

        if key is None or not self._compiles:
            return loss_of
        if key not in self._losses:
            # The compiler counts versions of a function per code object, so each function needs its own.
            loss_of.__code__ = loss_of.__code__.replace()
            logger.warning("Compiling the gradient takes up to two minutes the first time.")
            compiled: Loss = torch.compile(loss_of, dynamic=False)
            try:
                with buffers_restored(self._model), random_state_kept(self._model):
                    _differentiate(compiled, batch, params)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # any error of the compiler. Errors in the user's code occur again
                logger.warning("The gradient is not compiled for batches of this kind: %s", first_line(error))
                compiled = loss_of
            self._losses[key] = compiled
        return self._losses[key]


class _Graphs:
    """CUDA graphs for batches of one kind, each captured when it is first needed.

    The graphs of a step run one after another in the same memory, so a graph may overwrite the results of earlier ones.
    """

    def __init__(self, step: TrainingStep, key: Hashable, batch: Any, params: list[Tensor]) -> None:
        for tensor in tensors_in(batch):
            if tensor.device != step._device:
                raise CannotCapture(f"the batch has a tensor on {tensor.device}, but the model is on {step._device}")
        self._step, self._key, self._params = step, key, params
        self._batch = map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), batch)
        self._probes: list[list[Tensor]] = []
        self._gradient: CapturedFunction[Gradient] | None = None
        self._derivatives: CapturedFunction[Derivatives] | None = None

    def replay(self, batch: Any, curvature: Curvature[Any] | None) -> Gradient:
        """Compute the gradient and, if it is due, the curvature."""
        with torch.no_grad():
            # torch._foreach_copy_ lacks some dtypes, and saves launches only if all dtypes are the same.
            for static, tensor in zip(tensors_in(self._batch), tensors_in(batch), strict=True):
                static.copy_(tensor, non_blocking=True)
        if curvature is not None and curvature.batch_fraction == 1:
            if (found := self._measure(curvature, keep_buffers=True)) is not None:
                return found[:2]
            curvature = None
        step = self._step
        if self._gradient is None:  # first, because the curvature pass on a slice can reuse its memory
            with autocast_cache_disabled():
                loss_of = step._loss(self._key, self._batch, self._params)
            differentiate = partial(_differentiate, loss_of, self._batch, self._params)
            self._gradient = CapturedFunction(differentiate, step._model, step._memory)
        if curvature is not None:
            self._measure(curvature, keep_buffers=False)
        return self._gradient.replay()

    def _measure(self, curvature: Curvature[Any], *, keep_buffers: bool) -> Derivatives | None:
        """Compute the curvature, or return None if memory runs out and the last curvature stays."""
        step, request = self._step, curvature.optimizer._begin_measurement()
        try:
            if self._derivatives is None or len(self._probes) != request.num_probes:
                self._derivatives = None  # it reads the probes at their address
                self._probes = [request.draw(probe) for probe in range(request.num_probes)]
                static = request._replace(draw=lambda probe, out=None: self._probes[probe])
                part = curvature._part_of(self._batch)
                with autocast_cache_disabled():
                    compute = step._engine.pass_for(part, static)  # compiles before the capture

                def derivatives() -> Derivatives:
                    found = compute(part, static, keep_buffers)
                    is_step = curvature.batch_fraction == 1  # else gradients only mark blocks that the loss reached
                    own = _as_backward_leaves(found.gradients, static.params) if is_step else found.gradients
                    return found._replace(gradients=own)

                self._derivatives = CapturedFunction(derivatives, step._model, step._memory)
            for number, probe in enumerate(self._probes):
                request.draw(number, out=probe)
            # A pass on a slice restores random states. A pass that also gives the gradient advances them.
            with random_state_kept(step._model) if self._derivatives.is_random and not keep_buffers else nullcontext():
                found = self._derivatives.replay()
            curvature._pending.add(curvature.optimizer, request, found, 1.0)
            if curvature.ranks is None:
                curvature._pending._reset()  # it refers to memory that the gradient's graph overwrites
        except torch.OutOfMemoryError as error:
            curvature._drop_measurement(error)
            return None
        return found


def _differentiate(loss_of: Loss, batch: Any, params: Sequence[Tensor]) -> Gradient:
    with torch.enable_grad():
        loss = loss_of(batch)
        gradients = torch.autograd.grad(loss, params, allow_unused=True)
    return loss.detach(), _as_backward_leaves(gradients, params)


def _as_backward_leaves(gradients: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor | None]:
    """Give gradients their parameters' strides and memory of their own, because clipping scales them in place."""
    taken: set[int] = set()
    own: list[Tensor | None] = []
    for gradient, param in zip(gradients, params, strict=True):
        if gradient is not None and gradient.layout is torch.strided:
            if gradient.stride() != param.stride() or gradient.data_ptr() in taken:
                gradient = torch.empty_like(param).copy_(gradient)
            taken.add(gradient.data_ptr())
        own.append(gradient)
    return own


def _look(modules: Sequence[nn.Module]) -> tuple[list[Any], ...]:
    """Return the ids and addresses that graphs depend on. The objects are included, which keeps their ids unique."""
    tensors = [each for module in modules for own in _TENSORS(module) for each in own.values() if each is not None]
    children = [child for module in modules for child in module._modules.values()]
    return list(map(id, tensors + children)), list(map(Tensor.data_ptr, tensors)), tensors, children


def _check_supported(
    model: nn.Module, optimizer: Optimizer, curvature: Curvature[Any] | None, ranks: Ranks | None
) -> None:
    modules = list(model.modules())
    arguments = inspect.signature(type(optimizer).step).parameters.values()
    required = [each for each in arguments if each.default is each.empty and not str(each).startswith("*")]
    _reject("FSDP", mesh_of(model) is not None)
    _reject("a scaler", curvature is not None and curvature.scaler is not None)
    _reject("groups with sparse=True", any(group.get("sparse") for group in optimizer.param_groups))
    _reject("an optimizer that needs a closure", len(required) > 1)  # besides self
    _reject("a DistributedDataParallel inside the model", any(isinstance(m, DistributedDataParallel) for m in modules))
    if ranks is not None:
        # SyncBatchNorm communicates in the forward pass.
        _reject("SyncBatchNorm on several ranks", any(isinstance(m, nn.SyncBatchNorm) for m in modules))
        is_sparse = any(getattr(module, "sparse", False) is True for module in modules)
        _reject("embeddings with sparse=True on several ranks", is_sparse)


def _reject(what: str, is_used: bool) -> None:
    if is_used:
        loop = "curvature.measure(batch) (AdaHessian only), loss.backward() and optimizer.step()"
        raise ValueError(f"TrainingStep does not support {what}. Write the loop yourself, with {loop}.")
