"""The settings of a parameter group, and what they may be."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal, get_args

from torch import Tensor

from adahessian.averaging import AVERAGINGS, LAYOUTS

Beta2Per = Literal["measurement", "step"]


def validate(settings: Mapping[str, Any]) -> None:
    """Check every setting of a parameter group.

    Raises:
        ValueError: If one is out of its range; the message says which, what it was and what it may be.
    """
    _validate_lr(settings["lr"], foreach=settings["foreach"], capturable=settings["capturable"])
    betas = settings["betas"]
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(is_number(b) and 0 <= b < 1 for b in betas)):
        raise ValueError(f"Invalid betas: {betas!r}. They must be two floats, each at least 0 and below 1.")
    for name in ("eps", "weight_decay"):
        if not (is_number(settings[name]) and 0 <= settings[name] < math.inf):
            raise ValueError(f"Invalid {name} value: {settings[name]!r}. It must be a finite number, 0 or more.")
    if not (is_number(settings["hessian_power"]) and 0 <= settings["hessian_power"] <= 1):
        raise ValueError(f"Invalid hessian_power value: {settings['hessian_power']!r}. It must be from 0 to 1.")
    for name, least in (("block_size", 1), ("num_probes", 1), ("update_every", 1), ("warmup_steps", 0)):
        if not (is_integer(settings[name]) and settings[name] >= least):
            raise ValueError(f"Invalid {name} value: {settings[name]!r}. It must be an integer, {least} or more.")
    if not is_integer(settings["seed"]):
        raise ValueError(f"Invalid seed value: {settings['seed']!r}. It must be an integer.")
    for name in ("steady_start", "maximize", "capturable"):
        if not isinstance(settings[name], bool):
            raise ValueError(f"Invalid {name} value: {settings[name]!r}. It must be True or False.")
    for name in ("foreach", "fused"):
        if not (settings[name] is None or isinstance(settings[name], bool)):
            raise ValueError(f"Invalid {name} value: {settings[name]!r}. It must be True, False or None.")
    if settings["fused"]:
        _validate_fused(settings)
    for name, choices in (("blocks", LAYOUTS), ("averaging", AVERAGINGS), ("beta2_per", get_args(Beta2Per))):
        if settings[name] not in choices:
            raise ValueError(f"Invalid {name} value: {settings[name]!r}. It must be one of {', '.join(choices)}.")


def _validate_lr(lr: Any, *, foreach: bool | None, capturable: bool) -> None:
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"Tensor lr must be 1-element, but has the shape {tuple(lr.shape)}.")
        if foreach and not capturable:
            raise ValueError("lr as a Tensor is not supported for capturable=False and foreach=True")
    elif not is_number(lr):
        raise ValueError(f"Invalid learning rate: {lr!r}. It must be a float or a tensor of one element.")
    if not lr >= 0:
        raise ValueError(f"Invalid learning rate: {lr}. It must be 0 or more.")


def _validate_fused(settings: Mapping[str, Any]) -> None:
    if settings["foreach"]:
        raise ValueError("fused and foreach cannot both be True: choose one, or leave both to the device with None")
    if settings["capturable"] or isinstance(settings["lr"], Tensor):
        raise ValueError("fused=True takes lr as a float and capturable=False; foreach has neither limit")
    if importlib.util.find_spec("triton") is None:
        raise ValueError("fused=True needs Triton, which compiles the kernels: install it, or leave fused=None")


def is_number(value: object) -> bool:
    """Whether this is a real number; truth values are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Whether this is an integer; truth values are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)
