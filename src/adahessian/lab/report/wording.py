"""Groups of runs and their conditions in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from adahessian.lab.report.groups import Group
from adahessian.lab.report.phrases import phrases
from adahessian.lab.settings import OPTIMIZER_TITLES, REMOVED


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
            *phrases(group.distinctive, group.experiment.economies),
            *([f"“{group.name}”"] if _named_by_user(group) else []),
            *([under(group.conditions)] if with_conditions else []),
        ]
    )


def _named_by_user(group: Group) -> bool:
    defaults = group.experiment.defaults[group.optimizer]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in group.changed.items()}
    name = group.name
    for removed in REMOVED.keys() & values.keys():
        name = name.replace(f"_{removed.replace('_', '-')}={values.pop(removed)}", "")
    if not values.keys() <= {field.name for field in fields(defaults)}:
        return True
    return name != group.experiment.label(group.optimizer, replace(defaults, **values))
