"""Parameters that are spread over ranks, as FSDP2 does it: the shard that is here, and the whole.

Only rows (the first dimension) may be spread: no block is then cut, since blocks lie within a row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from adahessian.averaging import Estimate
from adahessian.curvature.batches import map_tensors
from adahessian.curvature.errors import CurvatureError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is spread over ranks."""
    # Whoever has such a tensor has loaded its module; loading it for this alone would take a second.
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What a tensor has on this rank; an ordinary one has all of itself. Gradients are not followed."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    with torch.no_grad():
        part: Tensor = sharded.to_local()
    return part


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, by asking the other ranks for their shards: they must ask too."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor.detach()
    gathered: Tensor = sharded.full_tensor()
    return gathered


def local_part(whole: Tensor, param: Tensor) -> Tensor:
    """The part of a tensor that belongs to the shard of a parameter that is on this rank."""
    if is_sharded(whole) or not is_sharded(param):
        return local(whole)
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = param
    return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None).to_local()


def sharded_like(param: Tensor, part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape that is spread as a parameter is, from the part on this rank."""
    from torch.distributed.tensor import DTensor

    sharded: Any = param
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, sharded.device_mesh, sharded.placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def agreed(measurement: dict[Tensor, Estimate]) -> dict[Tensor, Estimate]:
    """Let ranks agree on what is not finite: each sees its own shards only, and all drop a measurement or none does."""
    sharded: list[Any] = [param for param in measurement if is_sharded(param)]
    if not sharded:
        return measurement
    flags = torch.stack([measurement[param].not_finite for param in sharded]).to(torch.int32)
    mesh = sharded[0].device_mesh
    for dim in range(mesh.ndim):
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return measurement | {
        param: Estimate(measurement[param].values, flag.to(measurement[param].not_finite.dtype))
        for param, flag in zip(sharded, flags.unbind(), strict=True)
    }


def over_ranks(param: Tensor, found: Tensor) -> Tensor:
    """The sum of what ranks have found about a parameter that is spread over them; copies of it count alike."""
    if is_sharded(param):
        sharded: Any = param
        for dim in range(sharded.device_mesh.ndim):
            dist.all_reduce(found, group=sharded.device_mesh.get_group(dim))
    return found


def refuse_cut_blocks(param: Tensor) -> None:
    """Refuse parameters that are spread along another dimension than the first.

    Raises:
        ValueError: If this is one.
    """
    if is_sharded(param):
        if param.is_complex():
            raise ValueError(f"AdaHessian takes no complex parameters that are spread over ranks: {tuple(param.shape)}")
        sharded: Any = param
        shards = [placement for placement in sharded.placements if not placement.is_replicate()]
        if len(shards) > 1 or any(getattr(placement, "dim", None) != 0 for placement in shards):
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is spread over ranks as {sharded.placements}, which cuts "
                "its blocks. AdaHessian takes parameters that are sharded once, along their first dimension, as "
                "fully_shard does by default"
            )


def refuse_waiting_gradients(model: nn.Module) -> None:
    """Refuse a backward pass through FSDP2 while it keeps gradients back, for these would be mixed with its own.

    Raises:
        CurvatureError: If it does.
    """
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)])
        for group in filter(None, groups):
            waiting = any(param.unsharded_accumulated_grad is not None for param in group.fsdp_params)
            waiting = waiting or getattr(group, "_partial_reduce_output", None) is not None
            if waiting or not group.reduce_grads or not group.all_reduce_grads:
                raise CurvatureError(
                    "FSDP2 keeps gradients back, by set_requires_gradient_sync(False) or "
                    "set_requires_all_reduce(False), and would mix them with those of the curvature pass: measure "
                    "before that is called and before the first micro-batch"
                )
            if getattr(group, "gradient_divide_factor", None) is not None:
                raise CurvatureError(
                    "FSDP2 divides gradients by a factor of yours, so that their mean over ranks is not known. Remedy: "
                    "leave set_gradient_divide_factor alone, and multiply the loss instead"
                )


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The ranks that a model's parameters are spread over, if they are."""
    return next((param.device_mesh for param in model.parameters() if is_sharded(param)), None)  # type: ignore[attr-defined]


def reshard(model: nn.Module) -> None:
    """Have FSDP2 let go of what it gathered for a forward pass that no backward has followed, as in an evaluation."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            module.reshard()


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[dict[Tensor, Tensor]]:
    """Give every rank all of the model, as ordinary parameters and without the hooks of FSDP2.

    All ranks must enter together: each sends its shards to the others.

    Yields:
        The whole of each parameter that is spread over ranks.
    """
    wholes: dict[Tensor, Tensor] = {}
    reshard(model)
    if mesh_of(model) is None:
        yield wholes
        return
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(_without_sharding_hooks(module))
            for name, param in list(module._parameters.items()):
                if param is not None and is_sharded(param):
                    if param not in wholes:  # one that modules share is sent once
                        wholes[param] = nn.Parameter(whole(param), param.requires_grad)
                    stack.callback(module._parameters.__setitem__, name, param)
                    module._parameters[name] = wholes[param]  # type: ignore[assignment]
        yield wholes


@contextmanager
def _without_sharding_hooks(module: nn.Module) -> Iterator[None]:
    names = ("_forward_pre_hooks", "_forward_hooks")
    before = {name: getattr(module, name) for name in names}
    try:
        for name, hooks in before.items():
            own = {key: hook for key, hook in hooks.items() if not _is_of_fsdp(hook)}
            if name == "_forward_pre_hooks":
                # As FSDP2 does under its policy of mixed precision; the parameters have their own dtype here.
                own |= {key: _cast_inputs for key, hook in hooks.items() if _is_of_fsdp(hook)}
            setattr(module, name, type(hooks)(own))
        yield
    finally:
        for name, hooks in before.items():
            setattr(module, name, hooks)


def _cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    dtype = next((param.dtype for param in module.parameters()), None)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    if dtype is None or state._mp_policy.param_dtype is None or not state._mp_policy.cast_forward_inputs:
        return args, kwargs
    return map_tensors(cast, args), map_tensors(cast, kwargs)


def _is_of_fsdp(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")
