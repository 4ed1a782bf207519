"""H z as one compiled function, by forward over reverse: the derivative of the gradient along z."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.nn.modules.batchnorm import _BatchNorm

from adahessian.base.batches import map_tensors, signature
from adahessian.hessian.attention import plain_attention
from adahessian.hessian.batch_norm import batch_norm_forward
from adahessian.hessian.double_backward import Derivatives, Request
from adahessian.hessian.isolation import Forward, isolated, random_state_kept

# Replacements for the forward methods of layers in forward over reverse.
FORWARD_SUBSTITUTES: dict[Forward, Forward] = dict.fromkeys(
    (_BatchNorm.forward, nn.SyncBatchNorm.forward), batch_norm_forward
)

Gradient: TypeAlias = Literal["exact", "rounded", "left out"]

_Buffers = dict[str, Tensor]
_Found = tuple[Tensor, list[Tensor], list[Tensor], _Buffers]
# Maps parameters, buffers, a probe and a batch to the loss, its gradients, H z and the buffers after the pass.
_Function = Callable[[Sequence[Tensor], _Buffers, Sequence[Tensor], Any], _Found]


class CompiledPass:
    """Derivatives of ``loss_fn(model, batch)`` with respect to parameters, by one compiled call per probe.

    Operands that only ``H z`` needs are rounded to ``product_dtype``, unless it is None. So are those of the gradient
    if ``needs_gradient`` is False. If ``needs_marks`` is False too, the gradient is not computed, and ``H z`` is
    returned in its place. This saves a ninth of the matrix products.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        params: Sequence[Tensor],
        product_dtype: torch.dtype | None,
        needs_gradient: bool = True,
        needs_marks: bool = True,
    ) -> None:
        self.model, self.loss_fn = model, loss_fn
        self._function = _FunctionalLoss(model, loss_fn, params).derivatives
        has_images = any(param.dim() == 4 and param.is_cuda for param in params)
        gradient: Gradient = "exact" if needs_gradient else "rounded" if needs_marks else "left out"
        self._compiled = compile_derivatives(self._function, product_dtype, gradient, channels_last=has_images)
        self._unused: dict[Hashable, frozenset[int]] = {}

    @torch.no_grad()
    def __call__(self, batch: Any, request: Request, keep_buffers: bool, *, compiled: bool = True) -> Derivatives:
        """Differentiate the loss of a batch twice. ``compiled=False`` runs the same function without the compiler."""
        function = self._compiled if compiled else self._function
        key = signature(batch), tuple(module.training for module in self.model.modules())
        if key not in self._unused:
            self._unused[key] = self._find_unused(batch, request.params)
        params = [param.detach() for param in request.params]
        buffers = {f"model.{name}": buffer for name, buffer in self.model.named_buffers()}
        probes = [request.draw(probe) for probe in range(request.num_probes)]
        products: list[list[Tensor]] = []
        with isolated(self.model, FORWARD_SUBSTITUTES, compiled=True), plain_attention(), _transforms_closed():
            for z in probes:
                # All passes draw the same random numbers. A CUDA graph cannot restore its random state.
                is_last = len(products) + 1 == len(probes)
                with nullcontext() if is_last or _is_capturing() else random_state_kept(self.model):
                    loss, gradients, product, after = function(params, buffers, z, batch)
                products.append(product)
            may_wait = not torch.cuda.is_available() or torch.cuda.get_sync_debug_mode() != 2
            if self._unused[key] and may_wait and not _is_capturing():
                # Which parameters take part may depend on the data. A nonzero gradient proves that a parameter does.
                self._unused[key] -= {i for i in self._unused[key] if gradients[i].any()}
            if keep_buffers and buffers:
                torch._foreach_copy_(list(buffers.values()), [after[name] for name in buffers])
        unused = self._unused[key]
        values = [[None if i in unused else each for i, each in enumerate(list)] for list in (gradients, *products)]
        return Derivatives(loss, values[0], probes, values[1:])

    def _find_unused(self, batch: Any, params: Sequence[Tensor]) -> frozenset[int]:
        """Find the parameters that take no part in the loss, for which ``torch.func`` returns zeros."""
        with torch.enable_grad(), isolated(self.model, {}), random_state_kept(self.model):
            gradients = torch.autograd.grad(self.loss_fn(self.model, batch), params, allow_unused=True)
        return frozenset(i for i, gradient in enumerate(gradients) if gradient is None)


