r"""LSTM layers whose derivatives of every order are recurrences with few operations per step.

Neither cuDNN's nor oneDNN's LSTM can be differentiated twice. PyTorch's fallback runs a dozen small operations per
step, and each derivative multiplies their number. With :math:`a_t = x_t + W h_{t-1}` for the four gates, where x is the
transformed input, a step is

.. math::
    i, f, o = \sigma(a_i), \sigma(a_f), \sigma(a_o), \quad z = \tanh(a_z), \quad
    c_t = f c_{t-1} + i z, \quad h_t = o \tanh(c_t)

Its gradient is the solution u of a recurrence u = M u + g, linear in the gradients g of all gates, c and h:

.. math::
    \eta_t = g_h + W^\top \alpha_{t+1}, \quad \gamma_t = g_c + f_{t+1} \gamma_{t+1} + k_c \eta_t, \quad
    \alpha_t = s g_s + (k_i \gamma_t, k_f \gamma_t, k_z \gamma_t, k_o \eta_t)

The factors s, k and f are known for all steps at once. The gradient with respect to g is the solution of the adjoint
recurrence, :math:`\lambda = M^\top \lambda + v`. The gradient with respect to M is :math:`\lambda u^\top`.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from adahessian.base.errors import CurvatureError
from adahessian.base.precision import autocast_disabled
from adahessian.hessian.convolution import are_plain, is_transformed


def lstm_forward(module: nn.LSTM, x: Any, state: Any = None) -> Any:
    """Compute ``module.forward(x, state)``. PyTorch computes packed sequences, projections and unbatched input."""
    is_ordinary = isinstance(x, Tensor) and x.dim() == 3 and x.numel() > 0 and not module.proj_size
    if is_ordinary and x.shape[-1] == module.input_size and (state is None or len(state) == 2):
        batch = x.shape[0 if module.batch_first else 1]
        weights: Any = module.all_weights
        shape = (len(weights), batch, module.hidden_size)
        h_0, c_0 = (x.new_zeros(shape),) * 2 if state is None else state
        if h_0.shape == c_0.shape == shape and are_plain(x, h_0, c_0, *chain(*weights)):
            return _layers(module, x, h_0, c_0, weights)
    return nn.LSTM.forward(module, x, state)


def _layers(module: nn.LSTM, x: Tensor, h_0: Tensor, c_0: Tensor, weights: Sequence[Sequence[Tensor]]) -> Any:
    directions = 2 if module.bidirectional else 1
    x = x.transpose(0, 1) if module.batch_first else x
    last = []
    for layer in range(module.num_layers):
        if layer and module.dropout and module.training:
            x = functional.dropout(x, module.dropout)
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            of_input, of_hidden, *biases = weights[number]
            gates = functional.linear(x, of_input, biases[0] + biases[1] if biases else None)
            gates = gates.flip(0) if direction else gates
            _, c, h = _Recurrence.apply(gates, of_hidden, h_0[number], c_0[number])  # type: ignore[no-untyped-call]
            last.append((h[-1], c[-1]))
            # A copy, because users may write to the output.
            outputs.append(h[1:].flip(0) if direction else h[1:].clone())
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    return x.transpose(0, 1) if module.batch_first else x, tuple(map(torch.stack, zip(*last, strict=True)))


class _Recurrence(Function):
    """The recurrence from x, W, h_0 and c_0 to the gates, c and h of all steps. The results c and h include step 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, h_0: Tensor, c_0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps, batch, size = len(x), *h_0.shape
        gates = x.new_empty(steps, batch, 4, size)
        h, c = (torch.cat([first[None], first.new_empty(steps, batch, size)]) for first in (h_0, c_0))
        hs, cs, w_t = h.unbind(), c.unbind(), w.t()
        i_and_f, z, o = (part.unbind() for part in gates.split([2, 1, 1], 2))
        for t, (a, x_t) in enumerate(zip(gates.flatten(2).unbind(), x.unbind(), strict=True)):
            torch.addmm(x_t, hs[t], w_t, out=a)
            i, f = i_and_f[t].sigmoid_().unbind(1)
            torch.mul(f, cs[t], out=cs[t + 1]).addcmul_(i, z[t].tanh_()[:, 0])
            torch.mul(o[t].sigmoid_()[:, 0], cs[t + 1].tanh(), out=hs[t + 1])
        ctx.save_for_backward(w, gates, c, h)
        ctx.set_materialize_grads(False)
        return gates, c, h

    @staticmethod
    def backward(ctx: Any, by_gates: Tensor | None, by_c: Tensor | None, by_h: Tensor | None) -> tuple[Tensor, ...]:
        w, gates, c, h = saved = ctx.saved_tensors
        i, f, z, o = gates.unbind(2)
        tanh_c = c[1:].tanh()
        k = torch.stack([z * i * (1 - i), c[:-1] * f * (1 - f), i * (1 - z * z), tanh_c * o * (1 - o)], 2)
        k_c = o * (1 - tanh_c * tanh_c)
        if by_gates is not None:
            by_gates = by_gates * torch.stack([i * (1 - i), f * (1 - f), 1 - z * z, o * (1 - o)], 2)
        alpha, gamma, eta = _solve(True, (k, k_c, f, w), (by_gates, by_c, by_h), saved[1:])
        with autocast_disabled():
            return alpha.flatten(2), _weight_gradient(alpha, h), eta[0], gamma[0]


