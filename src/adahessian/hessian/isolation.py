"""A pass through a model that leaves no trace and can be differentiated twice."""

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from adahessian.base.shards import computing_device

# The ``forward`` of a layer class, or a function of a layer and its inputs that replaces it.
Forward = Callable[..., Any]

# The pass is local to this rank, so DDP must not reduce gradients, and SyncBatchNorm must not wait for other ranks.
_LOCAL: dict[Forward, Forward] = {
    DistributedDataParallel.forward: lambda wrapper, *args, **kwargs: wrapper.module(*args, **kwargs),
    nn.SyncBatchNorm.forward: _BatchNorm.forward,
}


@contextmanager
def isolated(
    model: nn.Module,
    substitutes: Mapping[Forward, Forward],
    params: Iterable[Tensor] = (),
    *,
    keep_buffers: bool = False,
    compiled: bool = False,
) -> Iterator[None]:
    """Run a model on kernels that can be differentiated twice, and restore its state.

    Gradients, buffers and training modes are restored. ``keep_buffers`` keeps the changes to buffers, unless the pass
    fails. Hooks on the model's parameters and on ``params`` do not run. A compiled pass changes none of these.
    :func:`twice_differentiable` explains the kernels.
    """
    modules = list(model.modules())
    with ExitStack() as stack:
        stack.enter_context(twice_differentiable(model, {**_LOCAL, **substitutes}, compiled=compiled))
        if not compiled:
            stack.enter_context(hooks_silenced([*model.parameters(), *params]))
            for param in model.parameters():
                stack.callback(setattr, param, "grad", param.grad)
                param.grad = None
            for module in modules:
                stack.callback(setattr, module, "training", module.training)
            buffers = buffers_restored(model, on_success=False) if keep_buffers else _buffers_exchanged(modules)
            stack.enter_context(buffers)
        yield


@contextmanager
def twice_differentiable(
    model: nn.Module, substitutes: Mapping[Forward, Forward], *, compiled: bool = False
) -> Iterator[None]:
    """Run a model on kernels that can be differentiated twice.

    Attention uses the math kernel, recurrent layers run without cuDNN and oneDNN, and ``substitutes`` replace the
    ``forward`` of layers. Code compiled by ``torch.compile`` runs eagerly, unless ``compiled`` is True.
    """
    modules = list(model.modules())
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.RNNBase) for module in modules):
            # torch.backends.cudnn.flags sets other flags too, and fails if precisions were set through fp32_precision.
            for library in ("cudnn", "mkldnn"):
                set_enabled = getattr(torch._C, f"_set_{library}_enabled")
                stack.callback(set_enabled, getattr(torch._C, f"_get_{library}_enabled")())
                set_enabled(False)
        for module in modules:
            # By ``forward``, because FSDP2 and parametrizations change the class. Subclasses keep their ``forward``.
            substitute = substitutes.get(getattr(type(module), "forward", print))
            if substitute is not None and "forward" not in module.__dict__:
                stack.callback(module.__dict__.pop, "forward", None)
                # A bound method, because any other callable would be new in each pass and trigger recompilation.
                module.__dict__["forward"] = MethodType(substitute, module)
        # If the compiler is not loaded, nothing is compiled. Importing it takes seconds.
        if not compiled and "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _buffers_exchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run on copies of buffers, because a pending autograd graph may have saved the originals."""
    buffers = [(module, dict(module._buffers)) for module in modules if module._buffers]
    # One copy per tensor, because modules may share it.
    copies: dict[Tensor | None, Tensor | None] = {None: None}
    copies.update((each, each.detach().clone()) for _, own in buffers for each in own.values() if each is not None)
    try:
        for module, own in buffers:
            module._buffers.update({name: copies[buffer] for name, buffer in own.items()})
        yield
    finally:
        for module, own in buffers:
            for name, before in own.items():
                after = module._buffers.get(name)
                # A buffer with a new shape is a cache that has grown, such as a position table. The module needs it.
                if after is None or (before is not None and before.shape == after.shape):
                    module._buffers[name] = before


@contextmanager
def buffers_restored(model: nn.Module, *, on_success: bool = True) -> Iterator[None]:
    """Restore buffers in place, because compiled code and CUDA graphs know their addresses."""
    with ExitStack() as stack:
        for buffer in model.buffers():
            stack.callback(torch.no_grad()(buffer.copy_), buffer.detach().clone())
        for module in model.modules():
            stack.callback(module._buffers.update, dict(module._buffers))
        yield
        if not on_success:
            stack.pop_all()


@contextmanager
def hooks_silenced(params: Iterable[Tensor]) -> Iterator[None]:
    """Disable the user's hooks on gradients, which must not run on other tensors."""
    with ExitStack() as stack:
        for param, kind in itertools.product(params, ("_backward_hooks", "_post_accumulate_grad_hooks")):
            if hooks := getattr(param, kind, None):
                stack.callback(setattr, param, kind, hooks)
                setattr(param, kind, None)
        yield


@contextmanager
def random_state_kept(model: nn.Module) -> Iterator[None]:
    """Restore the random states of PyTorch (on the CPU and the model's devices), of Python, and of NumPy if loaded."""
    accelerators = [device for device in devices_of(model) if device.type not in ("cpu", "meta")]
    kind = accelerators[0].type if accelerators else "cuda"
    indices = [device.index or 0 for device in accelerators if device.type == kind]
    with torch.random.fork_rng(devices=indices, device_type=kind), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if numpy_random := sys.modules.get("numpy.random"):
            stack.callback(numpy_random.set_state, numpy_random.get_state())
        yield


def devices_of(model: nn.Module) -> set[torch.device]:
    """Return the devices on which a model uses its parameters and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    return {computing_device(each) if hasattr(each, "device_mesh") else each.device for each in tensors}
