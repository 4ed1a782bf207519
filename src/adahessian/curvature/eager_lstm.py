r"""LSTM layers with their second derivative written out, for passes that are not compiled.

Neither cuDNN's nor oneDNN's LSTM can be differentiated twice, and what torch falls back to computes every step of the
sequence by a dozen small operations, each of which the gradient, and the gradient's, multiply. Here a layer is one
function. Its steps, with :math:`a_t = x_t + W h_{t-1}` for the four gates, of which x is what the input comes to,

.. math::
    i, f, o = \sigma(a_i), \sigma(a_f), \sigma(a_o), \quad z = \tanh(a_z), \quad
    c_t = f c_{t-1} + i z, \quad h_t = o \tanh(c_t)

are linear in each other's changes, with factors that are known for all steps at once,

.. math::
    k_i = z i (1 - i), \quad k_f = c_{t-1} f (1 - f), \quad k_z = i (1 - z^2), \quad
    k_o = \tanh(c_t) \, o (1 - o), \quad k_c = o (1 - \tanh^2 c_t)

so that the gradient, with :math:`\eta_t` and :math:`\gamma_t` for those of the loss by :math:`h_t` and :math:`c_t`, is

.. math::
    \eta_t = g_t + W^\top \alpha_{t+1}, \quad \gamma_t = f_{t+1} \gamma_{t+1} + k_c \eta_t, \quad
    \alpha_t = (k_i \gamma_t, k_f \gamma_t, k_z \gamma_t, k_o \eta_t)

by :math:`a_t`. To differentiate once more is to let all of this change along a direction, forwards and then backwards:
two more recurrences of the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from adahessian.curvature.written_out import Pass, applied, gradient_in_torchs_operations, in_full_precision

_TORCHS_OWN = torch.lstm


def lstm(of_pass: Pass, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.lstm``, in a pass, as ``torch.nn.LSTM`` calls it; torch's own for packed sequences and projections."""
    if len(args) != 9 or isinstance(args[1], Tensor):
        return _TORCHS_OWN(*args)
    x, (h_0, c_0), params, has_biases, num_layers, dropout, train, bidirectional, batch_first = args
    directions = 2 if bidirectional else 1
    of_each = 4 if has_biases else 2
    fits = x.dim() == 3 and x.numel() and len(params) == num_layers * directions * of_each
    if not fits or not of_pass.takes(x, h_0, c_0, *params):
        return _TORCHS_OWN(*args)
    state = (num_layers * directions, x.shape[0 if batch_first else 1], params[1].shape[-1])
    if h_0.shape != state or c_0.shape != state:
        return _TORCHS_OWN(*args)  # what it refuses, it refuses in its own words
    x = x.transpose(0, 1) if batch_first else x
    last_h, last_c = [], []
    for layer in range(num_layers):
        if layer and dropout and train:
            x = functional.dropout(x, dropout)
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            own = params[number * of_each : (number + 1) * of_each]
            output, c_n = _layer(of_pass, x, h_0[number], c_0[number], own, backwards=direction == 1)
            last_h.append(output[0] if direction else output[-1])
            last_c.append(c_n)
            outputs.append(output)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    return x.transpose(0, 1) if batch_first else x, torch.stack(last_h), torch.stack(last_c)


def _layer(
    of_pass: Pass, x: Tensor, h_0: Tensor, c_0: Tensor, params: Sequence[Tensor], *, backwards: bool
) -> tuple[Tensor, Tensor]:
    of_input, of_hidden, *biases = params
    gates = functional.linear(x, of_input, biases[0] + biases[1] if biases else None)
    if backwards:
        gates = gates.flip(0)
    h, c_n = applied(_Recurrence, of_pass, gates, of_hidden, h_0, c_0)
    return h.flip(0) if backwards else h, c_n


