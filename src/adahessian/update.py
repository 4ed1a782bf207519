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
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from adahessian.averaging import SMALL, Blocks, Estimate, numbered

# Values of blocks that an update takes at a time on a CPU.
AT_A_TIME = 1 << 20


def update_hessian_rms(
    hessian_rms: list[Tensor],
    hessian_ages: list[Tensor],
    dropped: list[Tensor],
    estimates: list[Estimate],
    new_ages: list[Tensor],
    *,
    beta2: float,
) -> None:
    r"""Fold measurements into the Hessian momentum, in place.

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
    log_beta2 = math.log(beta2) if beta2 > 0 else -math.inf
    for chosen in _taken_together(hessian_rms):
        several = len(chosen) > 1
        ages = _joined([hessian_ages[i] for i in chosen])
        aged = _joined([new_ages[i].to(hessian_ages[i]) for i in chosen])
        not_finite = _joined([estimates[i].not_finite for i in chosen])
        # expm1 keeps the digits of 1 - beta2 that float32 would lose.
        weight = torch.expm1((aged - ages) * log_beta2) / torch.expm1(aged * log_beta2)
        accepted = not_finite.logical_not()
        if several:
            part_of = numbered([hessian_rms[i].numel() for i in chosen])
            before = torch.cat([hessian_rms[i].flatten() for i in chosen])
            values = torch.cat([estimates[i].values.flatten() for i in chosen])
            after = _folded(before, values, weight[part_of], accepted[part_of])
            parts = after.split([hessian_rms[i].numel() for i in chosen])
        else:
            before, values = hessian_rms[chosen[0]], estimates[chosen[0]].values
            parts = (_folded(before, values, weight, accepted),)
        torch._foreach_copy_(
            [hessian_rms[i] for i in chosen],
            [part.view_as(hessian_rms[i]) for i, part in zip(chosen, parts, strict=True)],
        )
        torch._foreach_copy_([hessian_ages[i] for i in chosen], _parted(torch.where(accepted, aged, ages)))
        torch._foreach_add_([dropped[i] for i in chosen], _parted(not_finite.to(dropped[chosen[0]].dtype)))


def _folded(hessian_rms: Tensor, values: Tensor, weight: Tensor, accepted: Tensor) -> Tensor:
    """What an average becomes, element by element."""
    # Infinite is what is unmeasured, negative what is untouched: of both their product is minus infinity.
    unknown = (hessian_rms * values).eq(-math.inf)
    squared = values.clamp(min=0.0).square_()
    updated = hessian_rms.nan_to_num(posinf=0.0).square_().lerp_(squared, weight).sqrt_()
    return torch.where(accepted, updated.masked_fill_(unknown, math.inf), hessian_rms)


def _taken_together(tensors: list[Tensor]) -> list[list[int]]:
    """Numbers of tensors that are computed with at once: on a CPU all small ones, as each call costs microseconds."""
    together: dict[object, list[int]] = {}
    for i, tensor in enumerate(tensors):
        small = tensor.device.type == "cpu" and tensor.numel() < SMALL
        together.setdefault(tensor.dtype if small else i, []).append(i)
    return list(together.values())


def _joined(scalars: list[Tensor]) -> Tensor:
    return torch.stack(scalars) if len(scalars) > 1 else scalars[0]


def _parted(scalars: Tensor) -> tuple[Tensor, ...]:
    return scalars.unbind() if scalars.dim() else (scalars,)


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
        scale = 1.0 if capturable else -float(lr) / (1 - beta1 ** step.item())
        whole = (rms, grad, exp_avg, of.view(exp_avg), of.view(param))
        for rms_of_part, g, m, m_in_blocks, theta in (whole,) if rms.numel() <= AT_A_TIME else _in_parts(whole):
            if weight_decay:
                theta.mul_(1 - lr * weight_decay)
            m.lerp_(-g if maximize else g, 1 - beta1)
            v = (rms_of_part if hessian_power == 1 else rms_of_part.pow(hessian_power)) + eps
            if capturable:
                v.mul_((beta1**step - 1) / lr)
            theta.addcdiv_(m_in_blocks, of.expand(v), value=scale)


def _in_parts(tensors: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """Rows of averages and of what has as many: on a CPU few, as fresh memory for a large tensor is slow to come by."""
    rms = tensors[0]
    if rms.device.type != "cpu":
        return [tuple(tensors)]
    rows = max(AT_A_TIME * len(rms) // rms.numel(), 1)
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


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
