"""Loss scaling: the curvature pass scales its own loss, and curvature that was scaled by others is divided again.

Derivatives in float16 vanish below 6e-8, so ``GradScaler`` multiplies the loss by a large number and divides gradients
by it afterwards. The second derivatives of that loss are as much too large.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from adahessian.distributed import Ranks

if TYPE_CHECKING:
    from adahessian.curvature.ways import Found


# A scale that overflows is divided by 16, and tried again so often: float16 has not much more range than that.
_BACK_OFF = 16.0
_MOST_TRIES = 10
# After so many measurements without an overflow one of them is doubled.
_GROWTH_INTERVAL = 100


class ScaledLoss:
    r"""A loss, multiplied by a scale :math:`L` of its own, which begins with that of a scaler.

    A scaler raises its scale until gradients overflow. Second derivatives are larger, and overflow before that: some by
    :math:`L`, and some, those of activations along a probe, whatever it is. So the probe has a scale :math:`s` too,

    .. math:: z \odot H z = \frac{(s z) \odot \nabla^2 (L f) \, (s z)}{s^2 L}.

    Args:
        loss_fn: The loss, of a model and a batch.
        scaler: The scaler; None, or one that is not enabled, leaves the loss as it is.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor], scaler: GradScaler | None) -> None:
        self._loss_fn = loss_fn
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._number: float | None = None
        self._of_probe = 1.0
        self._since_overflow = 0
        self._scale: Tensor | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, scaled."""
        loss = self._loss_fn(model, batch)
        return loss if self._scale is None or not isinstance(loss, Tensor) else loss * self._scale.to(loss.device)

    def unscaled(self, measure: Callable[[float], Found], device: torch.device, ranks: Ranks | None) -> Found:
        """What a pass finds, without the scales: once more, with a smaller one, where it overflows.

        Args:
            measure: The pass, for a scale of the probe.
            device: Where it runs.
            ranks: Those that must agree on whether it is done once more.
        """
        if self._scaler is None:
            return measure(1.0)
        if self._number is None:
            self._number = self._scaler.get_scale()
        before = self._number, self._of_probe
        for _ in range(_MOST_TRIES):
            # A tensor: compiled code is not compiled anew for another number.
            self._scale = torch.full((), self._number, device=device)
            unscale = 1 / (self._number * self._of_probe**2)
            found = measure(self._of_probe)
            overflows = torch.stack([_overflows(found.gradients, device), _overflows(found.diagonal, device)])
            # The scaler reads such a number in every step: another one does no harm.
            of_gradient, of_product = (overflows if ranks is None else ranks.sum_(overflows)).tolist()
            if of_gradient:
                self._number /= _BACK_OFF
            elif of_product:
                self._of_probe /= _BACK_OFF
            else:
                self._since_overflow += 1
                break
            self._since_overflow = 0
        else:
            self._number, self._of_probe = before  # no scale is to blame, but the batch
        for values in found.diagonal:
            if values is not None:
                values *= unscale
        if self._since_overflow >= _GROWTH_INTERVAL:
            self._since_overflow = 0
            if self._of_probe < 1:
                self._of_probe *= 2
            else:
                self._number *= 2
        return found


def _overflows(tensors: Iterable[Tensor | None], device: torch.device) -> Tensor:
    """1 if one of them has a value that is not finite, else 0."""
    finite = [values.isfinite().all().to(device) for values in tensors if values is not None]
    return torch.stack(finite).all().logical_not().float() if finite else torch.zeros((), device=device)


def scale_of(scaler: GradScaler, device: torch.device) -> Tensor:
    """What a scaler multiplies losses by, without waiting for the device."""
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale


def calling_scaler() -> GradScaler | None:
    """The scaler whose ``step`` has led here, if one has.

    It divides gradients in place, which their graph does not know of, and tells the optimizer nothing. So the callers
    are looked through: a curvature that is too large by the scale would be used without a word.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, GradScaler):
            return caller
        frame = frame.f_back
    return None
