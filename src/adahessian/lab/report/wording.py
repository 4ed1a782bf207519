"""Settings and conditions in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from adahessian.lab.report.groups import Group, is_economical
from adahessian.lab.runs import label
from adahessian.lab.settings import ECONOMICAL, OPTIMIZER_TITLES

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


def in_words(changed: Mapping[str, Any], economies: Mapping[str, Any]) -> str:
    """Settings that are not a task's own.

    Args:
        changed: Their names and values.
        economies: What being economical changes in the task's own.

    Example:
        >>> in_words({"lr": 0.3, "update_every": 10, "batch_fraction": 0.25}, {})
        'curvature every 10 steps on 25% of the batch, lr 0.3'
        >>> economies = {**ECONOMICAL, "steady_start": True, "lr": 0.3}
        >>> in_words({**economies, "num_probes": 4}, economies)
        'economical, 4 probes'
        >>> in_words({**ECONOMICAL, "batch_fraction": 0.5}, economies)
        'economical, but on 50% of the batch, no steady start'
    """
    if is_economical(changed):
        phrase, said = _economically(changed, economies)
    else:
        phrase, said = " ".join(_one(name, changed[name]) for name in _PHRASE if name in changed), {*_PHRASE}
    others = [_one(name, value) for name, value in changed.items() if name not in said]
    return ", ".join(filter(None, [phrase, *others]))


def _economically(changed: Mapping[str, Any], economies: Mapping[str, Any]) -> tuple[str, set[str]]:
    """What is measured as by ``--economical``, and the settings that need not be said of it any more."""
    phrases = ["economical"]
    corrections = [name for name in economies if name not in ECONOMICAL]
    fraction = changed.get("batch_fraction", 1.0)
    if fraction != ECONOMICAL["batch_fraction"]:
        phrases.append("but " + _one("batch_fraction", fraction))
        corrections = ["steady_start"]  # the others are for a quarter of the batch
    lacking = [name for name in corrections if name not in changed]
    if lacking == corrections and len(corrections) > 1:
        phrases.append("uncorrected")
    else:
        own = [name.replace("_", " ") for name in lacking if name != "steady_start"]
        phrases += [f"the task's own {' and '.join(own)}"] * bool(own)
        phrases += ["no steady start"] * ("steady_start" in lacking)
    return ", ".join(phrases), {*ECONOMICAL, *(name for name in corrections if changed.get(name) == economies[name])}


def _plainly(changed: Mapping[str, Any]) -> str:
    phrase = " ".join(_one(name, changed[name]) for name in _PHRASE)
    return ", ".join([phrase, *(_one(name, value) for name, value in changed.items() if name not in _PHRASE)])


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
    f"Economical: {_plainly(ECONOMICAL)} where compiled, a steady start, and on CIFAR-10 and digits twice the task's "
    "own lr and half its weight decay. Uncorrected: none of the last three."
)


def section_title(group: Group) -> str:
    """What the section of a task and budget is called."""
    return ", ".join(filter(None, [group.experiment.title, _budget(group)]))


def section_anchor(group: Group) -> str:
    """By what it is linked to, and its pictures are named."""
    return "-".join(filter(None, [group.experiment.name, _budget(group).replace(" ", "-")]))


def _budget(group: Group) -> str:
    if group.budget is None:
        return ""
    return "1 epoch" if group.budget == 1 else f"{group.budget} epochs"


def under(conditions: Mapping[str, Any]) -> str:
    """The conditions of a run.

    Example:
        >>> under({"device": "cuda", "precision": "tf32", "compiled": True, "processes": 1})
        'on cuda in tf32, compiled'
    """
    processes = conditions.get("processes", 1)
    return ", ".join(
        [
            f"on {conditions['device']} in {conditions['precision']}",
            "compiled" if conditions["compiled"] else "not compiled",
            *([f"{processes} processes"] if processes > 1 else []),
        ]
    )


def group_title(group: Group, *, with_conditions: bool) -> str:
    """What tables and plots call a group.

    Args:
        group: The runs.
        with_conditions: Whether there are others that differ in their conditions only.
    """
    return ", ".join(
        [
            OPTIMIZER_TITLES[group.optimizer],
            *filter(None, [in_words(group.distinctive, group.experiment.economies)]),
            *([f"“{group.name}”"] if _named_by_user(group) else []),
            *([under(group.conditions)] if with_conditions else []),
        ]
    )


def _named_by_user(group: Group) -> bool:
    defaults = group.experiment.defaults[group.optimizer]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in group.changed.items()}
    if not values.keys() <= {field.name for field in fields(defaults)}:
        return True
    return group.name != label(group.optimizer, replace(defaults, **values), defaults)
