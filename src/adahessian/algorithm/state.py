"""The state of one parameter: its keys, shapes and dtypes. The state of a sharded parameter is sharded alike.

step             number of steps taken, as in torch.optim.Adam
exp_avg          gradient momentum, in the parameter's dtype
hessian_rms      Hessian momentum D-bar, one value per block, in float32 or wider; inf before the first measurement
hessian_row,     in place of hessian_rms for factored curvature
hessian_column
hessian_square,  in place of hessian_rms for curvature that rotates: mean squares of a vector,
left_factor,     or the factors of a matrix and their inverse roots
right_factor,    with one row per row or column, which has the entries of its own block
left_root,
right_root
grad_square      running mean of the gradient's squared norm, per row, for curvature that rotates
measurements     number of measurements in the Hessian momentum
dropped          number of measurements dropped because of inf or NaN
"""

import math
from typing import Any

import torch
from torch import Tensor

from adahessian.algorithm.kronecker import Rotation, rotation_for
from adahessian.algorithm.shapes import CurvatureShape, shape_for
from adahessian.base.shards import is_sharded, local, rows_cut_by, rows_here, shard_like

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
    shape, block_size = tuple(param.shape), int(group["block_size"])
    if "damping" in group:
        return rotation_for(shape, block_size, group.get("kind", "kernel"), group.get("conv_groups", 1))
    return shape_for(shape, group["averaging"], block_size, parts=2 if param.is_complex() else 1)


def shape_here(param: Tensor, group: Group) -> CurvatureShape:
    """Return the shape of the curvature of this rank's shard."""
    whole = shape_of(param, group) if is_sharded(param) else None
    if isinstance(whole, Rotation):
        return whole if rows_cut_by(param) is None else whole.shard(*rows_here(param))
    return shape_of(local(param), group)


def curvature_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of the parts of a state that are always float32 or wider."""
    return torch.promote_types(param.dtype, torch.float32).to_real()


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
    if {*whole.stored, "measurements"} <= state.keys():
        return
    state.pop("measurements", None)
    for key, shape in whole.stored.items():
        if key in state:
            continue
        is_cut = is_sharded(param) and key not in whole.unsharded
        part_shape = (len(local(param)), *shape[1:]) if is_cut and rows_cut_by(param) else shape
        initial = 0.0 if isinstance(whole, Rotation) else math.inf
        part = torch.full(part_shape, initial, dtype=curvature_dtype(param), device=param.device)
        if key.endswith("root"):  # an identity, because without a measurement a step follows the momentum
            first = rows_here(param)[0] if is_cut and part.dim() == 2 else 0
            columns = torch.arange(first, first + part.shape[-2], device=param.device) % shape[-1]
            part.scatter_(-1, columns.expand(part.shape[:-1])[..., None], 1)
        state[key] = shard_like(param, part, shape) if is_cut else part


def measure_anew(state: State, param: Tensor, group: Group, shards: int) -> bool:
    """Delete a left factor that was cut into this many shards if its rows are now cut elsewhere. Return whether."""
    shape, cut_by = shape_of(param, group), rows_cut_by(param)
    rows = shape.form.cuts[0] if isinstance(shape, Rotation) and not shape.is_stack else None
    now = 1 if cut_by is None else cut_by[0].size(cut_by[1])
    if rows is None or "left_factor" not in state or rows.inside_blocks(shards) == rows.inside_blocks(now):
        return False
    del state["left_factor"], state["left_root"]
    init_state(state, param, group)
    state["measurements"] = new_counts("measurements", 1, param, group)[0]
    return True


def state_problem(state: State, param: Tensor, group: Group) -> str | None:
    """Return what is wrong with the shapes of a state and what to do about it, or None."""
    if "exp_avg" in state and is_sharded(state["exp_avg"]) != is_sharded(param):
        sharded, whole = ("parameter", "state") if is_sharded(param) else ("state", "parameter")
        return (
            f"state: the {sharded} of shape {tuple(param.shape)} is sharded over ranks, but its {whole} is not. Load "
            "the state with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
        )
    expected = {"sum": param.shape} if group["sparse"] else {"exp_avg": param.shape, **shape_of(param, group).stored}
    if other := {*CURVATURE_KEYS[:-2]} & state.keys() - expected.keys():
        return (
            f"state: {min(other)!r} of a parameter of shape {tuple(param.shape)} belongs to another averaging or "
            "optimizer. Keep the averaging that the state was saved with."
        )
    for key, shape in expected.items():
        if key in state and state[key].shape != shape:
            return (
                f"state: {key!r} of a parameter of shape {tuple(param.shape)} has shape {tuple(state[key].shape)} "
                f"instead of {tuple(shape)}. Load a checkpoint of this model, with its parameters in the same order "
                "and with the same block_size and averaging."
            )
    return None
