"""Loss scaling: the curvature pass scales its own loss, and curvature that was scaled by others is divided again.

Derivatives in float16 vanish below 6e-8, so ``GradScaler`` multiplies the loss by a large number and divides gradients
by it afterwards. The second derivatives of that loss are as much too large.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler


class ScaledLoss:
    """A loss, multiplied by what a scaler multiplies losses by.

    Args:
        loss_fn: The loss, of a model and a batch.
        scaler: The scaler; None leaves the loss as it is.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor], scaler: GradScaler | None) -> None:
        self._loss_fn = loss_fn
        self._scaler = scaler
        self._scale: Tensor | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, scaled."""
        loss = self._loss_fn(model, batch)
        return loss if self._scale is None or not isinstance(loss, Tensor) else loss * self._scale

    def renew(self, device: torch.device) -> None:
        """Ask the scaler. A tensor stays a tensor: compiled code is not compiled anew for another number."""
        if self._scaler is not None:
            self._scale = scale_of(self._scaler, device)

    def divided(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """What the derivatives would be without the scale."""
        if self._scale is None:
            return tensors
        return [tensor if tensor is None else tensor / self._scale for tensor in tensors]


def scale_of(scaler: GradScaler, device: torch.device) -> Tensor:
    """What a scaler multiplies losses by, without waiting for the device."""
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale


def calling_scaler() -> GradScaler | None:
    """The scaler whose ``step`` has led here, if one has.

    It divides gradients in place, which their graph does not know of, and tells the optimizer nothing. So the callers
    are looked through: a curvature that is too large by the scale would be used without a word.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, GradScaler):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None
