"""Tasks: data, model, loss and evaluation. Each family has a module here and one of the same name in configs."""

from adahessian.lab.tasks.task import load_task

__all__ = ["load_task"]
