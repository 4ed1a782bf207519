"""Checks of option values. Messages name the option as it is typed."""

from __future__ import annotations

import math

from adahessian.lab.errors import ConfigError


def at_least(least: float, **values: float | None) -> None:
    """Reject values below ``least``, infinity and NaN. None passes."""
    for name, value in values.items():
        if value is not None and not least <= value < math.inf:
            raise _invalid(name, value, f"{least} or more")


def positive(**values: float | None) -> None:
    """Reject values that are not above 0, infinity and NaN. None passes."""
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise _invalid(name, value, "a value above 0")


def fraction(*, above_zero: bool = False, below_one: bool = False, **values: float) -> None:
    """Reject values outside of 0 to 1, and 0 or 1 themselves where these are excluded."""
    for name, value in values.items():
        if not 0 <= value <= 1 or (above_zero and value == 0) or (below_one and value == 1):
            low, high = "above 0" if above_zero else "from 0", "below 1" if below_one else "to 1"
            raise _invalid(name, value, f"a value {low} {high}")


def _invalid(name: str, value: float, wanted: str) -> ConfigError:
    return ConfigError(f"--{name.replace('_', '-')} {value} is invalid. Pass {wanted}.")
