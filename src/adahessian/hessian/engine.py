"""The choice between the compiled pass and double backward."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._triton import has_triton

from adahessian.base.batches import SeenSignatures, signature
from adahessian.base.log import info_once, warn_once
from adahessian.hessian.check import UnusableError, compare, reason
from adahessian.hessian.compiled import CompiledPass
from adahessian.hessian.convolution import conv_forward
from adahessian.hessian.double_backward import Derivatives, Request, double_backward
from adahessian.hessian.isolation import Forward, random_state_kept
from adahessian.hessian.lstm import lstm_forward

# Compilation takes a minute or two, which does not pay off for models with fewer parameters.
_WORTH_COMPILING = 100_000

SUBSTITUTES: dict[Forward, Forward] = {
    **dict.fromkeys((nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward), conv_forward),
    nn.LSTM.forward: lstm_forward,
}


class Engine:
    """Second derivatives of ``loss_fn(model, batch)``, from a compiled pass if it pays off and works.

    The compiled pass is compared with double backward on the first batch. If it fails or disagrees, double backward
    computes everything. Otherwise, double backward serves only batches whose shapes are not worth compiling for. The
    arguments have the same meaning as for :class:`adahessian.Curvature`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        *,
        compile: bool | None,
        product_dtype: torch.dtype | None,
        needs_gradient: bool = True,
        needs_marks: bool = True,
    ) -> None:
        self._settings = model, loss_fn, compile, product_dtype, needs_gradient, needs_marks
        self._forget()

    def _forget(self) -> None:
        self._model, self._loss_fn, self._compile, self._product_dtype, *self._needs = self._settings
        self.description = "not chosen yet"
        self._params: object = None
        self._compiled: CompiledPass | None = None
        self._compares = True
        self._is_graph_checked = False
        self._seen = SeenSignatures()

    def __getstate__(self) -> dict[str, Any]:
        """Drop compiled code, which cannot be copied. The next batch decides again."""
        return {"_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def derivatives(self, batch: Any, request: Request, *, keep_buffers: bool = False) -> Derivatives:
        """Differentiate the loss of a batch twice. ``keep_buffers`` keeps changes to buffers, as in a training step."""
        self._choose(request.params)
        key = self._seen.key(batch) if self._compiled is not None else None
        found = None if key is None else self._try_compiled(key, batch, request, keep_buffers)
        return found or self._double_backward(batch, request, keep_buffers)

    def measure(self, batch: Any, request: Request) -> Derivatives:
        """Differentiate the loss of a batch twice, and restore buffers and random states."""
        with random_state_kept(self._model):
            return self.derivatives(batch, request)

    def pass_for(self, batch: Any, request: Request) -> Callable[[Any, Request, bool], Derivatives]:
        """Return the pass for batches like this one, already compiled if possible, for a CUDA graph to capture."""
        self._choose(request.params)
        if self._compiled is not None:
            with random_state_kept(self._model):
                found = self._try_compiled(signature(batch), batch, request, keep_buffers=False)
            if found is not None:
                return self._compiled
        return self._double_backward

    def why_not_compiled(self, params: Sequence[Tensor]) -> str | None:
        """Return why derivatives with respect to these parameters are not compiled, or None if they are."""
        is_on_gpu = any(param.device.type == "cuda" for param in params)
        if not params:
            return "no parameter requires a gradient"
        if self._compile is False:
            return "compile=False"
        if self._compile is None and not is_on_gpu:
            return "compile=True compiles on this device too"
        if self._compile is None and sum(each.numel() for each in params if not is_lazy(each)) < _WORTH_COMPILING:
            return f"compilation does not pay off for fewer than {_WORTH_COMPILING} parameters"
        if not set(map(id, params)) <= set(map(id, self._model.parameters())):
            return "the optimizer has parameters that are not in the model"
        if any(param.is_complex() for param in params):
            return "the model has complex parameters"
        return "Triton is not installed or does not support this GPU" if is_on_gpu and not has_triton() else None

    def _choose(self, params: Sequence[Tensor]) -> None:
        """Decide whether to compile, and decide again if the parameters have changed."""
        # By name, because FSDP2 gathers parameters into new tensors in each pass.
        names = {id(param): name for name, param in self._model.named_parameters()}
        key = [(names.get(id(each)), each.dtype, each.device, is_lazy(each) or each.shape) for each in params]
        if key == self._params:
            return
        self._forget()
        self._params = key
        why_not = self.why_not_compiled(params)
        if why_not is None:
            self._compiled = CompiledPass(self._model, self._loss_fn, params, self._product_dtype, *self._needs)
        else:
            self._do_without_compiler(why_not, warn_once if self._compile else info_once)

    def _try_compiled(self, key: Hashable, batch: Any, request: Request, keep_buffers: bool) -> Derivatives | None:
        """Run the compiled pass, or return None if it fails for this signature or disagrees with double backward."""
        assert self._compiled is not None
        if self._compares:
            warn_once("Compiling the curvature pass takes one to two minutes the first time.")
            is_rounded = self._product_dtype is not None
            try:
                words, self._compares = compare(self._compiled, batch, request, is_rounded=is_rounded)
            except UnusableError as error:
                self._do_without_compiler(str(error), warn_once)
                return None
            self.description = f"compiled forward over reverse, {words}"
            info_once(f"Curvature by {self.description}")
        try:
            return self._compiled(batch, request, keep_buffers)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # for example at the recompile limit, if a number in the loss changes
            warn_once(f"The curvature pass is not compiled for one shape of batch: {reason(error)}")
            self._seen.refuse(key)
            return None

    def _do_without_compiler(self, why: str, log: Callable[[str], None]) -> None:
        self._compiled = None
        self.description = f"double backward, not compiled: {why}"
        log(f"Curvature by {self.description}")
        if self._product_dtype is not None:
            warn_once("product_dtype has no effect, because the curvature pass is not compiled. Leave it at None.")

    def _double_backward(self, batch: Any, request: Request, keep_buffers: bool) -> Derivatives:
        settings: Any = {"substitutes": SUBSTITUTES, "check_graph": not self._is_graph_checked}
        found = double_backward(self._model, self._loss_fn, batch, request, keep_buffers=keep_buffers, **settings)
        self._is_graph_checked = True
        return found
