"""Loss scaling for float16, in the curvature pass and in the classic loop.

``GradScaler`` scales the loss up, because derivatives below 6e-8 vanish in float16. It scales gradients back, but not
second derivatives, which stay too large by the same factor. Second derivatives also overflow at smaller scales.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from adahessian.base.log import warn_once
from adahessian.hessian.double_backward import Derivatives
from adahessian.parallel.ranks import Ranks

_MOST_TRIES, _BACK_OFF = 5, 16.0
_GROWTH_INTERVAL = 100  # measurements without an overflow before the scale is doubled


class LossScale:
    """A loss multiplied by a scale, which starts at the scale of an enabled ``GradScaler``."""

    def __init__(self, loss_fn: Callable[..., Tensor], scaler: GradScaler) -> None:
        self._loss_fn, self._scaler = loss_fn, scaler
        self._scale: float | None = None
        self._factor = torch.ones(())  # the scale as a tensor, because compiled code treats numbers as constants
        self._clean_measurements = 0
        self._is_hopeless = False

    def __call__(self, *args: Any) -> Tensor:
        """Compute the scaled loss."""
        loss = self._loss_fn(*args)
        return loss * self._factor.to(loss.device) if isinstance(loss, Tensor) else loss

    def unscaled(
        self, measure: Callable[[], Derivatives], params: Sequence[Tensor], ranks: Ranks | None, *, counts: bool = True
    ) -> Derivatives:
        """Measure, retry at smaller scales if derivatives overflow, and divide the loss and the products by the scale.

        If products overflow at every scale, return the attempt with the fewest overflows, which the optimizer drops.
        All ranks retry together. ``counts`` says whether the result of this rank is used.
        """
        device = params[0].device if params else torch.device("cpu")
        scale = self._scaler.get_scale() if self._scale is None else self._scale
        fewest = math.inf
        for _ in range(1 if self._is_hopeless else _MOST_TRIES):
            self._factor = torch.full((), scale, device=device)
            found = measure()
            checked = [found.loss], found.gradients, itertools.chain(*found.products)
            failures = torch.stack([_not_finite(tensors, device) for tensors in checked]) * counts
            of_loss, of_gradients, of_products = (failures if ranks is None else ranks.sum_(failures)).tolist()
            if of_products < fewest:
                fewest, best_scale, best = of_products, scale, found
            if of_loss:  # caused by the batch, not by the scale
                break
            if not of_gradients and not of_products:
                self._is_hopeless = False
                self._clean_measurements += 1
                if self._clean_measurements % _GROWTH_INTERVAL == 0:
                    scale *= 2
                break
            self._clean_measurements = 0
            scale /= _BACK_OFF
        else:
            self._is_hopeless = True
            warn_once("Some second derivatives overflow in float16 at every scale tried and are dropped. Try bfloat16.")
        self._scale = best_scale if self._is_hopeless else scale
        products = [[None if each is None else each / best_scale for each in of_probe] for of_probe in best.products]
        return best._replace(loss=best.loss / best_scale, products=products)


def _not_finite(tensors: Iterable[Tensor | None], device: torch.device) -> Tensor:
    finite = [values.isfinite().all().to(device) for values in tensors if values is not None]
    return torch.stack(finite).logical_not().sum().float() if finite else torch.zeros((), device=device)


def calling_scaler() -> GradScaler | None:
    """Return the scaler whose ``step`` is running, from the call stack, because it passes nothing to the optimizer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), GradScaler):
        frame = frame.f_back
    return frame and frame.f_locals["self"]
