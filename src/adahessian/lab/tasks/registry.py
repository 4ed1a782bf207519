"""All tasks, by name."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from adahessian.lab.tasks import digits, glue, images, language, recommendation, translation
from adahessian.lab.tasks.task import Experiment

EXPERIMENTS: dict[str, Experiment[Any]] = {
    experiment.name: experiment
    for module in (digits, images, translation, language, glue, recommendation)
    for experiment in module.EXPERIMENTS
}


class UnknownTaskError(Exception):
    """A task that does not exist."""


def experiment_named(name: str) -> Experiment[Any]:
    """The task of a name.

    Raises:
        UnknownTaskError: If there is none.
    """
    if name not in EXPERIMENTS:
        close = get_close_matches(name, EXPERIMENTS, n=1)
        perhaps = f"Perhaps you meant {close[0]}? There are" if close else "There are"
        raise UnknownTaskError(f"there is no task {name}. {perhaps} {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
