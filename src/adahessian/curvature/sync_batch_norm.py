"""Batch norm over the batches of all ranks, in operations that torch can differentiate twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from adahessian.curvature.replaced import replaced_by_name
from adahessian.curvature.written_out import applied

_original = nn.SyncBatchNorm.forward


class _SumOverRanks(torch.autograd.Function):
    """A sum over ranks, whose gradient is the sum over ranks of the gradients: the objective is that of all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum_over_ranks(gradients[0], ctx.group), None


def _sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total: Tensor = applied(_SumOverRanks, tensor, group)
    return total


def communicates(model: nn.Module) -> bool:
    """Whether a pass through a model asks other ranks for their statistics."""
    return any(isinstance(module, nn.SyncBatchNorm) and _asks(module) for module in model.modules())


@contextmanager
def differentiable_sync_batch_norm() -> Iterator[None]:
    """Inside, ``SyncBatchNorm`` is computed by :func:`sync_batch_norm`. Torch's own has no second derivative."""
    with replaced_by_name([(nn.SyncBatchNorm, "forward", _forward)]):
        yield


def sync_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
) -> Tensor:
    r"""Batch norm with the statistics of all ranks.

    .. math::
        \mu = \frac{1}{N} \sum_r \sum_i x_{ri}, \quad \sigma^2 = \frac{1}{N} \sum_r \sum_i (x_{ri} - \mu)^2, \quad
        y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \odot w + b

    Running statistics are left alone: the curvature pass would not keep them.

    Args:
        x: Activations of shape (batch, channels, ...).
        weight: w, one value a channel, or None.
        bias: b, one value a channel, or None.
        eps: Added to the variance.
        group: The ranks.
    """
    channels = (1, -1, *(1,) * (x.dim() - 2))
    over = [dim for dim in range(x.dim()) if dim != 1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = x.new_tensor([x.numel() // x.shape[1]], dtype=wide.dtype)
    sums = _sum_over_ranks(torch.cat([wide.sum(over), count]), group)
    count = sums[-1].detach()
    centred = wide - (sums[:-1] / count).view(channels)
    variance = _sum_over_ranks(centred.square().sum(over), group) / count
    y = centred * (variance + eps).rsqrt().view(channels)
    if weight is not None:
        y = y * weight.view(channels)
    if bias is not None:
        y = y + bias.view(channels)
    return y.to(x.dtype)


def _forward(module: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    if not _asks(module):
        return _original(module, x)
    return sync_batch_norm(x, module.weight, module.bias, module.eps, _group(module))


def _asks(module: nn.SyncBatchNorm) -> bool:
    together = dist.is_available() and dist.is_initialized()
    return module.training and together and dist.get_world_size(_group(module)) > 1


def _group(module: nn.SyncBatchNorm) -> dist.ProcessGroup:
    return module.process_group or dist.distributed_c10d._get_default_group()
