"""Algorithm 1 of the paper, on lists of tensors: the Hessian momentum, then the moments and the step.

The paper's symbols and the names used here:

    g_t     grads          m_t     exp_avgs (before its bias correction, as in torch.optim.Adam)
    D_s     estimates      D-bar_t hessian_rms (after its bias correction, one value a block)
    theta_t params         v_t     D-bar_t ** hessian_power

Keeping ``D-bar`` itself, instead of the running sum of squares under its root, leaves an ordinary step no root to take
and no second bias correction to apply.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adahessian.averaging import Blocks, Estimate


def update_hessian_rms(
    hessian_rms: Tensor,
    hessian_age: Tensor,
    dropped: Tensor,
    estimate: Estimate,
    new_age: Tensor,
    *,
    beta2: float,
) -> None:
    r"""Fold a measurement into the Hessian momentum, in place.

    .. math::
        \bar D_t = \sqrt{\frac{(1 - \beta_2) \sum_i \beta_2^{t-i} D_i^{(s)} D_i^{(s)}}{1 - \beta_2^t}}
        \quad\Longleftrightarrow\quad
        \bar D_t^2 = (1 - w) \bar D_{t-1}^2 + w D_t^{(s)} D_t^{(s)}, \quad
        w = \frac{1 - \beta_2^{a_t - a_{t-1}}}{1 - \beta_2^{a_t}}

    The age :math:`a` is how often the average has been decayed. It grows by one a measurement, or by the number of
    steps that passed: feeding the new value once for each of them would come to the same.

    Before its first measurement a block's value is infinite, so that it takes no step. A block that the measured loss
    did not touch keeps that value until a measurement touches it, and counts as 0 afterwards, as in the formula.

    A measurement that is not finite everywhere is dropped whole and counted. All of it happens on the device, by masks:
    nothing waits for the host.
    """
    new_age = new_age.to(hessian_age)
    log_beta2 = math.log(beta2) if beta2 > 0 else -math.inf
    # expm1 keeps the digits of 1 - beta2 that float32 would lose.
    weight = torch.expm1((new_age - hessian_age) * log_beta2) / torch.expm1(new_age * log_beta2)
    unmeasured = hessian_rms.isinf()
    untouched = estimate.values.lt(0)
    squared = estimate.values.square().masked_fill_(untouched, 0.0)
    accepted = estimate.not_finite.logical_not()
    previous = hessian_rms.masked_fill(unmeasured, 0.0)
    updated = (previous * previous).lerp_(squared, weight).sqrt_()
    hessian_rms.copy_(torch.where(accepted & ~(untouched & unmeasured), updated, hessian_rms))
    hessian_age.copy_(torch.where(accepted, new_age, hessian_age))
    dropped.add_(estimate.not_finite)


def update_parameters(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    hessian_rms: list[Tensor],
    steps: list[Tensor],
    blocks: list[Blocks],
    *,
    lr: float | Tensor,
    beta1: float,
    eps: float,
    weight_decay: float,
    hessian_power: float,
    maximize: bool,
    capturable: bool,
    foreach: bool,
) -> None:
    r"""Take one step, in place. ``steps`` are already those of this step, :math:`t`.

    .. math::
        \theta &\leftarrow (1 - \eta \lambda) \, \theta && \text{decoupled weight decay} \\
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) \, g_t && \text{gradient momentum} \\
        v_t &= \bar D_t^{\,k} + \epsilon && \text{Hessian power} \\
        \theta &\leftarrow \theta - \eta \, \frac{m_t / (1 - \beta_1^t)}{v_t} && \text{step}
    """
    if isinstance(lr, Tensor):
        lr = lr.squeeze() if capturable else lr.item()
    update = _foreach_update if foreach else _plain_update
    for same in _alike(params) if foreach else [range(len(params))]:
        update(
            [params[i] for i in same],
            [grads[i] for i in same],
            [exp_avgs[i] for i in same],
            [hessian_rms[i] for i in same],
            [steps[i] for i in same],
            [blocks[i] for i in same],
            lr=lr,
            beta1=beta1,
            eps=eps,
            weight_decay=weight_decay,
            hessian_power=hessian_power,
            maximize=maximize,
            capturable=capturable,
        )


def _plain_update(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    hessian_rms: list[Tensor],
    steps: list[Tensor],
    blocks: list[Blocks],
    *,
    lr: float | Tensor,
    beta1: float,
    eps: float,
    weight_decay: float,
    hessian_power: float,
    maximize: bool,
    capturable: bool,
) -> None:
    """The ground truth, a tensor at a time."""
    for param, grad, exp_avg, rms, step, of in zip(params, grads, exp_avgs, hessian_rms, steps, blocks, strict=True):
        if weight_decay:
            param.mul_(1 - lr * weight_decay)
        exp_avg.lerp_(-grad if maximize else grad, 1 - beta1)
        v = (rms if hessian_power == 1 else rms.pow(hessian_power)) + eps
        scale = 1.0
        if capturable:
            v.mul_((beta1**step - 1) / lr)
        else:
            scale = -float(lr) / (1 - beta1 ** step.item())
        of.view(param).addcdiv_(of.view(exp_avg), of.expand(v), value=scale)


def _foreach_update(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    hessian_rms: list[Tensor],
    steps: list[Tensor],
    blocks: list[Blocks],
    *,
    lr: float | Tensor,
    beta1: float,
    eps: float,
    weight_decay: float,
    hessian_power: float,
    maximize: bool,
    capturable: bool,
) -> None:
    """The same operations in the same order, a list at a time."""
    if weight_decay:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_lerp_(exp_avgs, torch._foreach_neg(grads) if maximize else grads, 1 - beta1)
    if hessian_power == 1:
        v = torch._foreach_add(hessian_rms, eps)
    else:
        v = torch._foreach_pow(hessian_rms, hessian_power)
        torch._foreach_add_(v, eps)
    if capturable:
        corrections = torch._foreach_pow(beta1, steps)
        torch._foreach_sub_(corrections, 1)
        torch._foreach_div_(corrections, lr)
        torch._foreach_mul_(v, corrections)
        scales = [1.0] * len(params)
    else:
        scales = [-float(lr) / (1 - beta1 ** step.item()) for step in steps]
    torch._foreach_addcdiv_(
        [of.view(param) for of, param in zip(blocks, params, strict=True)],
        [of.view(exp_avg) for of, exp_avg in zip(blocks, exp_avgs, strict=True)],
        [of.expand(values) for of, values in zip(blocks, v, strict=True)],
        scales,
    )


def _alike(params: list[Tensor]) -> list[list[int]]:
    """Positions of tensors that share device and dtype, as the fast foreach kernels want them."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, param in enumerate(params):
        alike.setdefault((param.device, param.dtype), []).append(i)
    return list(alike.values())
