"""The ranks that train one model together, and sums over them."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from adahessian.base.errors import CurvatureError
from adahessian.base.shards import mesh_of, reduce_on


class Ranks:
    """Processes of the default group, or of one group per dimension of a device mesh, that train one model.

    Collectives run on a device of type ``device_type``. None selects the device of the tensors. ``broadcasts_buffers``
    is the argument ``broadcast_buffers`` of DistributedDataParallel.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup] = (),
        device_type: str | None = None,
        *,
        broadcasts_buffers: bool = False,
    ) -> None:
        self._groups: Sequence[Any] = groups or [dist.group.WORLD]
        self._device_type = device_type
        self.broadcasts_buffers = broadcasts_buffers
        self.size = math.prod(group.size() for group in self._groups)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place. Every rank gets the same bits."""
        return reduce_on(self._device_type or tensor.device.type, tensor, dist.ReduceOp.SUM, self._groups)

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of the first rank to all ranks, in place."""

        def broadcast(flat: Tensor) -> None:
            for group in self._groups:
                dist.broadcast(flat, group=group, group_src=0)

        _at_once(tensors, broadcast)

    def average_gradients(self, gradients: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor | None]:
        """Average gradients over the ranks, in place.

        A missing gradient counts as zeros, unless the parameter has no gradient on any rank.
        """
        if not params:
            return []
        found = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, params, strict=True)]
        took_part = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.float32)
        flags = torch.empty_like(took_part, device=params[0].device).copy_(took_part, non_blocking=True)
        _at_once([*found, flags], lambda flat: self.sum_(flat.div_(self.size)))
        if took_part.all():
            return [*found]
        # Other ranks may have the missing gradients. Reading the flags synchronizes, so it happens only here.
        return [each if flag > 0 else None for each, flag in zip(found, flags.tolist(), strict=True)]

    def __reduce__(self) -> tuple[Any, ...]:
        # As in DistributedDataParallel, because a process group has no identity outside its process.
        if any(group is not dist.group.WORLD for group in self._groups):
            raise pickle.PicklingError("process_group is not the default and cannot be copied. Create a new Curvature.")
        return partial(Ranks, broadcasts_buffers=self.broadcasts_buffers), ((), self._device_type)


def ranks_of(model: nn.Module, process_group: dist.ProcessGroup | Literal["auto"] | None) -> Ranks | None:
    """Return the ranks that train a model, or None if this process trains it alone.

    Raise a ValueError if ``process_group`` contradicts the model, or neither tells which processes train together.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    mesh = mesh_of(model)
    if process_group is None:
        if mesh is not None and mesh.size() > 1:
            raise ValueError("process_group=None is invalid for a sharded model. Pass process_group='auto'.")
        return None
    # The wrapper may be inside the model, as after torch.compile or in a model of several parts.
    wrapper = next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)
    if process_group != "auto":
        groups = [process_group]
    elif wrapper is not None:
        groups = [wrapper.process_group]
    elif mesh is not None:
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    else:
        raise ValueError(
            "process_group='auto' finds no DistributedDataParallel or fully_shard in the model, but there are several "
            "processes. Pass the wrapped model, not its .module (on CPUs, accelerate wraps it only with cpu=True, "
            "transformers only with use_cpu=True), process_group=torch.distributed.group.WORLD if the gradients of all "
            "processes are averaged, or process_group=None if each process trains a model of its own."
        )
    device_type = None if mesh is None else mesh.device_type
    ranks = Ranks(groups, device_type, broadcasts_buffers=wrapper is not None and wrapper.broadcast_buffers)
    return ranks if ranks.size > 1 else None


def is_flattened(model: nn.Module) -> bool:
    """Return whether the model's wrapper flattens its parameters into one vector."""
    wrapper = f"{type(model).__module__}.{type(model).__qualname__}"
    return wrapper.startswith("deepspeed.") or wrapper.endswith(".FullyShardedDataParallel")


def check_not_flattened(model: nn.Module) -> None:
    """Raise a ValueError if the model's wrapper flattens its parameters into one vector."""
    if is_flattened(model):
        raise ValueError(
            f"model is a {type(model).__name__}, which flattens parameters, so their blocks are lost. Shard the model "
            "with FSDP2 (torch.distributed.fsdp.fully_shard) instead."
        )


def check_single_process() -> None:
    """Raise a CurvatureError if there are several processes, because a graph covers only the local batch."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise CurvatureError(
            "backward(create_graph=True) measures the curvature of the local batch only, so the ranks would drift "
            "apart. Create curvature = adahessian.Curvature(model, loss_fn, optimizer), and call "
            "curvature.measure(batch) and an ordinary loss.backward() before optimizer.step()."
        )


@torch.no_grad()
def _at_once(tensors: Iterable[Tensor], collective: Callable[[Tensor], object]) -> None:
    """Apply a collective operation to tensors in place, with one call per device and dtype."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for own in alike.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in own])
        collective(flat)
        parts = flat.split([tensor.numel() for tensor in own])
        torch._foreach_copy_(own, [part.view(tensor.shape) for part, tensor in zip(parts, own, strict=True)])
