"""The library's exception, and remedies for PyTorch's error messages."""

import re

import torch

# Patterns in PyTorch's messages, and remedies. The first match wins.
_REMEDIES = {
    r"scaled_dot_product|_flash_attention|_efficient_attention": (
        "Measure with adahessian.Curvature, which selects the math kernel, or run the model under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) whenever optimizer.curvature_due is True"
    ),
    r"cudnn_rnn": (
        "Measure with adahessian.Curvature, which turns cuDNN off, or run the model under "
        "torch.backends.cudnn.flags(enabled=False) whenever optimizer.curvature_due is True"
    ),
    r"aot_autograd|torch\.compile|donated buffer": (
        "Measure with adahessian.Curvature, which runs the original code of compiled models, and use the compiled "
        "model only for the gradient"
    ),
    r"Trying to backward through the graph a second time|modified by an inplace operation": (
        "If you use adahessian.Curvature, create one per optimizer, and do not call backward in loss_fn. If not, call "
        "backward(create_graph=optimizer.curvature_due) once per step, and change neither parameters nor saved tensors "
        "before optimizer.step()"
    ),
}
_OTHERWISE = "Replace the operation with a twice differentiable one, or freeze the parameters before it"


class CurvatureError(RuntimeError):
    """The curvature could not be measured. Parameters and optimizer state are unchanged."""


def explain(error: RuntimeError) -> CurvatureError:
    """Return a CurvatureError that names the operation behind an error of PyTorch, and a remedy.

    Raise the error itself if memory ran out or it is a CurvatureError.
    """
    if isinstance(error, (torch.OutOfMemoryError, CurvatureError)):
        raise error
    remedy = next((remedy for pattern, remedy in _REMEDIES.items() if re.search(pattern, str(error))), _OTHERWISE)
    pattern = r"(?:derivative for '?(?:aten::)?|backward through )([\w.]+)'?(?: is not implemented| but no autograd)"
    named = re.search(pattern, str(error))
    subject = f"{named.group(1)} cannot be differentiated twice" if named else "the loss cannot be differentiated"
    return CurvatureError(f"{subject} (torch: {first_line(error)}). {remedy}.")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
