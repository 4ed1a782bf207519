"""Presets: the settings of an experiment for each optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from adahessian.lab.configs.optimizers import SOAP, AdaHessianKron, AdamW, Muon, OptimizerConfig, Sophia
from adahessian.lab.configs.run import RunConfig, TaskConfig
from adahessian.lab.configs.schedule import ScheduleConfig
from adahessian.lab.errors import ConfigError

Configs = Mapping[str, RunConfig]
FinalWeights = Literal["last", "best", "average"]
CONSTANT = ScheduleConfig()


@dataclass(frozen=True, kw_only=True)
class Preset:
    """An experiment: what it is, what data it needs, and its settings for each optimizer."""

    name: str
    """What the command line calls it, such as ``"cifar10-resnet20"``."""

    title: str
    """Such as ``"ResNet20 on CIFAR-10"``."""

    data: str
    """What ``--data-dir`` has to hold, in one sentence."""

    make: Callable[[], Configs]
    """Returns the settings by optimizer. Its docstring holds the notes."""

    family_notes: str = ""
    """Notes that hold for several experiments."""

    needs_no_data: bool = False
    """The data comes with a package or is computed."""

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Names of the optimizers that the experiment has settings for."""
        return tuple(self.make())

    @property
    def notes(self) -> str:
        """Where the settings come from, and what else to know. Paragraphs are separated by empty lines."""
        return "\n\n".join(filter(None, [inspect.getdoc(self.make), inspect.cleandoc(self.family_notes)]))

    def config(self, optimizer: str) -> RunConfig:
        """Return the settings for an optimizer.

        Raises:
            ConfigError: If the experiment has none for it.
        """
        configs = self.make()
        if optimizer not in configs:
            raise ConfigError(f"{self.name} has no settings for {near(optimizer, configs)}")
        return configs[optimizer]


PRESETS: dict[str, Preset] = {}


def preset(
    name: str, *, title: str, data: str, family_notes: str = "", needs_no_data: bool = False
) -> Callable[[Callable[[], Configs]], Callable[[], Configs]]:
    """Register the decorated function as the preset of an experiment."""

    def register(make: Callable[[], Configs]) -> Callable[[], Configs]:
        PRESETS[name] = Preset(
            name=name, title=title, data=data, make=make, family_notes=family_notes, needs_no_data=needs_no_data
        )
        return make

    return register


def find_preset(name: str) -> Preset:
    """Return the preset of a name.

    Raises:
        ConfigError: If it does not exist.
    """
    if name not in PRESETS:
        raise ConfigError(f"There is no task {near(name, PRESETS)}")
    return PRESETS[name]


def near(name: str, names: Iterable[str]) -> str:
    """Return the rest of a message about an unknown name, with near names or else all of them."""
    names = list(names)
    close = get_close_matches(name, names, n=3)
    return f"{name}. {'Did you mean' if close else 'Choose from'} {', '.join(close or names)}{'?' if close else '.'}"


def with_modern(optimizers: Mapping[str, OptimizerConfig]) -> dict[str, OptimizerConfig]:
    """Add AdaHessianKron, Muon, SOAP and Sophia to settings that have AdamW's.

    They take AdamW's learning rate and decay, Sophia a third of the learning rate. Better ones were not searched for.
    """
    adamw = optimizers["adamw"]
    assert isinstance(adamw, AdamW)
    lr, decay = adamw.lr, adamw.weight_decay
    return {
        "adahessian-kron": AdaHessianKron(lr=lr, weight_decay=decay),
        **optimizers,
        "muon": Muon(lr=lr, weight_decay=decay, betas=adamw.betas),
        "soap": SOAP(lr=lr, weight_decay=decay),
        "sophia": Sophia(lr=float(f"{lr / 3:.3g}"), weight_decay=decay),
    }


def same_for(
    optimizers: Mapping[str, OptimizerConfig],
    task: TaskConfig,
    *,
    epochs: int = 1,
    schedule: ScheduleConfig = CONSTANT,
    steps: int | None = None,
    eval_every: int | None = None,
    final_weights: FinalWeights = "last",
    average_epochs: int = 1,
) -> Configs:
    """Return the configs of an experiment whose optimizers share everything but their own options."""
    return {
        name: RunConfig(
            task=task,
            optimizer=optimizer,
            schedule=schedule,
            epochs=epochs,
            steps=steps,
            eval_every=eval_every,
            final_weights=final_weights,
            average_epochs=average_epochs,
        )
        for name, optimizer in optimizers.items()
    }
