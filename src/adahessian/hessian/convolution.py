r"""Convolutions whose derivatives of every order are convolutions.

:math:`\langle y, x * w \rangle` is linear in each of y, x and w. Its gradient with respect to y is the convolution, and
PyTorch has functions for the other gradients. Let v be the gradient with respect to the result of one of these three
functions. The gradient with respect to either argument is then another of the three, with v in place of the result.
PyTorch's own second derivative convolves with kernels as large as images, for which GPUs have no fast code.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad

from adahessian.base.precision import autocast_disabled

_TORCHS_OWN = (nn.Conv1d._conv_forward, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward)


class _Geometry(NamedTuple):
    x: torch.Size
    w: torch.Size
    sizes: tuple[Any, ...]  # stride, padding, dilation, transposed, output_padding, groups


def conv_forward(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """Compute ``module.forward(x)``, falling back to PyTorch for unusual convolutions and reduced precision."""
    w, bias = module.weight, module.bias
    is_ordinary = (
        type(module)._conv_forward in _TORCHS_OWN
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and x.dim() == w.dim()
        and x.numel() > 0
    )
    if not is_ordinary or not are_plain(x, w, *(() if bias is None else (bias,))):
        return module._conv_forward(x, w, bias)  # type: ignore[no-any-return]
    sizes = module.stride, module.padding, module.dilation, False, (0,) * (w.dim() - 2), module.groups
    return _gradient(_Geometry(x.shape, w.shape, sizes), None, x, w, bias)


def _gradient(geometry: _Geometry, *given: Tensor | None) -> Tensor:
    """Compute the gradient of <y, x * w> with respect to the argument that is None. If y is None, a bias may follow."""
    if torch.is_grad_enabled() and not is_transformed(*given):
        return _Gradient.apply(geometry, *given)  # type: ignore[no-any-return, no-untyped-call]
    return _compute(geometry, *given)  # PyTorch can differentiate the operations themselves


def _compute(geometry: _Geometry, y: Tensor | None, x: Any, w: Any, bias: Tensor | None = None) -> Tensor:
    with autocast_disabled():
        if y is None:
            return torch.convolution(x, w, bias, *geometry.sizes)
        wanted = [x is None, w is None, False]
        placeholder = y.new_empty(())  # only the shape of the missing argument matters
        x = placeholder.expand(geometry.x) if x is None else x
        w = placeholder.expand(geometry.w) if w is None else w
        gradients: list[Tensor] = torch.ops.aten.convolution_backward(y, x, w, None, *geometry.sizes, wanted)
        return gradients[0 if wanted[0] else 1]


class _Gradient(Function):
    @staticmethod
    def forward(ctx: Any, geometry: _Geometry, *given: Tensor | None) -> Tensor:
        needed = ctx.needs_input_grad[1:4]
        ctx.geometry = geometry
        ctx.computed = next(i for i in range(3) if given[i] is None)
        # The gradient with respect to one argument needs the other argument.
        ctx.save_for_backward(*(given[i] if any(needed[:i] + needed[i + 1 :]) else None for i in range(3)))
        return _compute(geometry, *given)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        given = list(ctx.saved_tensors)
        given[ctx.computed] = v
        needed = ctx.needs_input_grad[1:]
        by_each: list[Tensor | None] = [
            _gradient(ctx.geometry, *given[:i], None, *given[i + 1 :]) if needed[i] else None for i in range(3)
        ]
        if len(needed) > 3:
            by_each.append(v.sum([dim for dim in range(v.dim()) if dim != 1]) if needed[3] else None)
        return None, *by_each


def are_plain(*tensors: Tensor) -> bool:
    """Return whether substitutes support these tensors: ordinary, in one full precision and not transformed."""
    dtype, device = tensors[0].dtype, tensors[0].device.type
    return (
        dtype in (torch.float32, torch.float64)
        and all(type(each) in (Tensor, nn.Parameter, nn.Buffer) and each.dtype is dtype for each in tensors)
        and device in ("cpu", "cuda")
        and not torch.is_autocast_enabled(device)
        and not is_transformed(*tensors)
    )


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether ``torch.func``, forward differentiation or ``is_grads_batched`` transforms these tensors."""
    functorch = torch._C._functorch
    return (
        functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or any(each is not None and functorch.is_legacy_batchedtensor(each) for each in tensors)
    )
