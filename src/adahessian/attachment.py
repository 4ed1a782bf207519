"""Hooks that measure the curvature when a training loop calls the model.

Unless the model computes the loss, its outputs become tensors of a subclass. PyTorch calls ``__torch_function__`` of
the subclass instead of its own functions, so ``loss.backward()`` can keep the graph of the gradient.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adahessian.base.batches import map_tensors, tensors_in
from adahessian.base.errors import CurvatureError
from adahessian.curvature import Curvature
from adahessian.hessian.engine import SUBSTITUTES
from adahessian.hessian.graph import check_twice_differentiable, watch_functions
from adahessian.hessian.isolation import twice_differentiable
from adahessian.optimizer import AdaHessian


def attach(
    model: nn.Module,
    optimizer: AdaHessian,
    *,
    loss_of_output: Callable[[Any], Tensor] | None = None,
    **curvature_options: Any,
) -> Attachment:
    """Measure the curvature when the loop calls the model, without changes to the loop.

    Without ``loss_of_output``, the loss may be any function of the outputs. If a measurement is due,
    ``loss.backward()`` keeps the graph of the gradient, and ``optimizer.step()`` differentiates the gradient. If
    several losses are accumulated, the curvature is that of their accumulated gradient. Such a step differentiates the
    whole batch twice. It needs more time and memory than :class:`adahessian.Curvature`, which can measure on a part of
    the batch. Each loss must depend on an output. If you penalize parameters, add the penalty to a loss of the outputs,
    and call ``backward`` on the sum. Detach losses that you keep. Several processes, several optimizers for one loss,
    activation checkpointing, compiled losses, and a ``torch.autograd.Function`` that computes the loss are not
    supported.

    With ``loss_of_output``, the inputs are the batch, and the loss must depend on nothing else. Each call of the model
    first calls :meth:`adahessian.Curvature.measure` with ``(args, kwargs)``. Several calls per step count as
    micro-batches, and several processes are supported.

    Calls in eval mode or without gradients are not measured. Compile or wrap the model before you attach it, and call
    the attached model itself. A copy of the model is not attached.

    Args:
        model: The model that the loop calls. If it is attached already, the new hooks replace the old ones.
        optimizer: The optimizer that uses the curvature.
        loss_of_output: Function that returns the loss that you optimize from an output of the model, as a mean over the
            batch. An example is ``lambda output: output.loss``, for a model that computes its own loss.
        curvature_options: Other arguments of :class:`adahessian.Curvature`, such as ``batch_fraction``. They need
            ``loss_of_output``.

    Returns:
        A handle. Its method ``remove`` removes the hooks, for example before the model is exported.

    Raises:
        TypeError: If the model or the optimizer has the wrong type, or an option needs ``loss_of_output``.
        ValueError: If an option is out of range, or several processes or a wrapper need ``loss_of_output``.

    Example:
        >>> import adahessian
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = adahessian.AdaHessianKron(adahessian.param_groups(model), lr=1e-3)
        >>> handle = attach(model, optimizer)
        >>> model(torch.ones(8, 3)).square().mean().backward()
        >>> optimizer.step()
    """

    def loss_fn(module: nn.Module, call: Any) -> Tensor:
        args, kwargs = call
        assert loss_of_output is not None
        return loss_of_output(module(*args, **kwargs))

    curvature = Curvature(model, loss_fn, optimizer, **curvature_options)  # also checks the arguments
    if loss_of_output is None and curvature_options:
        names = ", ".join(curvature_options)
        raise TypeError(f"{names} needs loss_of_output. Pass both, or create an adahessian.Curvature.")
    is_wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    if loss_of_output is None and (is_wrapped or curvature.ranks is not None):
        raise ValueError(
            "loss_of_output=None supports neither several processes nor DistributedDataParallel. If the model computes "
            "its own loss, pass loss_of_output. Otherwise, create an adahessian.Curvature."
        )
    for earlier in filter(None, map(_owner, list(model._forward_pre_hooks.values()))):
        earlier.remove()
    attachment = Attachment(curvature.optimizer, None if loss_of_output is None else curvature)
    own = weakref.ref(model)  # so that the optimizer does not keep the model alive

    def detach_gradients(*_: Any) -> None:
        # The optimizer has freed the graphs of its own parameters.
        for param in () if (alive := own()) is None else alive.parameters():
            if param.grad is not None and param.grad.requires_grad:
                param.grad = param.grad.detach()

    attachment._handles = [
        curvature.optimizer.register_step_post_hook(detach_gradients),
        # This hook runs first, because the pass runs other hooks, which may change the inputs.
        model.register_forward_pre_hook(attachment._before, prepend=True, with_kwargs=True),
        model.register_forward_hook(attachment._after, always_call=True),
    ]
    return attachment


class Attachment:
    """The hooks of :func:`attach`. A copy or pickle of the model has hooks that do nothing."""

    def __init__(self, optimizer: AdaHessian | None = None, curvature: Curvature[nn.Module] | None = None) -> None:
        self._optimizer, self._curvature = optimizer, curvature
        self._handles: list[Any] = []
        self._kernels, self._is_due = ExitStack(), False

    def remove(self) -> None:
        """Remove the hooks from the model and the optimizer."""
        self._leave()
        for handle in self._handles:
            handle.remove()

    def _leave(self) -> bool:
        """Restore the model's kernels, and return whether the kernels were replaced."""
        is_due, self._is_due = self._is_due, False
        self._kernels.close()
        return is_due

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._leave()  # if an interrupt ended an earlier call
        if self._optimizer is None or not (model.training and torch.is_grad_enabled()):
            return
        if self._curvature is None:
            if self._optimizer.curvature_due:
                self._kernels.enter_context(twice_differentiable(model, SUBSTITUTES))
                self._is_due = True
            return
        if any(tensor.grad_fn is not None for tensor in tensors_in((args, kwargs))):
            raise ValueError(
                "model is called with a tensor that has a graph, which a measurement would free. Detach the tensor, or "
                "attach a module that also computes the tensor."
            )
        with _hooks_hidden(model):  # because the pass calls the model
            self._curvature.measure((args, kwargs))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        return map_tensors(_traced, output) if self._leave() else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Attachment, ()


def _owner(hook: Any) -> Attachment | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, Attachment) else None


@contextmanager
def _hooks_hidden(model: nn.Module) -> Iterator[None]:
    # A compiled model forwards setattr to the original model, so this changes the dict.
    kept = {name: vars(model)[name] for name in ("_forward_pre_hooks", "_forward_hooks")}
    for name, hooks in kept.items():
        vars(model)[name] = type(hooks)((key, hook) for key, hook in hooks.items() if _owner(hook) is None)
    try:
        yield
    finally:
        vars(model).update(kept)


class _Traced(Tensor):
    """An output of the model, or a result computed from it, whose ``backward`` keeps the graph of the gradient."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            raise CurvatureError(
                "A compiled function received an output of an attached model, so the gradient would have no graph. "
                "Call the original function, or measure with adahessian.Curvature."
            )
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func not in (Tensor.backward, torch.autograd.backward):
                return map_tensors(_traced, func(*args, **kwargs))
            losses = list(tensors_in(args[0]))
            check_twice_differentiable(losses, of_loss=True)
            for loss in losses:
                watch_functions(loss)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Using backward", UserWarning)  # step frees the graph
                return func(*args, **{**kwargs, "retain_graph": True, "create_graph": True})

    def __format__(self, spec: str) -> str:
        return format(self.detach(), spec)


def _traced(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(_Traced) if tensor.requires_grad else tensor
