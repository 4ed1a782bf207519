"""What ranks must agree on: who trains the model together, and the sums of what each of them found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from adahessian.curvature.errors import CurvatureError
from adahessian.curvature.hutchinson import accumulation_dtype
from adahessian.sharding import mesh_of


class Ranks:
    """The processes that train one model together, each on data of its own.

    Args:
        groups: Their process group; for a mesh of several dimensions one for each of these.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups
        self.size = 1
        for group in groups:
            self.size *= group.size()

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place. Every rank gets the same bits."""
        for group in self._groups:
            dist.all_reduce(tensor, group=group)
        return tensor

    def sum_each(self, tensors: Sequence[Tensor | None], likes: Sequence[Tensor]) -> list[Tensor | None]:
        """The sums over ranks of the gradients of parameters, by one reduction for each device and dtype.

        Args:
            tensors: Gradients in at least float32; None counts as 0, and is the result where it is so on all ranks.
            likes: The parameters.
        """
        sums: list[Tensor | None] = list(tensors)
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, like in enumerate(likes):
            alike.setdefault((like.device, accumulation_dtype(like.dtype)), []).append(i)
        for (_, dtype), numbers in alike.items():
            given = [tensors[i] for i in numbers]
            wholes = [
                torch.zeros_like(likes[i], dtype=dtype) if tensor is None else tensor
                for i, tensor in zip(numbers, given, strict=True)
            ]
            there = torch.tensor([float(tensor is not None) for tensor in given]).to(wholes[0])
            flat = torch.cat([*(whole.reshape(-1) for whole in wholes), there])
            self.sum_(torch.view_as_real(flat) if flat.is_complex() else flat)
            *parts, there = flat.split([*(whole.numel() for whole in wholes), len(wholes)])
            # Only where something is missing here is it worth waiting for the device.
            known = there.ne(0).tolist() if any(tensor is None for tensor in given) else [True] * len(given)
            for i, part, is_known in zip(numbers, parts, known, strict=True):
                sums[i] = part.view(likes[i].shape) if is_known else None
        return sums

    def place_among(self, rows: int, weight: float, device: torch.device) -> tuple[int, float]:
        """Where this rank's rows begin when those of all ranks are put one after the other, and the sum of weights."""
        before = 0
        for group in reversed(self._groups):  # neighbours in a mesh differ in its last dimension
            of_all = [torch.zeros(2, dtype=torch.float64, device=device) for _ in range(group.size())]
            dist.all_gather(of_all, torch.tensor([rows, weight], dtype=torch.float64, device=device), group=group)
            counts, weights = torch.stack(of_all).T.tolist()
            before += int(sum(counts[: group.rank()]))
            rows, weight = int(sum(counts)), sum(weights)
        return before, weight


def refuse_flattened(model: nn.Module) -> None:
    """Refuse wrappers that make one long vector of many parameters.

    Raises:
        ValueError: If the model is wrapped so.
    """
    wrapper = f"{type(model).__module__}.{type(model).__qualname__}"
    if wrapper.startswith("deepspeed.") or wrapper.endswith(".FullyShardedDataParallel"):
        raise ValueError(
            f"{type(model).__name__} flattens parameters, whose blocks are then lost. Shard the model with FSDP2, "
            "torch.distributed.fsdp.fully_shard, instead"
        )


def ranks_of(model: nn.Module, process_group: dist.ProcessGroup | Literal["auto"] | None) -> Ranks | None:
    """The ranks that a model is trained by; None for a process on its own.

    Raises:
        ValueError: If nothing says whether the processes belong together.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    mesh = mesh_of(model)
    if process_group is None:
        if mesh is not None and mesh.size() > 1:
            raise ValueError("process_group=None is for a model of this process alone, but it is spread over ranks")
        return None
    if process_group != "auto":
        return _several([process_group])
    # It may be inside: of what torch.compile returns, or of a model of several parts.
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return _several([module.process_group])
    if mesh is not None:
        return _several([mesh.get_group(dim) for dim in range(mesh.ndim)])
    if dist.get_world_size() > 1:
        raise ValueError(
            "this is one of several processes, but the model is neither wrapped by DistributedDataParallel nor sharded "
            "by fully_shard. Hand over the wrapped model, not its .module (on CPUs accelerate wraps it only if told "
            "cpu=True, transformers if told use_cpu=True); or say "
            "process_group=torch.distributed.group.WORLD if the gradients of these processes are averaged, "
            "process_group=None if each trains a model of its own"
        )
    return None


def refuse_several_processes() -> None:
    """Refuse a measurement from gradients that carry their graph, which is that of this process alone.

    Raises:
        CurvatureError: If this is one of several processes.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise CurvatureError(
            "this is one of several processes, and backward(create_graph=True) knows the curvature of its own batch "
            "alone: ranks would drift apart. Remedy: an ordinary loss.backward(), and curvature.measure(batch) before "
            "it, with curvature = adahessian.Curvature(model, loss_fn, optimizer)"
        )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself: a pass that is none of the gradient's must not meet the hooks of its wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def past_wrappers(model: nn.Module) -> Iterator[None]:
    """Go past wrappers inside of a model too."""
    if not any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        yield
        return

    def forward(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        return wrapper.module(*args, **kwargs)

    with patch.object(DistributedDataParallel, "forward", forward):
        yield


def _several(groups: Sequence[dist.ProcessGroup]) -> Ranks | None:
    ranks = Ranks(groups)
    return ranks if ranks.size > 1 else None
