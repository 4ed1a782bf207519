"""Numbers about an optimizer, to log every few steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adahessian.algorithm.kronecker import Matrix, Rotation, condition, rotated_update
from adahessian.algorithm.shapes import Diagonal, as_real
from adahessian.algorithm.state import Group, State, shape_of
from adahessian.base.shards import gather
from adahessian.optimizer import AdaHessian

Reading = dict[str, Any]  # numbers, or one-element tensors that have not been read yet


def diagnose(optimizer: AdaHessian, model: nn.Module | None = None, *, per_parameter: bool = False) -> dict[str, float]:
    r"""Summarize the optimizer's state in a dict of numbers, ready for ``wandb.log``.

    - ``steps``, ``measurements``, ``staleness`` (steps taken with the newest measurement) and
      ``dropped_measurements`` (per parameter, because of inf or NaN), with a warning if their number has grown.
    - ``grad_norm``, ``param_norm`` and ``update_norm``, the norm of the newest step
      :math:`\eta \, \hat m / (\bar D^k + \epsilon)` without weight decay. ``update_ratio`` is ``update_norm`` divided
      by ``param_norm``. ``update_ratio_max`` is the largest ratio of a single parameter. ``update_rms`` is the root
      mean square of the newest step divided by ``lr``.
    - ``hessian_rms``, the root mean square of :math:`\bar D` where it has been measured. For AdaHessianKron, it is the
      root mean square of :math:`H z`.
    - ``at_eps``, the fraction of elements whose :math:`\bar D^k` is below :math:`\epsilon`, which then sets the step.
    - ``condition``, the largest condition number of a damped factor, and ``damped``, the fraction of directions with
      less curvature than the damping (both for AdaHessianKron, whose ``staleness`` is also reported per parameter).
    - ``unmeasured``, the fraction of elements that no measurement has reached yet. AdaHessian does not move them.

    Numbers that have no value yet are left out, and so are groups with ``sparse=True``. The call synchronizes once per
    device, and for AdaHessianKron once per matrix. If parameters are sharded, all ranks must call it, and all get the
    numbers of the whole parameters.

    Args:
        optimizer: The optimizer.
        model: The model whose parameter names to use. The default is the names in the groups, or numbers.
        per_parameter: Add the numbers of each parameter as ``"<what>/<name>"``, with the largest ``update_ratio``
            first. ``decay_ratio`` is the norm of the newest weight decay divided by ``update_norm``.

    Raises:
        TypeError: If ``optimizer`` is not an AdaHessian, or ``model`` is not a ``torch.nn.Module``.
        ValueError: If the model has none of the optimizer's parameters.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = AdaHessian(model.parameters())
        >>> model(torch.ones(8, 3)).square().mean().backward(create_graph=optimizer.curvature_due)
        >>> optimizer.step()
        >>> numbers = diagnose(optimizer)
        >>> numbers["unmeasured"], numbers["steps"]
        (0.0, 1.0)
    """
    if not isinstance(optimizer, AdaHessian):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}. Pass the AdaHessian itself.")
    if not (model is None or isinstance(model, nn.Module)):
        raise TypeError(f"model is a {type(model).__name__}. Pass a torch.nn.Module or None.")
    members = list(_named_parameters(optimizer, model))
    readings = [_measure(param, group, optimizer.state.get(param, {})) for _, param, group in members]
    _read_tensors(readings)
    for (_, _, group), read in zip(members, readings, strict=True):
        if read["step"] and "direction" in read:
            read["direction"] /= 1 - group["betas"][0] ** read["step"]
            read["update_norm"] = read["lr"] * read["direction"]
            if group["weight_decay"]:
                read["decay_norm"] = read["lr"] * group["weight_decay"] * read["param_norm"]
    rows = [(name, _summarize([read])) for (name, _, _), read in zip(members, readings, strict=True)]
    rows.sort(key=lambda row: row[1].get("update_ratio", 0.0), reverse=True)
    groups = optimizer._measured_groups()
    counts = ("steps", "measurements", "staleness")
    report = {count: float(max((group[count] for group in groups), default=0)) for count in counts}
    report["dropped_measurements"] = dropped = sum(read["dropped"] for read in readings)
    report |= _summarize(readings)
    report.pop("decay_ratio", None)  # reported per parameter only
    if "update_ratio" in report:
        report["update_ratio_max"] = rows[0][1].get("update_ratio", 0.0)
    if per_parameter:
        report |= {f"{what}/{name}": value for name, values in rows for what, value in values.items()}
    if dropped > optimizer._dropped_seen:
        warnings.warn(
            f"{int(dropped)} curvature measurements of single parameters were inf or NaN and have been dropped. Check "
            "the batches and the loss for inf or NaN, use a higher precision if they overflow, and lower lr if the "
            "loss diverges.",
            stacklevel=2,
        )
    optimizer._dropped_seen = int(dropped)
    return report


def _named_parameters(optimizer: AdaHessian, model: nn.Module | None) -> Iterator[tuple[str, Tensor, Group]]:
    """Iterate over parameters that are not empty, named by the model, by their group or by numbers."""
    # Names should not depend on whether the model has been compiled.
    named = () if model is None else model.named_parameters()
    names = {param: name.replace("_orig_mod.", "") for name, param in named}
    if names and not any(param in names for group in optimizer.param_groups for param in group["params"]):
        raise ValueError("model has none of the optimizer's parameters. Pass the model that the optimizer trains.")
    for i, group in enumerate(optimizer.param_groups):
        for j, param in enumerate(group["params"]):
            if param.numel() and not group["sparse"]:
                own_name = group["param_names"][j] if "param_names" in group else f"group{i}.{j}"
                yield names.get(param, own_name), param, group


@torch.no_grad()
def _measure(param: Tensor, group: Group, state: State) -> Reading:
    """Compute the numbers of a parameter, with means over its blocks."""
    found = {"size": param.numel(), "lr": group["lr"], "unmeasured": 1.0}
    found |= {key: state.get(key, 0.0) for key in ("step", "dropped")}
    found["param_norm"] = _norm(param)
    if param.grad is not None:
        found["grad_norm"] = _norm(param.grad)
    shape = shape_of(param, group)
    if isinstance(shape, Rotation) and state.get("step"):
        stored, beta1 = [gather(state[key]) for key in shape.stored], group["betas"][0]
        update = rotated_update(gather(state["exp_avg"]), shape, stored, state["step"].item(), beta1)
        found["unmeasured"] = state["measurements"].eq(0).to(torch.float32)
        found["direction"] = _norm(update) * (1 - beta1 ** state["step"].item())
        squares = stored[0]
        if isinstance(shape.form, Matrix):
            squares = shape.form.rows.split(squares).diagonal(dim1=-2, dim2=-1) * shape.form.columns.length
        found |= {"squares": squares.sum() / param.numel(), "staleness": group["staleness"]}
        found |= condition(shape, stored, 1 / state["measurements"].clamp(1, 1 / group["damping"]))
        return found
    if isinstance(shape, Diagonal) and shape.stored.keys() <= state.keys():
        stored = [gather(state[key]) for key in shape.stored]
        rms = stored[0] if len(stored) == 1 else shape.denominator(stored, 1, 0.0)
        unmeasured = rms.isinf()
        exp_avg = shape.view(as_real(gather(state["exp_avg"])).to(rms.dtype))
        found |= {
            "squares": rms.masked_fill(unmeasured, 0.0).square().mean(),
            "unmeasured": unmeasured.to(rms).mean(),
            "at_eps": rms.pow(group["hessian_power"]).lt(group["eps"]).to(rms).mean(),
            "direction": _norm(exp_avg / shape.denominator(stored, group["hessian_power"], group["eps"])),
        }
    return found


def _summarize(readings: Sequence[Reading]) -> dict[str, float]:
    """Summarize the readings of some parameters."""
    values: dict[str, float] = {}
    for what in ("grad_norm", "param_norm", "update_norm", "decay_norm"):
        if norms := [read[what] for read in readings if what in read]:
            values[what] = math.hypot(*norms)
    for what in ("condition", "staleness"):
        if known := [read[what] for read in readings if what in read]:
            values[what] = max(known)
    for share in ("at_eps", "damped", "unmeasured"):
        if known := [read for read in readings if share in read]:
            values[share] = sum(read["size"] * read[share] for read in known) / sum(read["size"] for read in known)
    known = [read for read in readings if "squares" in read]
    if measured := sum(read["size"] * (1 - read["unmeasured"]) for read in known):
        values["hessian_rms"] = math.sqrt(sum(read["size"] * read["squares"] for read in known) / measured)
    update, decay = values.get("update_norm"), values.pop("decay_norm", None)
    if moved := [read for read in readings if "update_norm" in read]:
        norm = math.hypot(*(read["direction"] for read in moved))
        values["update_rms"] = norm / math.sqrt(sum(read["size"] for read in moved))
    if update is not None and values["param_norm"]:
        values["update_ratio"] = update / values["param_norm"]
    if update and decay is not None:
        values["decay_ratio"] = decay / update
    return values


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gather(tensor), dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm


def _read_tensors(readings: Sequence[Reading]) -> None:
    """Replace tensors with numbers, in one transfer per device."""
    tensors = [(read, what, value) for read in readings for what, value in read.items() if isinstance(value, Tensor)]
    for device in {tensor.device for _, _, tensor in tensors}:
        here = [each for each in tensors if each[-1].device == device]
        joined = torch.stack([tensor.detach().reshape(()).to(torch.float32) for _, _, tensor in here])
        for (read, what, _), number in zip(here, joined.tolist(), strict=True):
            read[what] = number
