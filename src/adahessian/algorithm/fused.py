"""Launch the fused kernels on lists of tensors of any shapes, once per call.

The kernels and their tables are described in :mod:`adahessian.algorithm.kernels`. The PyTorch versions are in
:mod:`adahessian.algorithm.update`, :mod:`adahessian.algorithm.shapes` and :mod:`adahessian.algorithm.probes`.
"""

from __future__ import annotations

import importlib.util
import math
import operator
import os
import shutil
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from adahessian.algorithm.probes import as_int64
from adahessian.algorithm.shapes import Blocks, CurvatureShape

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DTYPE = operator.attrgetter("dtype")
_FORM = operator.attrgetter("shape", "dtype", "device")

Tensors = Sequence[Tensor]


class FusedTensors:
    """Parameters of one group, device and dtype. Methods take lists in the order of the parameters.

    All parameters must pass :func:`can_fuse`, or :func:`can_draw` if only :meth:`draw` is called. ``positions``
    identify the parameters in probes.
    """

    def __init__(self, params: Tensors, shapes: Sequence[Blocks], positions: Sequence[int], *, signed: bool) -> None:
        from adahessian.algorithm import kernels  # Triton is optional, and slow to import

        self._kernels: Any = kernels
        self._params, self._signed = params, signed
        self._device, self._dtype = params[0].device, params[0].dtype
        self._element = getattr(self._kernels.tl, str(self._dtype).removeprefix("torch."))
        self._forms = list(map(_FORM, params))
        self._strides = None if all(map(Tensor.is_contiguous, params)) else [param.stride() for param in params]
        self._stored_shapes = [shape.stored_shape for shape in shapes]
        self._counts = list(map(math.prod, self._stored_shapes))
        offsets = accumulate(self._counts, initial=0)
        rows = [
            [*_layout(param, shape, kernels.LANES.value), position, offset]
            for param, shape, position, offset in zip(params, shapes, positions, offsets, strict=False)
        ]
        self._rows = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self._layout = self._upload(self._rows)
        self._tables: dict[str, tuple[list[int], Tensor, Tensor, dict[str, bool]]] = {}

    def draw(self, out: Tensors, key: int) -> None:
        """Fill contiguous tensors with signs, as :func:`adahessian.algorithm.probes.draw_like` does."""
        if list(map(_FORM, out)) != self._forms or not all(map(Tensor.is_contiguous, out)):
            raise ValueError("out does not match the parameters. Pass contiguous tensors of their shapes and dtype.")
        self._launch("draw", out, key=as_int64(key), ELEMENT=self._element)

    def reduce(self, diagonals: Tensors, gradients: Tensors | None) -> tuple[list[Tensor], Tensor]:
        """Reduce diagonals to the stored values, as :meth:`Blocks.reduce` does, and to one int32 flag per parameter.

        A flag is nonzero if a square is not finite.
        """
        not_finite = torch.zeros(len(self._counts), dtype=torch.int32, device=self._device)
        flat = torch.empty(sum(self._counts), dtype=torch.float32, device=self._device)
        # The kernel reads both in the order of the parameter's memory.
        diagonals = self._match(diagonals, torch.float32)
        slopes = diagonals if gradients is None else self._match(gradients, self._dtype)
        options = {"ELEMENT": self._element, "GRADIENTS": gradients is not None, "SIGNED": self._signed}
        self._launch("reduce", diagonals, slopes, values=flat, flags=not_finite, **options)
        parts = zip(flat.split(self._counts), self._stored_shapes, strict=True)
        return [part.view(shape) for part, shape in parts], not_finite

    def fold(self, rms: Tensors, values: Tensors, not_finite: Tensor, weights: Tensor) -> None:
        """Fold values of :meth:`reduce` into the Hessian rms, in place, except for parameters with a nonzero flag."""
        self._launch("fold", values, rms, flags=not_finite, weights=weights)

    def step(self, params: Tensors, grads: Tensors, exp_avgs: Tensors, rms: Tensors, **scalars: float) -> None:
        """Take one step, in place, as :func:`adahessian.algorithm.update.take_step` does.

        Required scalars are ``power`` and ``eps``, which make the denominators, and all those of ``take_step``.
        """
        grads = self._match(grads, self._dtype)  # copies must outlive the launch
        scalars = {name: float(value) for name, value in scalars.items()}
        self._launch("step", params, grads, exp_avgs, rms, ELEMENT=self._element, **scalars)
        # Autograd does not see what a kernel writes.
        torch.autograd.graph.increment_version([*params, *exp_avgs])

    def _match(self, tensors: Tensors, dtype: torch.dtype) -> Tensors:
        """Return tensors in this dtype and in the memory order of their parameters."""
        # They nearly always match already. A Python call per tensor would take longer than the launch.
        if self._strides is None:
            in_order = all(map(Tensor.is_contiguous, tensors))
        else:
            in_order = list(map(Tensor.stride, tensors)) == self._strides
        if in_order and set(map(_DTYPE, tensors)) == {dtype}:
            return tensors
        return [_like(tensor, param, dtype) for tensor, param in zip(tensors, self._params, strict=True)]

    def _launch(self, kernel: str, *lists: Tensors, **arguments: Any) -> None:
        """Launch a kernel. Its table of addresses, one column per list, is rebuilt only if an address has changed."""
        addresses = list(map(Tensor.data_ptr, chain(*lists)))
        known = self._tables.get(kernel)
        if known is None or known[0] != addresses:
            table = torch.tensor(addresses, dtype=torch.int64, device="cpu").view(len(lists), -1)
            tiles = self._cut(kernel) if known is None else known[2]
            options = {"ALIGNED": not (table[:3] % 16).any()} if kernel == "step" else {}
            known = self._tables[kernel] = addresses, self._upload(table.t().contiguous()), tiles, options
        _, pointers, tiles, options = known
        if len(tiles):
            with torch.cuda.device_of(tiles):
                getattr(self._kernels, kernel)[(len(tiles),)](pointers, self._layout, tiles, **arguments, **options)

    def _cut(self, kernel: str) -> Tensor:
        """Split the tensors into one piece per program: the index of a tensor, and the start of the piece in it."""
        kernels = self._kernels
        sizes = self._rows[:, (kernels.NUMEL if kernel in ("draw", "step") else kernels.BLOCKS).value]
        steps = torch.full_like(sizes, kernels.TILE.value)
        if kernel == "reduce":
            steps[self._rows[:, kernels.COUNT.value] > 1] = kernels.ROWS.value
        programs = (sizes + steps - 1) // steps
        tensor = torch.arange(len(sizes), device="cpu").repeat_interleave(programs)
        place = torch.arange(len(tensor), device="cpu") - (programs.cumsum(0) - programs)[tensor]
        return self._upload(torch.stack([tensor, place * steps[tensor]], dim=1))

    def _upload(self, table: Tensor) -> Tensor:
        # A copy from pageable memory would wait for all earlier launches.
        return (table.pin_memory() if self._device.type == "cuda" else table).to(self._device, non_blocking=True)


