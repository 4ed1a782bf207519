"""Lists of tensors for the fused kernels: one launch for all of them, whatever their shapes.

The kernels, and the tables that they read, are in :mod:`adahessian.kernels`. What they compute is defined by their
plain twins in :mod:`adahessian.update`, :mod:`adahessian.averaging` and :mod:`adahessian.curvature.probes`.
"""

from __future__ import annotations

import importlib.util
import math
import operator
import os
import shutil
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from adahessian.averaging import Averaging, Blocks, Estimate
from adahessian.curvature.probes import as_int64
from adahessian.state import Group, State
from adahessian.state import blocks as blocks_in

# Elements a program updates, blocks a program folds, blocks a program averages, tensors a program weighs.
_TILE = 1024
_FLAT_TILE = 1024
_ROWS = 32
_COLUMNS = 32
_WEIGH_TILE = 128
_ROW_OF_LANES = 32

# Lists of parameters whose tables are kept: those of each group, of a measurement and of a draw, and then some.
_MOST_TABLES = 64

# A parameter, its group, and its position among all parameters.
Member = tuple[Tensor, Group, int]

_DTYPE = operator.attrgetter("dtype")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
        self.blocks = blocks  # kept, as tables are known by the identity of these
        self._uploaded: dict[str, tuple[list[list[int]], Tensor, bool]] = {}

    def update(
        self,
        params: Sequence[Tensor],
        gradients: Sequence[Tensor],
        of_params: Sequence[State],
        *,
        step: float,
        lr: float,
        beta1: float,
        eps: float,
        weight_decay: float,
        hessian_power: float,
        maximize: bool,
    ) -> None:
        """Take one step, in place: the twin of :func:`adahessian.update.update_parameters`."""
        grads = self._like_params(gradients, self.dtype)
        exp_avgs = [state["exp_avg"] for state in of_params]
        rms = [state["hessian_rms"] for state in of_params]
        pointers, aligned = self._addresses("update", params, grads, exp_avgs, rms)
        _launch(
            "update",
            self._of_elements,
            pointers,
            self._layout,
            self._of_elements,
            -lr / (1 - beta1**step),
            1 - lr * weight_decay,
            1 - beta1,
            eps,
            hessian_power,
            -1.0 if maximize else 1.0,
            ELEMENT=_element(self.dtype),
            ALIGNED=aligned,
            TILE=_TILE,
        )
        # Autograd notices what its own operations write, and must be told of the kernel.
        torch.autograd.graph.increment_version([*params, *exp_avgs])

    def draw(self, probes: Sequence[Tensor], keys: Sequence[int]) -> None:
        """Fill tensors with the signs that belong to keys, which lack the parameter's position only."""
        pointers, _ = self._addresses("draw", probes)
        # A launch has one key, and groups may differ in theirs: the kernel leaves out what is not of its key.
        for key in dict.fromkeys(keys):
            whose, _ = self._upload_once("keys", [[int(own == key) for own in keys]])
            _launch(
                "draw",
                self._of_elements,
                pointers,
                self._layout,
                self._of_elements,
                whose,
                as_int64(key),
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
        diagonal = self._like_params(diagonal, torch.float32)
        if gradients is not None:
            gradients = self._like_params(gradients, self.dtype)
        pointers, _ = self._addresses("average", diagonal, gradients or diagonal, estimates)
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
        self, of_params: Sequence[State], estimates: Sequence[Estimate], *, beta2: float, new_age: float | None
    ) -> None:
        """Fold measurements into averages, in place: the twin of :func:`adahessian.update.update_hessian_rms`.

        Args:
            of_params: The states.
            estimates: The measurements.
            beta2: Decay of the Hessian momentum.
            new_age: The age that averages have now; None if it grows by one.
        """
        weights = torch.empty(len(self.strides), device=self.device)
        flags = [estimate.not_finite.to(torch.int32) for estimate in estimates]
        pointers, _ = self._addresses(
            "weigh", [state["hessian_age"] for state in of_params], [state["dropped"] for state in of_params], flags
        )
        _launch(
            "weigh",
            range(-(-len(self.strides) // _WEIGH_TILE)),
            pointers,
            weights,
            len(self.strides),
            math.log(beta2) if beta2 > 0 else -math.inf,
            -1.0 if new_age is None else new_age,
            TILE=_WEIGH_TILE,
        )
        values = [estimate.values for estimate in estimates]
        pointers, _ = self._addresses("fold", values, [state["hessian_rms"] for state in of_params], flags)
        _launch("fold", self._of_blocks, pointers, self._layout, self._of_blocks, weights, TILE=_FLAT_TILE)

    def _like_params(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Tensors in a dtype, and in the order of their parameters' memory."""
        # As they are, nearly always. A call of the interpreter for each would count: a model may have hundreds.
        if list(map(Tensor.stride, tensors)) == self.strides and set(map(_DTYPE, tensors)) == {dtype}:
            return list(tensors)
        return [
            tensor if tensor.dtype is dtype and tensor.stride() == own else _strided(tensor.to(dtype), own)
            for tensor, own in zip(tensors, self.strides, strict=True)
        ]

    def _addresses(self, kernel: str, *lists: Sequence[Tensor]) -> tuple[Tensor, bool]:
        """The addresses of tensors, list after list, on the device, and whether all are multiples of 16."""
        return self._upload_once(kernel, [list(map(Tensor.data_ptr, tensors)) for tensors in lists])

    def _upload_once(self, name: str, values: list[list[int]]) -> tuple[Tensor, bool]:
        """Numbers on the device, and whether all are multiples of 16; those of the last call if they are the same."""
        known = self._uploaded.get(name)
        if known is None or known[0] != values:
            table = torch.tensor(values, dtype=torch.int64).t().contiguous()
            known = self._uploaded[name] = values, self._upload(table), not (table % 16).any()
        return known[1], known[2]

    def _upload(self, table: Tensor) -> Tensor:
        # From ordinary memory a copy would wait for all that was launched before.
        return (table.pin_memory() if self.device.type == "cuda" else table).to(self.device, non_blocking=True)


class Fusion:
    """Finds which parameters the kernels can take, and keeps the tables of each list of them."""

    def __init__(self) -> None:
        self._tables: dict[object, FusedTensors] = {}

    def split(
        self, members: Sequence[Member], of_members: Sequence[State] | None = None
    ) -> tuple[list[tuple[FusedTensors, list[int]]], list[int]]:
        """Which parameters the kernels take, in sets that share a launch, and which are left to plain code."""
        sets: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        plain = []
        for i, (param, group, _) in enumerate(members):
            state = of_members[i] if of_members is not None else None
            if _is_wanted(group, param) and _can_take(param, blocks_in(param, group), state):
                sets.setdefault((param.device, param.dtype), []).append(i)
            else:
                plain.append(i)
        return [(self.table([members[i] for i in chosen]), chosen) for chosen in sets.values()], plain

    def table(self, members: Sequence[Member]) -> FusedTensors:
        """Tables for parameters that share a launch, made once for each list of them."""
        blocks = [blocks_in(param, group) for param, group, _ in members]
        key = tuple(
            (id(param), param.stride(), param.dtype, param.device, id(of), group["averaging"], position)
            for (param, group, position), of in zip(members, blocks, strict=True)
        )
        if key not in self._tables:
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            self._tables[key] = FusedTensors(
                [param for param, _, _ in members],
                blocks,
                [group["averaging"] for _, group, _ in members],
                [position for _, _, position in members],
            )
        return self._tables[key]


def _is_wanted(group: Group, param: Tensor) -> bool:
    """Whether a parameter's group leaves it to the kernels, on a device where they run."""
    if group["fused"] is None:
        # A learning rate on the device, and counts for CUDA graphs, are read by the plain code only.
        asked = not group["foreach"] and not group["capturable"] and not isinstance(group["lr"], Tensor)
        return asked and param.is_cuda and _has_triton(param.device)
    if group["fused"] and not (param.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        raise RuntimeError(f"fused=True needs parameters on CUDA, but one is on {param.device}: leave it at None")
    return bool(group["fused"])


@cache
def _has_triton(device: torch.device) -> bool:
    """Whether Triton is there, knows the GPU, and finds the C compiler by which it makes its launchers."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device) < (7, 0):
        return False
    return bool(os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang"))))


def _can_take(param: Tensor, of: Blocks, state: State | None) -> bool:
    """Whether the kernels can work on a parameter: its dtype is narrow enough and its memory has no gaps."""
    if is_traceable_wrapper_subclass(param) or param.dtype not in _DTYPES:
        return False
    if not (param.is_contiguous() or _is_channels_last(param, of)):
        return False
    if not state:
        return True
    exp_avg = state["exp_avg"]
    alike = exp_avg.dtype == param.dtype and exp_avg.device == param.device and exp_avg.stride() == param.stride()
    return bool(alike and state["hessian_rms"].is_contiguous())


def _is_channels_last(param: Tensor, of: Blocks) -> bool:
    return of.kernel_dims > 0 and of.kernel_dims == param.dim() - 2 and param.movedim(1, -1).is_contiguous()


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
    # In a dimension of size 1 a stride means nothing.
    if all(own == other or size == 1 for own, other, size in zip(tensor.stride(), strides, tensor.shape, strict=True)):
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
