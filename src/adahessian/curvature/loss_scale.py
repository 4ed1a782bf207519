"""Loss scaling: the curvature pass scales its own loss, and curvature that was scaled by others is divided again.

Derivatives in float16 vanish below 6e-8, so ``GradScaler`` multiplies the loss by a large number and divides gradients
by it afterwards. The second derivatives of that loss are as much too large.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from adahessian.distributed import Ranks
from adahessian.messages import say_once

if TYPE_CHECKING:
    from adahessian.curvature.ways import Found


# A scale at which something overflows is divided by 16, so often at most.
_BACK_OFF = 16.0
_MOST_TRIES = 16
# Probes of a smaller scale than this lose digits in float16, and below 2^-24 vanish.
_SMALLEST_PROBE = 2.0**-12
# After so many measurements without an overflow one of the two scales is doubled.
_GROWTH_INTERVAL = 100


class ScaledLoss:
    r"""A loss, multiplied by a scale :math:`L` of its own, which begins with that of a scaler.

    A scaler raises its scale until gradients overflow. Second derivatives are larger, and overflow before that: some by
    :math:`L`, and some, those of activations along a probe, whatever it is. So the probe has a scale :math:`s` too,

    .. math:: z \odot H z = \frac{(s z) \odot \nabla^2 (L f) \, (s z)}{s^2 L}.

    Args:
        loss_fn: The loss, of a model and a batch.
        scaler: The scaler; None, or one that is not enabled, leaves the loss as it is.
        scales_probes: Whether probes may be scaled. A difference of gradients would lose its digits.
    """

    def __init__(
        self, loss_fn: Callable[[Any, Any], Tensor], scaler: GradScaler | None, *, scales_probes: bool = True
    ) -> None:
        self.is_scaled = scaler is not None and scaler.is_enabled()
        self.of_probe = 1.0
        self._loss_fn = loss_fn
        self._scaler = scaler
        self._smallest_probe = _SMALLEST_PROBE if scales_probes else 1.0
        self._of_loss: float | None = None
        self._since_overflow = 0
        self._nothing_helps = False
        self._scale: Tensor | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss, scaled."""
        loss = self._loss_fn(model, batch)
        return loss if self._scale is None or not isinstance(loss, Tensor) else loss * self._scale.to(loss.device)

    def unscaled(
        self, measure: Callable[[], Found], device: torch.device, ranks: Ranks | None, *, counts: bool = True
    ) -> Found:
        """What a pass finds, without the scales: once more, with a smaller one, where it overflows.

        Where no scale makes everything finite, it is what the pass with the most finite products found.

        Args:
            measure: The pass, on this loss and with probes multiplied by :attr:`of_probe`.
            device: Where it runs.
            ranks: Those that must agree on whether it is done once more.
            counts: Whether what this rank finds is of any account.
        """
        if self._scaler is None or not self.is_scaled:
            return measure()
        if self._of_loss is None:
            self._of_loss = self._scaler.get_scale()
        best: _Attempt | None = None
        tries = 1 if self._nothing_helps else _MOST_TRIES
        for number in range(1, tries + 1):
            # A tensor: compiled code is not compiled anew for another number.
            self._scale = torch.full((), self._of_loss, device=device)
            found = measure()
            failures = counts * torch.stack(
                [_not_finite(each, device) for each in ([found.loss], found.gradients, found.diagonal)]
            )
            # The scaler reads such numbers in every step: others do no harm.
            of_loss, of_gradients, of_products = (failures if ranks is None else ranks.sum_(failures)).tolist()
            if best is None or of_products < best.failures:
                best = _Attempt(of_products, found, self._of_loss, self.of_probe)
            if not of_gradients and not of_products:
                self._nothing_helps = False
                self._since_overflow += 1
                break
            if of_loss:
                break  # no scale is to blame, but the batch
            self._since_overflow = 0
            if number < tries:
                self._shrink(of_gradients=of_gradients > 0)
        else:
            self._nothing_helps = True
            say_once("some second derivatives are finite in float16 at none of the scales that were tried: left out")
        assert best is not None
        if self._nothing_helps:
            self._of_loss, self.of_probe = best.of_loss, best.of_probe
        for values in best.found.diagonal:
            if values is not None:
                values /= best.of_loss * best.of_probe**2
        if self._since_overflow >= _GROWTH_INTERVAL:
            self._since_overflow = 0
            if self.of_probe < 1:
                self.of_probe *= 2
            else:
                self._of_loss *= 2
        return best.found

    def _shrink(self, *, of_gradients: bool) -> None:
        """Make the scale smaller that is to blame: gradients know nothing of probes."""
        assert self._of_loss is not None
        if of_gradients or self.of_probe <= self._smallest_probe:
            self._of_loss /= _BACK_OFF
        else:
            self.of_probe /= _BACK_OFF


class _Attempt(NamedTuple):
    """What a pass found, how many products of which were not finite, and at which scales."""

    failures: float
    found: Found
    of_loss: float
    of_probe: float


def _not_finite(tensors: Iterable[Tensor | None], device: torch.device) -> Tensor:
    """How many of them have a value that is not finite."""
    finite = [values.isfinite().all().to(device) for values in tensors if values is not None]
    return torch.stack(finite).logical_not().sum().float() if finite else torch.zeros((), device=device)


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
