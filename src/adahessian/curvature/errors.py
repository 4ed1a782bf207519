"""What went wrong with a measurement, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# (what torch says, the remedy); the first that is found counts.
_REMEDIES = (
    (
        r"scaled_dot_product|_flash_attention|_efficient_attention",
        "let adahessian.Curvature measure, which takes the math kernel by itself, or run the model under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) whenever optimizer.curvature_due",
    ),
    (
        r"cudnn_rnn",
        "let adahessian.Curvature measure, which does without cuDNN by itself, or run the model under "
        "torch.backends.cudnn.flags(enabled=False) whenever optimizer.curvature_due",
    ),
    (
        r"aot_autograd|torch\.compile|donated buffer",
        "let adahessian.Curvature measure, which runs compiled models as they were written, and keep the compiled one "
        "for the gradient",
    ),
    (
        r"Trying to backward through the graph a second time|modified by an inplace operation",
        "a loss_fn must return the loss without calling backward. In a loop without Curvature keep the graph until "
        "optimizer.step(): call backward(create_graph=optimizer.curvature_due) once a step, and change neither "
        "parameters nor saved tensors in between; where two optimizers share one loss, let adahessian.Curvature "
        "measure for each",
    ),
)
_OTHERWISE = "replace the operation by one that torch can differentiate twice, or freeze the parameters before it"


class CurvatureError(RuntimeError):
    """The curvature could not be measured; parameters and state are as they were."""


@contextmanager
def explained() -> Iterator[None]:
    """Name the operation that could not be differentiated, and the remedy.

    Raises:
        CurvatureError: In place of whatever error torch raises, except for want of memory.
    """
    try:
        yield
    except (torch.OutOfMemoryError, CurvatureError):
        raise
    except RuntimeError as error:
        said = str(error).strip().splitlines()[0]
        remedy = next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, str(error))), _OTHERWISE)
        named = re.search(r"derivative for '?(?:aten::)?(\w+)'? is not implemented", said)
        subject = f"{named.group(1)} cannot be differentiated twice" if named else "the loss cannot be differentiated"
        raise CurvatureError(f"no curvature: {subject} (torch: {said}). Remedy: {remedy}.") from error
