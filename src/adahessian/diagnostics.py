"""What an optimizer is doing, in numbers to log every so many steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adahessian import state as states
from adahessian.curvature.hutchinson import accumulation_dtype, as_reals
from adahessian.curvature.passes import CurvaturePass
from adahessian.optimizer import AdaHessian
from adahessian.sharding import whole
from adahessian.sparse import DenseAndSparse
from adahessian.state import Group, State


def diagnose(
    source: CurvaturePass[Any] | AdaHessian | DenseAndSparse, model: nn.Module | None = None
) -> dict[str, float]:
    r"""Tell what the optimizer's state says, parameter by parameter and in all.

    For each parameter, under ``"<what>/<name>"``:

    - ``param_norm`` and ``grad_norm``, the latter where there is a gradient;
    - ``hessian_rms``, the root mean square of :math:`\bar D` over the blocks that have been measured;
    - ``update_norm``, the norm of the newest step, :math:`\eta \, \hat m / (\bar D^k + \epsilon)`, weight decay apart,
      and ``update_ratio``, the same divided by ``param_norm``;
    - ``decay_ratio``, where weights decay: :math:`\eta \lambda` times ``param_norm``, which is what weight decay
      :math:`\lambda` moves, divided by ``update_norm``. Where the curvature is large, steps are small and decay is not:
      a training loss that stops falling early may be held up by it;
    - ``at_eps``, the share of blocks whose :math:`\bar D^k` is below :math:`\epsilon`, so that :math:`\epsilon` decides
      their step rather than the curvature;
    - ``unmeasured``, the share of blocks that take no step because no measurement has touched them yet.

    And in all: ``steps``, ``measurements``, ``staleness`` (steps taken with the newest measurement),
    ``dropped_measurements`` and, of a curvature pass, ``curvature_seconds``.

    What a parameter has no value for yet is left out. Reading waits for the device, once. Of sharded parameters all
    ranks ask together, and have the numbers of the whole.

    Args:
        source: The curvature pass, or the optimizer; of a :class:`adahessian.DenseAndSparse`, the dense layers.
        model: The model whose names parameters get. A curvature pass knows it; without any, names are those of named
            parameters, as :func:`adahessian.param_groups` gives them, or numbers.

    Returns:
        Numbers by name, ready for ``wandb.log`` or one ``SummaryWriter.add_scalar`` each.

    Raises:
        TypeError: If it is given anything else.
        ValueError: If the model has none of the optimizer's parameters.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = AdaHessian(model.parameters())
        >>> model(torch.ones(8, 3)).square().mean().backward(create_graph=optimizer.curvature_due)
        >>> optimizer.step()
        >>> found = diagnose(optimizer, model)
        >>> found["unmeasured/weight"], found["steps"]
        (0.0, 1.0)
    """
    optimizer = source.optimizer if isinstance(source, CurvaturePass) else source
    optimizer = optimizer.dense if isinstance(optimizer, DenseAndSparse) else optimizer
    model = source.model if isinstance(source, CurvaturePass) and model is None else model
    if not isinstance(optimizer, AdaHessian) or not (model is None or isinstance(model, nn.Module)):
        found = ", ".join(type(each).__name__ for each in (source, model) if each is not None)
        raise TypeError(f"diagnose takes a curvature pass or an AdaHessian, and a torch.nn.Module, but got {found}")

    members = list(_named_parameters(optimizer, model))
    quantities = [_quantities(param, group, optimizer.state.get(param, {})) for _, param, group in members]
    numbers = iter(_read([tensor for each in quantities for tensor in each.values()]))
    of_params = [{what: next(numbers) for what in each} for each in quantities]

    report: dict[str, float] = {}
    for (name, _, group), values in zip(members, of_params, strict=True):
        report |= {f"{what}/{name}": number for what, number in _per_parameter(values, group).items()}
    for count in ("steps", "measurements", "staleness"):
        report[count] = float(max((group[count] for group in optimizer.param_groups), default=0))
    report["dropped_measurements"] = sum(values.get("dropped", 0.0) for values in of_params)
    if isinstance(source, CurvaturePass):
        report["curvature_seconds"] = source.seconds
    return report


def _named_parameters(optimizer: AdaHessian, model: nn.Module | None) -> Iterator[tuple[str, Tensor, Group]]:
    """Each parameter that has elements, by the model's name for it, that of its group, or its numbers."""
    # A compiled model's names begin otherwise: its curves are to line up with those of the model as it is.
    named = [] if model is None else model.named_parameters()
    of_model = {param: name.replace("_orig_mod.", "") for name, param in named}
    members = [
        (param, group, group.get("param_names", [f"group{i}.{j}" for j in range(len(group["params"]))])[j])
        for i, group in enumerate(optimizer.param_groups)
        for j, param in enumerate(group["params"])
    ]
    if of_model and not any(param in of_model for param, _, _ in members):
        raise ValueError("the model has none of the optimizer's parameters: is it another model, or a copy?")
    for param, group, own_name in members:
        if param.numel():
            yield of_model.get(param, own_name), param, group


@torch.no_grad()
def _quantities(param: Tensor, group: Group, state: State) -> dict[str, Tensor]:
    """What is to be read of a parameter, each a tensor of one element, on whatever device."""
    found = {"param_norm": _norm(whole(param))}
    if param.grad is not None:
        found["grad_norm"] = _norm(whole(param.grad))
    if state:
        rms = whole(state["hessian_rms"])
        v = rms if group["hessian_power"] == 1 else rms.pow(group["hessian_power"])
        unmeasured = rms.isinf()
        of = states.blocks(param, group)
        exp_avg = as_reals(whole(state["exp_avg"])).to(rms.dtype)
        found |= {
            "squares": rms.masked_fill(unmeasured, 0.0).square().mean(),
            "unmeasured": unmeasured.to(rms).mean(),
            "at_eps": v.lt(group["eps"]).to(rms).mean(),
            "direction": _norm(of.view(exp_avg) / of.expand(v + group["eps"])),
            "step": state["step"],
            "dropped": state["dropped"],
        }
        if isinstance(group["lr"], Tensor):
            found["lr"] = group["lr"]
    return found


def _per_parameter(values: dict[str, float], group: Group) -> dict[str, float]:
    """From what was read to what is reported."""
    report: dict[str, float] = {what: values[what] for what in ("param_norm", "grad_norm", "at_eps") if what in values}
    report["unmeasured"] = values.get("unmeasured", 1.0)
    if report["unmeasured"] < 1:
        report["hessian_rms"] = math.sqrt(values["squares"] / (1 - values["unmeasured"]))
    if values.get("step"):
        lr = values["lr"] if "lr" in values else group["lr"]
        report["update_norm"] = lr * values["direction"] / (1 - group["betas"][0] ** values["step"])
        if values["param_norm"]:
            report["update_ratio"] = report["update_norm"] / values["param_norm"]
        if group["weight_decay"] and report["update_norm"]:
            report["decay_ratio"] = lr * group["weight_decay"] * values["param_norm"] / report["update_norm"]
    return report


def _norm(tensor: Tensor) -> Tensor:
    real = as_reals(tensor)
    norm: Tensor = torch.linalg.vector_norm(real, dtype=accumulation_dtype(real.dtype))
    return norm


def _read(tensors: Sequence[Tensor]) -> list[float]:
    """The values of tensors of one element, by one transfer from each device."""
    numbers = [0.0] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        here = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        joined = torch.stack([tensors[i].detach().reshape(()).to(torch.float32) for i in here])
        for i, number in zip(here, joined.tolist(), strict=True):
            numbers[i] = number
    return numbers
