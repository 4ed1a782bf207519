"""Lists of tensors for the fused kernels: one launch for all of them, whatever their shapes.

The kernels, and the tables that they read, are in :mod:`adahessian.kernels`. What they compute is defined by their
plain twins in :mod:`adahessian.update`, :mod:`adahessian.averaging` and :mod:`adahessian.curvature.probes`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from adahessian.averaging import Averaging, Blocks

# Elements a program updates, blocks a program folds, blocks a program averages, tensors a program weighs.
_TILE = 2048
_FLAT_TILE = 1024
_ROWS = 32
_COLUMNS = 32
_WEIGH_TILE = 128
_ROW_OF_LANES = 32

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def is_available() -> bool:
    """Whether Triton, which compiles the kernels, is installed."""
    return importlib.util.find_spec("triton") is not None


def wanted(group: Mapping[str, Any], param: Tensor) -> bool:
    """Whether a parameter's group leaves it to the kernels, on a device where they run."""
    if group["fused"] is None:
        # A learning rate on the device, and counts for CUDA graphs, are read by the plain code only.
        asked = not group["foreach"] and not group["capturable"] and not isinstance(group["lr"], Tensor)
        return asked and param.is_cuda and is_available()
    return bool(group["fused"])


def can_take(param: Tensor, of: Blocks, state: Mapping[str, Tensor] | None) -> bool:
    """Whether the kernels can work on a parameter: its dtype is narrow enough and its memory has no gaps."""
    if param.dtype not in _DTYPES or not (param.is_contiguous() or _is_channels_last(param, of)):
        return False
    return not state or state["exp_avg"].stride() == param.stride()


def _is_channels_last(param: Tensor, of: Blocks) -> bool:
    return of.kernel_dims > 0 and of.kernel_dims == param.dim() - 2 and param.movedim(1, -1).is_contiguous()


