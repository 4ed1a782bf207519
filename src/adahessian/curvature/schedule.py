"""When a measurement is due: delayed curvature, on the counts that a parameter group carries.

``steps`` counts the steps taken, ``measurements`` the measurements used, and ``staleness`` the steps that the newest
measurement has served.
"""

from __future__ import annotations

from typing import Any


def is_due(group: dict[str, Any]) -> bool:
    """Whether the next step wants a measurement: the first one, all of the warm-up, then every ``update_every``-th."""
    return bool(
        group["measurements"] == 0
        or group["steps"] < group["warmup_steps"]
        or group["staleness"] >= group["update_every"]
    )


def is_long_overdue(group: dict[str, Any]) -> bool:
    """Whether the measurement that was due is missing for more than two intervals."""
    return bool(group["measurements"] > 0 and group["staleness"] > 3 * group["update_every"])


def count_step(group: dict[str, Any], *, measured: bool) -> None:
    """Record a step, and whether it used a new measurement."""
    group["steps"] += 1
    group["measurements"] += measured
    group["staleness"] = 1 if measured else group["staleness"] + 1
