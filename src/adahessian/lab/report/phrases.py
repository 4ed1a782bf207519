"""Settings in words: a phrase for each choice that made them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adahessian.lab.settings import ECONOMICAL, is_economical

_WORDS = {
    "update_every": "curvature every {} steps",
    "batch_fraction": "on {} of the batch",
    "measured_epochs": "after {} epochs of every step",
    "tangents": "{} tangents",
    "lr": "lr {}",
    "block_size": "blocks of {}",
    "num_probes": "{} probes",
    "averaging": "{} averaging",
    "lr_warmup_steps": "lr warm-up of {} steps",
    "steady_start": "steady start",
    "decay_bias_and_norm": "norms and biases do not decay",
    "decay_epochs": "decay after epochs {}",
}
# Read as one phrase, these stand first and in this order.
_PHRASE = ("update_every", "batch_fraction", "measured_epochs")


def phrases(changed: Mapping[str, Any], economies: Mapping[str, Any]) -> list[str]:
    """Settings that are not a task's own. The fewer phrases, the fewer choices.

    Args:
        changed: Their names and values.
        economies: What being economical changes in the task's own.

    Example:
        >>> phrases({"lr": 0.3, "update_every": 10, "batch_fraction": 0.25}, {})
        ['curvature every 10 steps on 25% of the batch', 'lr 0.3']
        >>> economies = {**ECONOMICAL, "steady_start": True, "lr": 0.3}
        >>> phrases({**economies, "num_probes": 4}, economies)
        ['economical', '4 probes']
        >>> phrases({**ECONOMICAL, "batch_fraction": 0.5}, economies)
        ['economical', 'uncorrected', 'but on 50% of the batch']
        >>> phrases({**economies, "update_every": 20}, economies)
        ['economical', 'but every 20 steps']
    """
    if is_economical(changed):
        found, said = _economically(changed, economies)
    else:
        found, said = [_at_once(changed)], {*_PHRASE}
    return [*filter(None, found), *(_one(name, value) for name, value in changed.items() if name not in said)]


def _economically(changed: Mapping[str, Any], economies: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    """What is measured as by ``--economical``, and the settings that need not be said of it any more."""
    found = ["economical"]
    corrections = [name for name in economies if name not in ECONOMICAL]
    lacking = [name for name in corrections if name not in changed]
    if lacking == corrections and len(corrections) > 1:
        found.append("uncorrected")
    else:
        own = [name.replace("_", " ") for name in lacking if name != "steady_start"]
        found += [f"the task's own {' and '.join(own)}"] * bool(own)
        found += ["no steady start"] * ("steady_start" in lacking)
    for name, otherwise in (("batch_fraction", 1.0), ("update_every", 1)):
        value = changed.get(name, otherwise)
        if value != ECONOMICAL[name]:
            found.append("but " + _one(name, value).removeprefix("curvature "))
    return found, {*ECONOMICAL, *(name for name in corrections if changed.get(name) == economies[name])}


def _at_once(changed: Mapping[str, Any]) -> str:
    return " ".join(_one(name, changed[name]) for name in _PHRASE if name in changed)


def _one(name: str, value: Any) -> str:
    if name == "batch_fraction" and value == 1:
        return "on the whole batch"
    if name == "batch_fraction":
        shown = f"{value:.3g}" if value > 1 else f"{100 * value:g}%"
    elif name == "measured_epochs" and value == 1:
        return "after 1 epoch of every step"
    elif name == "update_every" and value == 1:
        return "curvature every step"
    elif isinstance(value, list | tuple):
        shown = " ".join(f"{each:g}" if isinstance(each, float) else str(each) for each in value) or "none"
    else:
        shown = f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
    return _WORDS.get(name, name.replace("_", " ") + " {}").format(shown)


ECONOMICAL_IN_WORDS = (
    f"Economical: {_at_once(ECONOMICAL)}, {ECONOMICAL['tangents']} tangents where compiled, a steady start, and on "
    "CIFAR-10 and digits twice the task's own lr and half its weight decay. Uncorrected: "
    "no steady start, and the task's own lr and weight decay."
)
