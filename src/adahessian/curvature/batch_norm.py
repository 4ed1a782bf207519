"""Batch norm in operations whose second derivative asks for few sums over the batch.

The derivatives of torch's own batch norm, differentiated once more, take a dozen sums over the batch a layer, one after
the other. On small images these decide what a compiled curvature pass costs. Written as below there are two in the
forward pass and one in the backward pass, each together with that of its tangent.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

TORCHS_OWN = functional.batch_norm


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.batch_norm``, in training by :func:`by_batch`."""
    if not (training and fits(input, running_mean, running_var, weight, bias)):
        # What it refuses, it refuses in its own words.
        return TORCHS_OWN(input, running_mean, running_var, weight, bias, training, momentum, eps)
    output, mean, variance = by_batch(input, weight, bias, eps)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            # Of the batch the variance is the mean square, of what runs along the estimate from a sample.
            values = input.numel() // input.shape[1]
            running_var.lerp_((variance * (values / (values - 1))).to(running_var.dtype), momentum)
    return output


def fits(input: Tensor, *of_channels: Tensor | None) -> bool:
    """Whether a batch has several values a channel, and what belongs to channels is one value for each."""
    channels = input.shape[1] if input.dim() > 1 else 0
    several = channels > 0 and input.numel() > channels
    return several and all(each is None or each.shape == (channels,) for each in of_channels)


def by_batch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    r"""Batch norm with the statistics of the batch, and these: mean and variance, as constants.

    With :math:`s` the mean of the batch, as rounded, and taken for a constant, none of the following depends on it, nor
    do any derivatives. But each sum that a derivative asks for can be taken at once:

    .. math::
        d = \overline{x - s}, \quad \sigma^2 = \overline{(x - s)^2} - d^2, \quad
        a = \frac{w}{\sqrt{\sigma^2 + \epsilon}}, \quad y = a (x - s) + b - a d

    Args:
        x: Activations of shape (batch, channels, ...).
        weight: w, one value a channel, or None.
        bias: b, one value a channel, or None.
        eps: Added to the variance.
    """
    channels = (1, -1, *(1,) * (x.dim() - 2))
    over = [dim for dim in range(x.dim()) if dim != 1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centre = wide.detach().mean(over)
    centred = wide - centre.view(channels)
    off_centre = centred.mean(over)
    variance = centred.square().mean(over) - off_centre.square()
    scale = (variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    shift = -off_centre * scale
    if bias is not None:
        shift = shift + bias
    output = (centred * scale.view(channels) + shift.view(channels)).to(x.dtype)
    return output, centre + off_centre.detach(), variance.detach()
