"""The state of one parameter: its keys, shapes and dtypes. The state of a sharded parameter is sharded alike.

step             number of steps taken, as in torch.optim.Adam
exp_avg          gradient momentum, in the parameter's dtype
hessian_rms      Hessian momentum D-bar, one value per block, in float32 or wider; inf before the first measurement
hessian_row,     in place of hessian_rms for factored curvature
hessian_column
measurements     number of measurements in the Hessian momentum
dropped          number of measurements dropped because of inf or NaN
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from adahessian.algorithm.kronecker import Matrix, Rotation, rotation_for
from adahessian.algorithm.shapes import CurvatureShape, shape_for
from adahessian.base.dtypes import accumulation_dtype
from adahessian.base.shards import is_sharded, local, shard_like

Group = dict[str, Any]
State = dict[str, Any]

# Optimizer.load_state_dict would cast these to the parameter's dtype. bfloat16 is not precise enough for them.
CURVATURE_KEYS = (
    *("hessian_rms", "hessian_row", "hessian_column", "hessian_square", "left_factor", "right_factor"),
    *("left_root", "right_root", "grad_square", "measurements", "dropped"),
)
COUNTS = ("step", "measurements", "dropped")


def shape_of(param: Tensor, group: Group) -> CurvatureShape:
    """Return the shape of a parameter's curvature. A complex parameter counts as a stack of two real ones."""
    if "damping" in group:
        return rotation_for(tuple(param.shape), group["block_size"], group.get("kind", "kernel"))
    return shape_for(param.shape, group, parts=2 if param.is_complex() else 1)


def curvature_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of the parts of a state that are always float32 or wider."""
    return accumulation_dtype(param.dtype).to_real()


def new_counts(name: str, number: int, param: Tensor, group: Group) -> Tensor:
    """Create zero counts for parameters like this one.

    Steps are counted on the host, where reading them needs no sync, unless the group is capturable.
    """
    if name == "step":
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        return torch.zeros(number, dtype=dtype, device=param.device if group["capturable"] else "cpu")
    return torch.zeros(number, dtype=curvature_dtype(param), device=param.device)


def init_state(state: State, param: Tensor, group: Group) -> None:
    """Create the missing entries of a state, except counts."""
    if "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    whole = shape_of(param, group)
    if isinstance(whole, Rotation):
        state.setdefault("grad_square", torch.zeros((), dtype=curvature_dtype(param), device=param.device))
    if {*whole.stored, "measurements"} <= state.keys():
        return
    state.pop("measurements", None)
    for key, shape in shape_of(local(param), group).stored.items():
        initial = 0.0 if isinstance(whole, Rotation) else math.inf
        part = torch.full(shape, initial, dtype=curvature_dtype(param), device=param.device)
        if isinstance(whole, Matrix) and key.endswith("root"):
            part.diagonal(dim1=-2, dim2=-1).fill_(1)  # without a measurement a step follows the momentum
        # The columns of a factored shape are the same on every rank.
        is_cut = is_sharded(param) and key != "hessian_column"
        state[key] = shard_like(param, part, whole.stored[key]) if is_cut else part


def state_problem(state: State, param: Tensor, group: Group) -> str | None:
    """Return what is wrong with the shapes of a state and what to do about it, or None."""
    if "exp_avg" in state and is_sharded(state["exp_avg"]) != is_sharded(param):
        sharded, whole = ("parameter", "state") if is_sharded(param) else ("state", "parameter")
        return (
            f"state: the {sharded} of shape {tuple(param.shape)} is sharded over ranks, but its {whole} is not. Load "
            "the state with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
        )
    needed = {} if group["sparse"] else shape_of(param, group).stored
    if not group["sparse"] and (other := {*CURVATURE_KEYS[:-2]} & state.keys() - {*needed, "grad_square"}):
        return (
            f"state: {min(other)!r} of a parameter of shape {tuple(param.shape)} belongs to another averaging or "
            "optimizer. Keep the averaging that the state was saved with."
        )
    expected = {"sum": param.shape} if group["sparse"] else {"exp_avg": param.shape, **needed}
    for key, shape in expected.items():
        if key in state and state[key].shape != shape:
            return (
                f"state: {key!r} of a parameter of shape {tuple(param.shape)} has shape {tuple(state[key].shape)} "
                f"instead of {tuple(shape)}. Load a checkpoint of this model, with its parameters in the same order "
                "and with the same block_size and averaging."
            )
    return None
