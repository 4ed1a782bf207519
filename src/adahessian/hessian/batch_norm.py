"""Batch norm whose second derivative needs few sums over the batch, for the compiled pass.

The second derivative of PyTorch's own batch norm needs a dozen sums over the batch per layer, one after another. They
dominate the pass if images are small. Here, the forward pass needs two sums and the backward pass one, each together
with the sum of its tangent.
"""

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norm_forward(module: _BatchNorm, x: Tensor) -> Tensor:
    """Compute ``module.forward(x)``, with :func:`normalize` in training."""
    channels = x.shape[1] if x.dim() > 1 else 0
    per_channel = (module.weight, module.bias, module.running_mean, module.running_var)
    fits = 0 < channels < x.numel() and all(each is None or each.shape == (channels,) for each in per_channel)
    if not (fits and module.training and module.momentum is not None):
        return _BatchNorm.forward(module, x)
    module._check_input_dim(x)
    output, mean, variance = normalize(x, module.weight, module.bias, module.eps)
    if module.track_running_stats:
        with torch.no_grad():
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.add_(1)
            if module.running_mean is not None:
                module.running_mean.lerp_(mean.to(module.running_mean.dtype), module.momentum)
            if module.running_var is not None:
                values = x.numel() // channels
                unbiased = variance * (values / (values - 1))
                module.running_var.lerp_(unbiased.to(module.running_var.dtype), module.momentum)
    return output


def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    r"""Normalize by the statistics of the batch, and return these statistics without a graph.

    The shift :math:`s` is the rounded mean of the batch, as a constant. Neither results nor derivatives depend on it,
    but it allows all sums of one derivative to be computed at once:

    .. math::
        d = \overline{x - s}, \quad \sigma^2 = \overline{(x - s)^2} - d^2, \quad
        a = \frac{w}{\sqrt{\sigma^2 + \epsilon}}, \quad y = a (x - s) + b - a d
    """
    channels = (1, -1, *(1,) * (x.dim() - 2))
    over = [dim for dim in range(x.dim()) if dim != 1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centre = wide.detach().mean(over)
    centred = wide - centre.view(channels)
    off_centre = centred.mean(over)
    variance = centred.square().mean(over) - off_centre.square()
    scale = (variance + eps).rsqrt() * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - off_centre * scale
    output = (centred * scale.view(channels) + shift.view(channels)).to(x.dtype)
    return output, centre + off_centre.detach(), variance.detach()
