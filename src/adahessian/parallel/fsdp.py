"""FSDP2: gather the whole model on every rank for the duration of a pass."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from adahessian.base.batches import map_tensors
from adahessian.base.shards import gather_on_mesh, is_sharded, mesh_of
from adahessian.hessian.double_backward import Derivatives, Request


@contextmanager
def gathered(model: nn.Module, request: Request) -> Iterator[Request]:
    """Replace the sharded parameters of a model with whole, ordinary ones, and disable the hooks of FSDP2.

    Yield the request with the whole parameters. All ranks must enter together, because each sends its shards. With
    ``CPUOffloadPolicy``, shards are on the CPU. Whole parameters and probes are on the device that the model uses.
    """
    reshard(model)
    if mesh_of(model) is None:
        yield request
        return
    wholes: dict[Tensor, Tensor] = {}
    with hooks_replaced(model), ExitStack() as stack:
        for module in model.modules():
            for name, param in list(module._parameters.items()):
                if param is not None and is_sharded(param):
                    if param not in wholes:  # a shared parameter is gathered only once
                        wholes[param] = nn.Parameter(gather_on_mesh(param), param.requires_grad)
                    stack.callback(module._parameters.__setitem__, name, param)
                    module._parameters[name] = wholes[param]  # type: ignore[assignment]
        params = [wholes.get(param, param) for param in request.params]

        def draw(probe: int, out: Any = None) -> list[Tensor]:
            return [z.to(param.device) for z, param in zip(request.draw(probe, out), params, strict=True)]

        yield request._replace(params=params, draw=draw)


def reshard(model: nn.Module) -> None:
    """Free whole parameters that FSDP2 keeps after a forward pass without a backward pass."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


@contextmanager
def hooks_replaced(
    model: nn.Module,
    enter: Callable[..., Any] = lambda module, *inputs: inputs,
    leave: Callable[..., None] | None = None,
) -> Iterator[None]:
    """Replace FSDP2's hooks with ``enter(module, args, kwargs)`` and ``leave(module, args, output)``.

    ``enter`` returns the module's arguments.
    """

    def pre_hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # FSDP2's mixed precision casts inputs in a pre-hook. Here, inputs must match the parameters' own dtype.
        return _cast_inputs(module, *enter(module, args, kwargs))

    with ExitStack() as stack:
        for module in model.modules():
            pre_hooks, hooks = module._forward_pre_hooks, module._forward_hooks
            stack.callback(module.__dict__.update, _forward_pre_hooks=pre_hooks, _forward_hooks=hooks)
            module._forward_pre_hooks = type(pre_hooks)(
                (key, pre_hook if _is_of_fsdp(hook) else hook) for key, hook in pre_hooks.items()
            )
            replaced = ((key, leave if _is_of_fsdp(hook) else hook) for key, hook in hooks.items())
            module._forward_hooks = type(hooks)((key, hook) for key, hook in replaced if hook is not None)
        yield


def placed_like(derivatives: Derivatives, request: Request) -> Derivatives:
    """Move derivatives of whole parameters to the devices of the request's own parameters."""

    def moved(tensors: Any) -> Any:
        pairs = zip(tensors, request.params, strict=True)
        return [None if tensor is None else tensor.to(param.device) for tensor, param in pairs]

    loss, gradients, probes, products = derivatives
    return Derivatives(loss, moved(gradients), list(map(moved, probes)), list(map(moved, products)))


def _cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    dtype = next((param.dtype for param in module.parameters()), None)
    policy = module._get_fsdp_state()._mp_policy  # type: ignore[operator]
    if dtype is None or policy.param_dtype is None or not policy.cast_forward_inputs:
        return args, kwargs
    cast: tuple[Any, Any] = map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))
    return cast


def _is_of_fsdp(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")