def _solve(
    backwards: bool, factors: Sequence[Tensor], given: Sequence[Tensor | None], results: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve for the gradients ``given`` of these results. None stands for zeros."""
    if is_transformed(*given):
        raise CurvatureError(
            "loss_fn computes gradients of an LSTM with torch.func.vmap or is_grads_batched=True. Compute them one "
            "after another."
        )
    filled = [torch.zeros_like(result) if g is None else g for g, result in zip(given, results, strict=True)]
    return _Solution.apply(backwards, *factors, *filled)  # type: ignore[no-any-return, no-untyped-call]


class _Solution(Function):
    """The solution (alpha, gamma, eta) of u = M u + g, backwards in time, or of its adjoint, forwards in time."""

    @staticmethod
    def forward(ctx: Any, backwards: bool, *args: Tensor) -> tuple[Tensor, ...]:
        k, k_c, f, w = args[:4]
        alpha, gamma, eta = (each.clone(memory_format=torch.contiguous_format) for each in args[4:])
        alphas, gammas, etas = alpha.flatten(2).unbind(), gamma.unbind(), eta.unbind()
        (k_ifz, k_o), (ifz, o) = ([part.unbind() for part in each.split([3, 1], 2)] for each in (k, alpha))
        per_step = list(enumerate(zip(k_ifz, k_o, k_c.unbind(), f.unbind(), ifz, o, strict=True)))
        for t, (k_ifz_t, k_o_t, k_c_t, f_t, ifz_t, o_t) in reversed(per_step) if backwards else per_step:
            if backwards:
                gammas[t + 1].addcmul_(k_c_t, etas[t + 1])
                ifz_t.addcmul_(k_ifz_t, gammas[t + 1].unsqueeze(1))
                o_t.addcmul_(k_o_t, etas[t + 1].unsqueeze(1))
                etas[t].addmm_(alphas[t], w)
                gammas[t].addcmul_(f_t, gammas[t + 1])
            else:
                alphas[t].addmm_(etas[t], w.t())
                gammas[t + 1].addcmul_(f_t, gammas[t]).add_((k_ifz_t * ifz_t).sum(1))
                etas[t + 1].addcmul_(k_c_t, gammas[t + 1]).addcmul_(k_o_t[:, 0], o_t[:, 0])
        ctx.backwards = backwards
        ctx.save_for_backward(*args[:4], alpha, gamma, eta)
        ctx.set_materialize_grads(False)
        return alpha, gamma, eta

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # only once, because checkpointing allows no more
        factors, solution = saved[:4], saved[4:]
        other = _solve(not ctx.backwards, factors, given, solution)
        (alpha, gamma, eta), (l_alpha, l_gamma, l_eta) = (solution, other) if ctx.backwards else (other, solution)
        by_k = l_alpha * torch.stack([gamma[1:], gamma[1:], gamma[1:], eta[1:]], 2)
        with autocast_disabled():
            by_w = _weight_gradient(alpha, l_eta)
        return None, by_k, l_gamma[1:] * eta[1:], l_gamma[:-1] * gamma[1:], by_w, *other


def _weight_gradient(alpha: Tensor, h: Tensor) -> Tensor:
    return alpha.flatten(2).flatten(0, 1).t() @ h[:-1].flatten(0, 1)
