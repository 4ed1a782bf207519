"""Validation of a parameter group's options."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from adahessian.algorithm.shapes import AVERAGINGS


def validate(options: Mapping[str, Any]) -> None:
    """Raise a ValueError if an option of a parameter group is out of range."""
    lr, betas, fused = options["lr"], options["betas"], options["fused"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, but has shape {tuple(lr.shape)}. Pass one value per group.")
    if not (isinstance(lr, Tensor) or is_number(lr)) or not lr >= 0:
        raise ValueError(f"lr={lr!r} is invalid. Pass a non-negative float or one-element tensor.")
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(is_number(b) and 0 <= b < 1 for b in betas)):
        raise ValueError(f"betas={betas!r} is invalid. Pass two floats, each at least 0 and below 1.")
    for name in ("eps", "weight_decay"):
        if not (is_number(options[name]) and 0 <= options[name] < math.inf):
            raise ValueError(f"{name}={options[name]!r} is invalid. Pass a finite, non-negative number.")
    if not (is_number(options["hessian_power"]) and 0 <= options["hessian_power"] <= 1):
        raise ValueError(f"hessian_power={options['hessian_power']!r} is invalid. Pass a number from 0 to 1.")
    for name, least in (("block_size", 1), ("num_probes", 1), ("curvature_every", 1), ("curvature_warmup", 0)):
        if not (is_integer(options[name]) and options[name] >= least):
            raise ValueError(f"{name}={options[name]!r} is invalid. Pass an integer of at least {least}.")
    if "damping" in options and not (is_number(options["damping"]) and 0 < options["damping"] <= 1):
        raise ValueError(f"damping={options['damping']!r} is invalid. Pass a number above 0 and at most 1.")
    if not is_integer(options["seed"]):
        raise ValueError(f"seed={options['seed']!r} is invalid. Pass an integer.")
    for name in ("signed", "steady_start", "maximize", "capturable", "sparse"):
        if not isinstance(options[name], bool):
            raise ValueError(f"{name}={options[name]!r} is invalid. Pass True or False.")
    if options["averaging"] not in AVERAGINGS:
        raise ValueError(f"averaging={options['averaging']!r} is invalid. Pass one of {', '.join(AVERAGINGS)}.")
    if options["signed"] and options["averaging"] == "factored":
        raise ValueError("signed=True conflicts with averaging='factored', which stores squares. Pass signed=False.")
    if not (fused is None or isinstance(fused, bool)):
        raise ValueError(f"fused={fused!r} is invalid. Pass True, False or None.")
    if fused and (options["capturable"] or isinstance(lr, Tensor)):
        raise ValueError("fused=True needs a float lr and capturable=False. Pass both, or leave fused=None.")
    if fused and options["averaging"] == "factored":
        raise ValueError("fused=True does not support averaging='factored'. Leave fused=None.")
    if fused and importlib.util.find_spec("triton") is None:
        raise ValueError("fused=True needs Triton, which is not installed. Install Triton, or leave fused=None.")


def is_number(value: object) -> bool:
    """Return whether a value is a real number and not a boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Return whether a value is an integer and not a boolean."""
    return isinstance(value, Integral) and not isinstance(value, bool)
