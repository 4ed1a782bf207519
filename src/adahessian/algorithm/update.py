"""Algorithm 1 of the paper on tensors: fold a measurement into the Hessian momentum, then take a step.

The paper's symbols and the names used here:

    g_t      grads     m_t      exp_avgs (before bias correction, as in torch.optim.Adam)
    D_s      values    D-bar_t  stored (after bias correction, one value per block)
    theta_t  params

The state stores ``D-bar`` instead of the running sum of squares. An ordinary step then needs no square root and no
second bias correction. The Triton version of both functions is in :mod:`adahessian.algorithm.fused`.
"""

import math

import torch
from torch import Tensor


def measurement_weight(measurements: Tensor, beta2: float) -> Tensor:
    r"""Return the weight :math:`w` of the n-th measurement in the bias-corrected Hessian momentum.

    .. math::
        \bar D_n = \sqrt{\frac{(1 - \beta_2) \sum_i \beta_2^{n-i} D_i^{(s)} D_i^{(s)}}{1 - \beta_2^n}}
        \quad\Longleftrightarrow\quad
        \bar D_n^2 = (1 - w) \bar D_{n-1}^2 + w D_n^{(s)} D_n^{(s)}, \quad
        w = \frac{1 - \beta_2}{1 - \beta_2^n}
    """
    log_beta2 = math.log(beta2) if beta2 > 0 else -math.inf
    # expm1 keeps digits of 1 - beta2 that float32 would lose. Both terms are rounded alike, so the first weight is 1.
    return torch.expm1(torch.full_like(measurements, log_beta2)) / torch.expm1(measurements * log_beta2)


def fold_measurement(stored: Tensor, values: Tensor, weight: Tensor, not_finite: Tensor) -> None:
    """Fold the values of one measurement into the Hessian momentum, in place.

    A block is infinite before its first measurement, so it takes no step. A block that took no part in the measured
    loss stays infinite if it was never measured, and counts as 0 otherwise. A measurement that is not finite is
    dropped. Masks do all of this on the device, without a sync.
    """
    # inf marks a block never measured, and -1 a block that this loss did not reach. Only both together give -inf.
    unknown = (stored * values).eq(-math.inf)
    squares = values.clamp(min=0.0).square_()
    folded = stored.nan_to_num(posinf=0.0).square_().lerp_(squares, weight).sqrt_().masked_fill_(unknown, math.inf)
    stored.copy_(torch.where(not_finite, stored, folded))


def decay_weights(params: list[Tensor], factor: float | Tensor) -> None:
    """Multiply parameters by a factor, in place."""
    if isinstance(factor, Tensor) or factor != 1:
        if params[0].device.type == "cpu":  # where torch._foreach_mul_ rounds the factor to the parameter's dtype
            for param in params:
                param.mul_(factor)
        else:
            torch._foreach_mul_(params, factor)


def take_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    denominators: list[Tensor],
    *,
    gradient_scale: float,
    step_scale: float | Tensor,
    decay: float | Tensor,
    momentum_weight: float,
) -> None:
    r"""Take one step, in place.

    .. math::
        \theta &\leftarrow (1 - \eta \lambda) \, \theta && \text{decoupled weight decay} \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) \, g && \text{gradient momentum} \\
        \theta &\leftarrow \theta - \frac{\eta}{1 - \beta_1^t} \, \frac{m}{\bar D^{\,k} + \epsilon} && \text{step}

    ``gradient_scale`` multiplies the gradients; -1 maximizes. ``step_scale`` is :math:`-\eta / (1 - \beta_1^t)`, or a
    tensor with one value per parameter. ``decay`` is :math:`1 - \eta \lambda`, ``momentum_weight`` is
    :math:`1 - \beta_1`, and the denominators :math:`\bar D^k + \epsilon` are overwritten.
    """
    decay_weights(params, decay)
    scaled = grads if gradient_scale == 1 else torch._foreach_mul(grads, gradient_scale)
    torch._foreach_lerp_(exp_avgs, scaled, momentum_weight)
    if isinstance(step_scale, Tensor):
        torch._foreach_div_(denominators, list(step_scale.unbind()))
        step_scale = 1.0
    torch._foreach_addcdiv_(params, exp_avgs, denominators, step_scale)