class _Recurrence(Function):
    """From x, W, h_0 and c_0 to all h and the last c."""

    @staticmethod
    def forward(ctx: Any, of_pass: Pass, x: Tensor, w: Tensor, h_0: Tensor, c_0: Tensor) -> tuple[Tensor, Tensor]:
        steps, batch, size = len(x), *h_0.shape
        gates = x.new_empty(steps, batch, 4, size)
        h, c, tanh_c = _after(h_0, steps), _after(c_0, steps), x.new_empty(steps, batch, size)
        hs, cs, w_t = h.unbind(), c.unbind(), w.t()
        i_and_f, z, o = (part.unbind() for part in gates.split([2, 1, 1], 2))
        for t, (a, x_t, tanh_t) in enumerate(zip(gates.flatten(2).unbind(), x.unbind(), tanh_c.unbind(), strict=True)):
            torch.addmm(x_t, hs[t], w_t, out=a)
            i, f = i_and_f[t].sigmoid_().unbind(1)
            torch.mul(f, cs[t], out=cs[t + 1]).addcmul_(i, z[t].tanh_()[:, 0])
            torch.mul(o[t].sigmoid_()[:, 0], torch.tanh(cs[t + 1], out=tanh_t), out=hs[t + 1])
        of_pass.remember(ctx)
        ctx.save_for_backward(x, w, h_0, c_0, gates, h, c, tanh_c)
        # Copies, as users may write to what they get.
        return h[1:].clone(), cs[-1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_inputs: tuple[Tensor | None, ...]
        with in_full_precision(gradients[0]):
            if Pass.is_last_gradient(ctx):
                by_inputs = applied(_Gradient, *gradients, *ctx.saved_tensors)
            else:
                by_inputs = gradient_in_torchs_operations(
                    _in_torchs_operations, ctx.saved_tensors[:4], ctx.needs_input_grad[1:], gradients
                )
        return None, *by_inputs


class _Gradient(Function):
    """From the gradients by h and the last c to those by x, W, h_0 and c_0."""

    @staticmethod
    def forward(
        ctx: Any,
        g: Tensor,
        g_c: Tensor,
        x: Tensor,
        w: Tensor,
        h_0: Tensor,
        c_0: Tensor,
        gates: Tensor,
        h: Tensor,
        c: Tensor,
        tanh_c: Tensor,
    ) -> tuple[Tensor, ...]:
        k, k_c = _factors(gates, c, tanh_c)
        eta, gamma, alpha = torch.empty_like(k_c), torch.empty_like(k_c), torch.empty_like(k)
        by_h, by_c = torch.zeros_like(h_0), g_c
        of_gates, of_o = (part.unbind() for part in alpha.split([3, 1], 2))
        k_gates, k_o = (part.unbind() for part in k.split([3, 1], 2))
        flat, fs = alpha.flatten(2).unbind(), gates.unbind(2)[1].unbind()
        for t, (eta_t, gamma_t, g_t, k_ct) in _backwards(eta, gamma, g, k_c):
            torch.add(g_t, by_h, out=eta_t)
            torch.addcmul(by_c, eta_t, k_ct, out=gamma_t)
            torch.mul(gamma_t.unsqueeze(1), k_gates[t], out=of_gates[t])
            torch.mul(eta_t.unsqueeze(1), k_o[t], out=of_o[t])
            by_h, by_c = flat[t] @ w, gamma_t * fs[t]
        ctx.save_for_backward(w, gates, h, c, tanh_c, k, k_c, eta, gamma, alpha)
        return alpha.flatten(2), _weight_gradient(alpha, h), by_h, by_c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:
        """All of the above changes along a direction in x, W, h_0 and c_0, and g does not."""
        with in_full_precision(along[0]):
            return _Gradient.change(ctx.saved_tensors, *along)

    @staticmethod
    def change(
        saved: Sequence[Tensor], v_x: Tensor, v_w: Tensor, v_h: Tensor, v_c: Tensor
    ) -> tuple[Tensor | None, ...]:
        w, gates, h, c, tanh_c, k, k_c, eta, gamma, alpha = saved
        steps = len(gates)
        f = gates.unbind(2)[1]
        k_gates, k_o = (part.unbind() for part in k.split([3, 1], 2))

        d_gates = torch.empty_like(gates)
        d_h, d_c = _after(v_h, steps), _after(v_c, steps)
        d_hs, d_cs, w_t = d_h.unbind(), d_c.unbind(), w.t()
        changes = torch.addmm(v_x.flatten(0, 1), h[:-1].flatten(0, 1), v_w.t()).view_as(v_x)
        three, o = (part.unbind() for part in d_gates.split([3, 1], 2))
        for t, (a, change, f_t, k_ct) in enumerate(
            zip(*map(Tensor.unbind, (d_gates.flatten(2), changes, f, k_c)), strict=True)
        ):
            torch.addmm(change, d_hs[t], w_t, out=a)
            torch.sum(k_gates[t] * three[t], 1, out=d_cs[t + 1]).addcmul_(f_t, d_cs[t])
            torch.mul(k_o[t][:, 0], o[t][:, 0], out=d_hs[t + 1]).addcmul_(k_ct, d_cs[t + 1])

        d_k, d_k_c, d_f = _changes_of_factors(gates, c, tanh_c, d_gates, d_c)
        d_alpha = d_k.mul_(torch.stack([gamma, gamma, gamma, eta], 2))
        of_gamma, of_carried = d_k_c.mul_(eta).unbind(), d_f.mul_(gamma).unbind()
        by_h, by_c = torch.zeros_like(v_h), torch.zeros_like(v_c)
        back = (alpha.flatten(2) @ v_w).unbind()
        three, o = (part.unbind() for part in d_alpha.split([3, 1], 2))
        flat = d_alpha.flatten(2).unbind()
        for t, (k_ct, f_t) in _backwards(k_c, f):
            d_gamma = torch.addcmul(by_c, by_h, k_ct).add_(of_gamma[t])
            three[t].addcmul_(d_gamma.unsqueeze(1), k_gates[t])
            o[t].addcmul_(by_h.unsqueeze(1), k_o[t])
            by_h, by_c = torch.addmm(back[t], flat[t], w), torch.addcmul(of_carried[t], d_gamma, f_t)
        by_w = _weight_gradient(d_alpha, h).add_(_weight_gradient(alpha, d_h))
        return d_h[1:], d_cs[-1], d_alpha.flatten(2), by_w, by_h, by_c, None, None, None, None


def _in_torchs_operations(x: Tensor, w: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, step by step."""
    outputs = []
    for x_t in x.unbind():
        i, f, z, o = (x_t + h @ w.t()).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * z.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs), c


def _after(first: Tensor, steps: int) -> Tensor:
    """A value, and room for those of the steps that follow."""
    return torch.cat([first.unsqueeze(0), first.new_empty(steps, *first.shape)])


def _backwards(*tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    of_steps = list(zip(*map(Tensor.unbind, tensors), strict=True))
    return zip(reversed(range(len(of_steps))), reversed(of_steps), strict=True)


def _weight_gradient(by_gates: Tensor, h: Tensor) -> Tensor:
    """The sum over all steps of what the gradient by the gates says about W."""
    return by_gates.flatten(2).flatten(0, 1).t() @ h[:-1].flatten(0, 1)


def _factors(gates: Tensor, c: Tensor, tanh_c: Tensor) -> tuple[Tensor, Tensor]:
    """The k of each gate, and that of c."""
    i, f, z, o = gates.unbind(2)
    k = torch.stack([z * i * (1 - i), c[:-1] * f * (1 - f), i * (1 - z * z), tanh_c * o * (1 - o)], 2)
    return k, o * (1 - tanh_c * tanh_c)


def _changes_of_factors(
    gates: Tensor, c: Tensor, tanh_c: Tensor, d_gates: Tensor, d_c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """How these change, and f, when what goes into the gates and c do."""
    i, f, z, o = gates.unbind(2)
    slopes = gates * (1 - gates)
    s_i, s_f, _, s_o = slopes.unbind(2)
    s_z = 1 - z * z
    d_i, d_f, _, d_o = (slopes * d_gates).unbind(2)
    d_z = s_z * d_gates[:, :, 2]
    s_tanh = 1 - tanh_c * tanh_c
    d_tanh = s_tanh * d_c[1:]
    d_k = torch.stack(
        [
            d_z * s_i + z * (1 - 2 * i) * d_i,
            d_c[:-1] * s_f + c[:-1] * (1 - 2 * f) * d_f,
            d_i * s_z - 2 * i * z * d_z,
            d_tanh * s_o + tanh_c * (1 - 2 * o) * d_o,
        ],
        2,
    )
    return d_k, d_o * s_tanh - 2 * o * tanh_c * d_tanh, d_f