def can_fuse(param: Tensor, shape: CurvatureShape, group: dict[str, Any], state: dict[str, Any] | None) -> bool:
    """Return whether the kernels support a parameter, given its group, dtype and memory layout."""
    wanted = group["fused"]
    if wanted is None:
        # The kernels need the learning rate and the step count on the host.
        on_host = not group["capturable"] and not isinstance(group["lr"], Tensor)
        wanted = on_host and param.is_cuda and _has_triton(param.device)
    elif wanted and not param.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"fused=True needs CUDA, but a parameter is on {param.device}. Move it, or pass fused=None.")
    if not (wanted and isinstance(shape, Blocks) and _is_supported(param)):
        return False
    is_channels_last = shape.kernel_dims == param.dim() - 2 > 0 and param.movedim(1, -1).is_contiguous()
    if not (param.is_contiguous() or is_channels_last):
        return False
    exp_avg, rms = (state or {}).get("exp_avg", param), (state or {}).get("hessian_rms")
    if _FORM(exp_avg) != _FORM(param) or exp_avg.stride() != param.stride():
        return False
    return rms is None or bool(rms.dtype == torch.float32 and rms.device == param.device and rms.is_contiguous())


def can_draw(param: Tensor) -> bool:
    """Return whether the kernels can draw probes for a parameter, regardless of the shape of its curvature."""
    return param.is_cuda and _is_supported(param) and _has_triton(param.device)


def _is_supported(param: Tensor) -> bool:
    return param.dtype in _DTYPES and not is_traceable_wrapper_subclass(param)


@cache
def _has_triton(device: torch.device) -> bool:
    """Return whether Triton is installed, supports the GPU and finds a C compiler to build its launchers."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device) < (7, 0):
        return False
    return bool(os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang"))))


def _layout(param: Tensor, shape: Blocks, lanes: int) -> list[int]:
    """Return the columns of ``layout`` that depend on the shape."""
    sizes = [param.numel(), math.prod(shape.stored_shape)]
    size = math.prod(shape.shape[-shape.kernel_dims :]) if shape.kernel_dims else shape.row_length
    if shape.kernel_dims and not param.is_contiguous():
        channels = shape.shape[1]
        return [*sizes, size * channels, channels, channels, 1, size, channels, 0]
    if shape.row_length > 1 and shape.shape[-1] % size:
        return [*sizes, shape.shape[-1], shape.stored_shape[-1], shape.shape[-1], size, size, 1, 0]
    # Blocks of equal size, one after another.
    return [*sizes, size, 1, size, size, size, 1, size // lanes if size % lanes == 0 else 0]


def _like(tensor: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in this dtype and in the memory order of a parameter."""
    # The stride of a dimension of size 1 has no meaning.
    pairs = zip(tensor.stride(), param.stride(), param.shape, strict=True)
    if tensor.dtype == dtype and all(own == wanted or size == 1 for own, wanted, size in pairs):
        return tensor
    return torch.empty_like(param, dtype=dtype).copy_(tensor)