class _FunctionalLoss(nn.Module):
    """``loss_fn(model, batch)`` with the parameters as arguments."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor], params: Sequence[Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn
        names = {id(param): name for name, param in self.named_parameters()}
        self.names = [names[id(param)] for param in params]

    def forward(self, batch: Any) -> tuple[Tensor, _Buffers]:
        """Return the loss and the buffers after the pass, which the model may have replaced with other tensors."""
        return self.loss_fn(self.model, batch), dict(self.named_buffers())

    def derivatives(self, params: Sequence[Tensor], buffers: _Buffers, probe: Sequence[Tensor], batch: Any) -> _Found:
        def loss_at(params: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, _Buffers]]:
            arguments = dict(zip(self.names, params, strict=True))
            arguments.update((name, buffer.clone()) for name, buffer in buffers.items())
            loss, after = functional_call(self, arguments, (batch,))
            return loss.squeeze(), (loss, {name: after[name] for name in buffers})

        found: Any = jvp(grad(loss_at, has_aux=True), (list(params),), (list(probe),), has_aux=True)
        gradients, products, (loss, after) = found
        return loss, gradients, [each.to(torch.promote_types(each.dtype, torch.float32)) for each in products], after


def compile_derivatives(
    function: _Function, product_dtype: torch.dtype | None, gradient: Gradient = "exact", *, channels_last: bool
) -> _Function:
    """Compile :meth:`_FunctionalLoss.derivatives`, optionally with images and kernels in channels-last order."""
    from adahessian.hessian.tangents import TangentPass, mark  # imports the compiler

    def derivatives(params: Sequence[Tensor], buffers: _Buffers, probe: Sequence[Tensor], batch: Any) -> Any:
        inputs: Any = [list(params), [mark(z) for z in probe], batch]
        if channels_last:
            inputs = map_tensors(_in_channels_last, inputs)
        loss, gradients, products, after = function(inputs[0], buffers, *inputs[1:])
        found = [products if gradient == "left out" else gradients, products]
        found = [[_in_order_of(param, each) for param, each in zip(params, tensors, strict=True)] for tensors in found]
        return loss, *found, after

    # The compiler allows eight versions of a function per code object, so each model needs its own.
    derivatives.__code__ = derivatives.__code__.replace()
    # fallback_random gives the pass the same dropout masks as the gradient.
    tangents = TangentPass(product_dtype, rounds_gradient=gradient != "exact")
    options: Any = {"fallback_random": True, "post_grad_custom_pre_pass": tangents}
    return torch.compile(derivatives, fullgraph=True, dynamic=False, options=options)


def _in_channels_last(tensor: Tensor) -> Tensor:
    is_image = tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if is_image else tensor


def _in_order_of(param: Tensor, tensor: Tensor) -> Tensor:
    is_ordered = tensor.dim() == 4 and not param.is_contiguous()
    return tensor.contiguous(memory_format=torch.channels_last if is_ordered else torch.contiguous_format)


@contextmanager
def _transforms_closed() -> Iterator[None]:
    """Restore global state that torch 2.13 leaves changed if the compiler fails inside ``torch.func``."""
    autograd = torch._C._autograd
    forbidden = autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    except BaseException:
        if forbidden is None:
            autograd._saved_tensors_hooks_enable()
        if torch.autograd.forward_ad._current_level < 0:
            with suppress(RuntimeError):
                torch._C._exit_dual_level(level=0)
        raise


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