class FusedTensors:
    """Parameters of one device and dtype.

    Args:
        params: The parameters. Later calls take what belongs to them in the same order.
        blocks: The blocks of each.
        averaging: How each is averaged.
        positions: The numbers by which their probes are drawn.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        blocks: Sequence[Blocks],
        averaging: Sequence[Averaging],
        positions: Sequence[int],
    ) -> None:
        self.device = params[0].device
        self.dtype = params[0].dtype
        self.strides = [param.stride() for param in params]
        self.block_shapes = [of.block_shape for of in blocks]
        rows = [
            [*_layout(param, of), int(how == "signed"), position]
            for param, of, how, position in zip(params, blocks, averaging, positions, strict=True)
        ]
        counts = [row[1] for row in rows]
        self._layout = self._upload(torch.tensor(rows, dtype=torch.int64))
        self._of_elements = self._upload(_tiles([row[0] for row in rows], [_TILE] * len(rows)))
        self._of_blocks = self._upload(_tiles(counts, [_FLAT_TILE] * len(rows)))
        self._of_averages = self._upload(_tiles(counts, [_FLAT_TILE if row[6] == 1 else _ROWS for row in rows]))
        self._counts = counts
        self._pointers: dict[str, tuple[tuple[int, ...], Tensor]] = {}

    def update(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        hessian_rms: Sequence[Tensor],
        settings: Sequence[Sequence[float]],
    ) -> None:
        """Take one step, in place: the twin of :func:`adahessian.update.update_parameters`."""
        grads = [_strided(grad, strides) for grad, strides in zip(grads, self.strides, strict=True)]
        addresses, pointers = self._addresses("update", params, grads, exp_avgs, hessian_rms)
        _launch(
            "update",
            self._of_elements,
            pointers,
            self._layout,
            self._of_elements,
            self._upload(torch.tensor(settings, dtype=torch.float32)),
            ELEMENT=_element(self.dtype),
            ALIGNED=all(address % 16 == 0 for address in addresses),
            TILE=_TILE,
        )

    def draw(self, probes: Sequence[Tensor], keys: Sequence[int]) -> None:
        """Fill tensors with the signs that belong to keys, which lack the parameter's position only."""
        _, pointers = self._addresses("draw", probes)
        _launch(
            "draw",
            self._of_elements,
            pointers,
            self._layout,
            self._of_elements,
            self._upload(torch.tensor(keys, dtype=torch.int64)),
            ELEMENT=_element(self.dtype),
            TILE=_TILE,
        )

    def average(
        self, diagonal: Sequence[Tensor], gradients: Sequence[Tensor] | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Block averages, and for each tensor whether it is not finite: the twin of :meth:`Blocks.estimate`."""
        flags = torch.zeros(len(self.strides), dtype=torch.int32, device=self.device)
        flat = torch.empty(sum(self._counts), device=self.device)
        estimates = tuple(
            part.view(shape) for part, shape in zip(flat.split(self._counts), self.block_shapes, strict=True)
        )
        # The kernel reads all of them in the order of the parameter's memory.
        diagonal = [_strided(d, strides) for d, strides in zip(diagonal, self.strides, strict=True)]
        if gradients is not None:
            gradients = [
                _strided(g.to(self.dtype), strides) for g, strides in zip(gradients, self.strides, strict=True)
            ]
        _, pointers = self._addresses("average", diagonal, gradients or diagonal, estimates)
        _launch(
            "average",
            self._of_averages,
            pointers,
            self._layout,
            self._of_averages,
            flags,
            ELEMENT=_element(self.dtype),
            GRADIENTS=gradients is not None,
            TILE=_FLAT_TILE,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
        )
        return estimates, flags.unbind()

    def fold(
        self,
        hessian_rms: Sequence[Tensor],
        ages: Sequence[Tensor],
        dropped: Sequence[Tensor],
        estimates: Sequence[Tensor],
        flags: Sequence[Tensor],
        settings: Sequence[Sequence[float]],
    ) -> None:
        """Fold measurements into averages, in place: the twin of :func:`adahessian.update.update_hessian_rms`."""
        tensors = len(self.strides)
        weights = torch.empty(tensors, device=self.device)
        _, of_counts = self._addresses("weigh", ages, dropped, flags)
        _launch(
            "weigh",
            range(-(-tensors // _WEIGH_TILE)),
            of_counts,
            self._upload(torch.tensor(settings, dtype=torch.float32)),
            weights,
            tensors,
            TILE=_WEIGH_TILE,
        )
        _, of_values = self._addresses("fold", estimates, hessian_rms, flags)
        _launch("fold", self._of_blocks, of_values, self._layout, self._of_blocks, weights, TILE=_FLAT_TILE)

    def _addresses(self, kernel: str, *lists: Sequence[Tensor]) -> tuple[tuple[int, ...], Tensor]:
        """The addresses of tensors, on the device; those of the last call if nothing has moved."""
        addresses = tuple(tensor.data_ptr() for row in zip(*lists, strict=True) for tensor in row)
        known = self._pointers.get(kernel)
        if known is None or known[0] != addresses:
            known = addresses, self._upload(torch.tensor(addresses, dtype=torch.int64))
            self._pointers[kernel] = known
        return known

    def _upload(self, table: Tensor) -> Tensor:
        # From ordinary memory a copy would wait for all that was launched before.
        return (table.pin_memory() if self.device.type == "cuda" else table).to(self.device, non_blocking=True)


def _layout(param: Tensor, of: Blocks) -> list[int]:
    """The columns of ``layout`` that :mod:`adahessian.kernels` describes, as far as they depend on the shape."""
    sizes = [param.numel(), math.prod(of.block_shape)]
    if of.kernel_dims and not param.is_contiguous():
        kernel, channels = math.prod(of.shape[-of.kernel_dims :]), of.shape[1]
        return [*sizes, kernel * channels, channels, channels, 1, kernel, channels, 0]
    if of.row_length > 1 and of.shape[-1] % of.row_length:
        row, length = of.shape[-1], of.row_length
        return [*sizes, row, of.block_shape[-1], row, length, length, 1, 0]
    # Blocks of one size, one after the other.
    size = math.prod(of.shape[-of.kernel_dims :]) if of.kernel_dims else of.row_length
    return [*sizes, size, 1, size, size, size, 1, size // _ROW_OF_LANES if size % _ROW_OF_LANES == 0 else 0]


def _tiles(sizes: Sequence[int], steps: Sequence[int]) -> Tensor:
    """For each program its tensor and where in it to start."""
    parts = []
    for tensor, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        starts = torch.arange(0, size, step, dtype=torch.int64)
        parts.append(torch.stack([torch.full_like(starts, tensor), starts], dim=1))
    return torch.cat(parts)


def _strided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _element(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _launch(name: str, programs: Tensor | range, *arguments: Any, **constants: Any) -> None:
    from adahessian import kernels  # Triton is loaded on first use

    if len(programs):
        with torch.cuda.device_of(arguments[0]):
            getattr(kernels, name)[(len(programs),)](*arguments, **constants)
