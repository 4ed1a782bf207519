"""Validation of a parameter group's options."""

import importlib.util
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from adahessian.algorithm.shapes import AVERAGINGS

_KINDS = ("kernel", "transposed", "stack", "table")


def validate(options: Mapping[str, Any]) -> None:
    """Raise a ValueError if an option of a parameter group is out of range."""
    lr, betas, fused = options["lr"], options["betas"], options["fused"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, but has shape {tuple(lr.shape)}. Pass one value per group.")
    is_scalar = isinstance(lr, Tensor) or is_number(lr)
    are_two = isinstance(betas, (tuple, list)) and len(betas) == 2
    check("lr", lr, is_scalar and lr >= 0, "a non-negative float or one-element tensor")
    check("betas", betas, are_two and all(is_number(b) and 0 <= b < 1 for b in betas), "two floats in [0, 1)")
    for name in ("eps", "weight_decay"):
        check(name, value := options[name], is_number(value) and 0 <= value < math.inf, "a finite, non-negative number")
    power, damping, seed = options["hessian_power"], options.get("damping", 1), options["seed"]
    check("hessian_power", power, is_number(power) and 0 <= power <= 1, "a number from 0 to 1")
    for name, least in (("block_size", 1), ("num_probes", 1), ("curvature_every", 1), ("curvature_warmup", 0)):
        check(name, value := options[name], is_integer(value) and value >= least, f"an integer of at least {least}")
    check("damping", damping, is_number(damping) and 0 < damping <= 1, "a number above 0 and at most 1")
    check("seed", seed, is_integer(seed), "an integer")
    for name in ("signed", "steady_start", "maximize", "capturable", "sparse"):
        check(name, options[name], isinstance(options[name], bool), "True or False")
    kind, groups = options.get("kind", "kernel"), options.get("conv_groups", 1)
    check("kind", kind, kind in _KINDS, f"one of {', '.join(_KINDS)}")
    check("conv_groups", groups, is_integer(groups) and groups > 0, "a positive integer")
    check("averaging", options["averaging"], options["averaging"] in AVERAGINGS, f"one of {', '.join(AVERAGINGS)}")
    check("fused", fused, fused is None or isinstance(fused, bool), "True, False or None")
    if options["signed"] and options["averaging"] == "factored":
        raise ValueError("signed=True conflicts with averaging='factored', which stores squares. Pass signed=False.")
    if fused and (options["capturable"] or isinstance(lr, Tensor)):
        raise ValueError("fused=True needs a float lr and capturable=False. Pass both, or leave fused=None.")
    if fused and options["averaging"] == "factored":
        raise ValueError("fused=True does not support averaging='factored'. Leave fused=None.")
    if fused and importlib.util.find_spec("triton") is None:
        raise ValueError("fused=True needs Triton, which is not installed. Install Triton, or leave fused=None.")


def check(name: str, value: object, is_valid: bool, wanted: str) -> None:
    """Raise a ValueError that names an argument and its value, unless the value is valid."""
    if not is_valid:
        raise ValueError(f"{name}={value!r} is invalid. Pass {wanted}.")


def is_number(value: object) -> bool:
    """Return whether a value is a real number and not a boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Return whether a value is an integer and not a boolean."""
    return isinstance(value, Integral) and not isinstance(value, bool)
