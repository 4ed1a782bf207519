"""A loss as a function of its parameters and buffers, and the derivatives of that function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

from adahessian.curvature.batches import map_tensors
from adahessian.curvature.hutchinson import accumulation_dtype

Buffers = dict[str, Tensor]
Product = Literal["forward_over_reverse", "double_backward"]


# The loss, its gradients, ``z * (H z)`` and the buffers after the pass; a plain tuple, which every compiler knows.
Derivatives = tuple[Tensor, list[Tensor], list[Tensor], Buffers]


class FunctionalLoss(nn.Module):
    """``loss_fn(model, batch)`` with the parameters as arguments.

    Args:
        model: The model.
        loss_fn: The loss, of the model and a batch.
        parameters: Parameters of the model to differentiate by.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor], parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        names = {id(param): name for name, param in self.named_parameters()}
        self.names = [names[id(param)] for param in parameters]

    def forward(self, batch: Any) -> tuple[Tensor, Buffers]:
        """The loss of the model as it is, and its buffers afterwards, which it may have replaced by others."""
        return self.loss_fn(self.model, batch), dict(self.named_buffers())

    def of(self, parameters: Sequence[Tensor], buffers: Buffers, batch: Any) -> tuple[Tensor, tuple[Tensor, Buffers]]:
        """The loss at these parameters, and as a by-product the loss again and the buffers after the pass."""
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        loss, after = functional_call(self, {**dict(zip(self.names, parameters, strict=True)), **before}, (batch,))
        return loss.squeeze(), (loss, {name: after[name] for name in buffers})

    def derivatives(
        self,
        product: Product,
        parameters: Sequence[Tensor],
        buffers: Buffers,
        probe: Sequence[Tensor],
        batch: Any,
    ) -> Derivatives:
        r"""Gradient and ``z * (H z)``, by one of two ways to the same product.

        .. math::
            \text{forward over reverse:} \quad H z &= \frac{d}{d \epsilon} \nabla f(\theta + \epsilon z) \\
            \text{double backward:} \quad H z &= \nabla (\nabla f(\theta) \cdot z)
        """

        def gradient(at: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Tensor, Buffers]]:
            gradients, by_product = grad(self.of, has_aux=True)(at, buffers, batch)
            return gradients, by_product

        def along(at: Sequence[Tensor]) -> tuple[Tensor, tuple[list[Tensor], tuple[Tensor, Buffers]]]:
            gradients, by_product = gradient(at)
            slopes = [(g * z).sum() for g, z in zip(gradients, probe, strict=True)]
            return torch.stack(slopes).sum(), (gradients, by_product)

        at, probe = list(parameters), list(probe)
        if product == "forward_over_reverse":
            found: Any = jvp(gradient, (at,), (probe,), has_aux=True)
            gradients, products, (loss, after) = found
        else:
            products, (gradients, (loss, after)) = grad(along, has_aux=True)(at)
        diagonal = [
            z.to(wide) * p.to(wide)
            for z, p, wide in ((z, p, accumulation_dtype(z.dtype)) for z, p in zip(probe, products, strict=True))
        ]
        return loss, gradients, diagonal, after


def in_channels_last(tensors: Any) -> Any:
    """Images and kernels in the order that convolutions are fastest in; everything else as it is."""
    return map_tensors(
        lambda tensor: (
            tensor.contiguous(memory_format=torch.channels_last)
            if tensor.dim() == 4 and tensor.is_floating_point()
            else tensor
        ),
        tensors,
    )
