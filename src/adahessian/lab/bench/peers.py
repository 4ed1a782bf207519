"""Optimizers of other packages, where these are installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from adahessian.lab.bench.contenders import LR, Contender
from adahessian.lab.bench.training import Mode, Training, plain, with_graph_of_gradient
from adahessian.lab.bench.workloads import Task


@dataclass(frozen=True, kw_only=True)
class _Peer:
    """An optimizer of another package, as its documentation says to use it."""

    package: str
    optimizer: str

    start: Callable[..., Training]
    """``start(optimizer_class, task, mode, every=..., **settings)`` sets up a training."""

    every: int = 1
    """Steps from one dear step to the next."""

    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.package}.{self.optimizer}{self.note}"

    def contender(self) -> Contender | None:
        """What takes part, if the package is installed."""
        try:
            optimizer_class = getattr(import_module(self.package), self.optimizer)
        except (ImportError, AttributeError):
            return None
        start = partial(self.start, optimizer_class, every=self.every, **self.settings)
        # Those that need backward(create_graph=True) cannot be compiled, and none was made to be captured.
        return Contender(schedules={self.name: self.every}, start=start, modes=("eager",))


def _hutchinson(optimizer_class: Any, task: Task, mode: Mode, *, every: int, **settings: Any) -> Training:
    optimizer = optimizer_class(task.parameters, lr=LR, **settings)
    return with_graph_of_gradient(task, optimizer, every=every)


def _first_order(optimizer_class: Any, task: Task, mode: Mode, *, every: int) -> Training:
    return plain(task, optimizer_class(task.parameters, lr=LR), mode)


def _muon(optimizer_class: Any, task: Task, mode: Mode, *, every: int) -> Training:
    outer = {task.model.get_submodule("head").weight}
    outer |= {module.weight for module in task.model.modules() if isinstance(module, nn.Embedding)}
    hidden = [param for param in task.parameters if param.dim() >= 2 and param not in outer]
    others = [param for param in task.parameters if param.dim() < 2 or param in outer]
    groups = [{"params": hidden, "lr": LR, "use_muon": True}, {"params": others, "lr": LR, "use_muon": False}]
    return plain(task, optimizer_class(groups), mode)


# The eps of torch_optimizer: the other's own of 1e-16 lets a curvature near zero throw the weights to infinity.
_EPS = {"eps": 1e-4}
_PEERS = (
    _Peer(package="pytorch_optimizer", optimizer="AdaHessian", note=", every step", start=_hutchinson, settings=_EPS),
    _Peer(
        package="pytorch_optimizer",
        optimizer="AdaHessian",
        note=", every 10 steps",
        start=_hutchinson,
        every=10,
        settings=_EPS | {"update_period": 10},
    ),
    _Peer(package="torch_optimizer", optimizer="Adahessian", note=", every step", start=_hutchinson, settings=_EPS),
    _Peer(package="pytorch_optimizer", optimizer="SophiaH", note=", every 10 steps", start=_hutchinson, every=10),
    _Peer(package="pytorch_optimizer", optimizer="SOAP", note=", every 10 steps", start=_first_order, every=10),
    _Peer(package="pytorch_optimizer", optimizer="Muon", start=_muon),
)


def installed_peers() -> tuple[list[Contender], list[str]]:
    """The peers that can take part, and the names of those that were looked for and not found."""
    found = {peer.name: peer.contender() for peer in _PEERS}
    return (
        [contender for contender in found.values() if contender is not None],
        [name for name, contender in found.items() if contender is None],
    )
