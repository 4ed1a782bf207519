"""All tasks, by name."""

from __future__ import annotations

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
        raise UnknownTaskError(f"there is no task {name}; there are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
