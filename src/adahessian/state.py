"""The state of one parameter: what it holds, in which shapes and dtypes. A parameter's shards have shards of state.

step         steps taken, as in torch.optim.Adam
exp_avg      gradient momentum, in the parameter's dtype
hessian_rms  Hessian momentum D-bar, one value a block, never narrower than float32; infinite before the first
             measurement
hessian_age  how often hessian_rms has been decayed
dropped      measurements that were not finite
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from adahessian.averaging import Blocks, blocks_of
from adahessian.curvature.hutchinson import accumulation_dtype
from adahessian.sharding import is_sharded, local, sharded_like

Group = dict[str, Any]
State = dict[str, Any]

# Optimizer.load_state_dict would cast these to the parameter's dtype, which ruins them in bfloat16.
KEEP_THEIR_DTYPE = ("hessian_rms", "hessian_age", "dropped")


def blocks(param: Tensor, group: Group) -> Blocks:
    """The blocks over which a parameter's curvature is averaged; a complex parameter counts as a stack of two."""
    return blocks_of(param.shape, group["blocks"], group["block_size"], parts=2 if param.is_complex() else 1)


def own_dtype(param: Tensor) -> dict[str, Any]:
    """Dtype and device of the state that does not follow the parameter's dtype."""
    return {"dtype": accumulation_dtype(param.dtype).to_real(), "device": param.device}


def step_device(param: Tensor, group: Group) -> torch.device:
    """As in torch.optim.Adam, the step is on the host, where reading it is free, unless a graph is to be captured."""
    return param.device if group["capturable"] else torch.device("cpu")


def complete(state: State, param: Tensor, group: Group) -> None:
    """Make what a state lacks: all of it at the first step, and new keys after loading an older checkpoint."""
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    step = state.get("step", 0.0)
    if not isinstance(step, Tensor):
        state["step"] = torch.full((), float(step), dtype=dtype, device=step_device(param, group))
    if "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    if "hessian_rms" not in state or "hessian_age" not in state:
        shard = torch.full(blocks(local(param), group).block_shape, math.inf, **own_dtype(param))
        whole_shape = blocks(param, group).block_shape
        state["hessian_rms"] = sharded_like(param, shard, whole_shape) if is_sharded(param) else shard
        state["hessian_age"] = torch.zeros((), **own_dtype(param))
    if "dropped" not in state:
        state["dropped"] = torch.zeros((), **own_dtype(param))


def misfit(state: State, param: Tensor, of: Blocks) -> str | None:
    """What is wrong with the shapes of a state, if anything."""
    if "exp_avg" in state and is_sharded(state["exp_avg"]) != is_sharded(param):
        spread, whole = ("parameter", "state") if is_sharded(param) else ("state", "parameter")
        return (
            f"the {spread} of shape {tuple(param.shape)} is spread over ranks, but its {whole} is not: load such a "
            "state with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    for key, shape in (("exp_avg", param.shape), ("hessian_rms", of.block_shape)):
        if key in state and state[key].shape != shape:
            return (
                f"the state {key!r} of a parameter of shape {tuple(param.shape)} has the shape "
                f"{tuple(state[key].shape)}, but needs {tuple(shape)}. It belongs to another model or to other blocks: "
                "load a checkpoint of this model, with its parameters in the same order, and leave block_size and "
                "blocks as they were"
            )
    return None
