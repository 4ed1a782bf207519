"""Tasks: data, model, loss and evaluation. Each family has a module here and one of the same name in configs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from adahessian.lab.errors import ConfigError

if TYPE_CHECKING:
    from adahessian.lab.configs.run import RunConfig
    from adahessian.lab.tasks.task import Env, Task

_CONFIGS = "adahessian.lab.configs"


def load_task(config: RunConfig, env: Env) -> Task[Any]:
    """Read the data of a run and return its task. Only the module of its family is imported.

    A family config from outside of the laboratory has a method ``load(env)`` that returns the task.

    Raises:
        ConfigError: If ``config.task`` is not a family config, or one of its options does not fit the data.
        DataError: If data is missing or damaged.
    """
    if hasattr(config.task, "load"):
        own_task: Task[Any] = config.task.load(env)
        return own_task
    package, _, family = type(config.task).__module__.rpartition(".")
    if package != _CONFIGS:
        raise ConfigError(f"{type(config.task).__name__} has no method load. Add load(env), which returns a Task.")
    task: Task[Any] = import_module(f"{__name__}.{family}").load(config.task, env)
    return task
