"""Presets: the settings of an experiment for each optimizer."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import cleandoc
from typing import Any

from adahessian.lab.configs.optimizers import SOAP, AdaHessianKron, AdamW, Muon, OptimizerConfig, Sophia
from adahessian.lab.configs.run import RunConfig, TaskConfig
from adahessian.lab.errors import ConfigError

Configs = Mapping[str, RunConfig]
Make = Callable[[], Configs]
NO_DATA = "nothing to download."


@dataclass(frozen=True, kw_only=True)
class Preset:
    """An experiment: what it is, what data it needs, and its settings for each optimizer."""

    name: str  # what the command line calls it, such as "cifar10-resnet20"
    title: str  # such as "ResNet20 on CIFAR-10"
    data: str  # what --data-dir has to hold, in one sentence
    notes: str  # where the settings come from, and what else to know
    make: Make  # returns the settings by optimizer

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Names of the optimizers that the experiment has settings for."""
        return tuple(self.make())

    def config(self, optimizer: str) -> RunConfig:
        """Return the settings for an optimizer, or raise ConfigError if there are none."""
        configs = self.make()
        if optimizer not in configs:
            raise ConfigError(f"{self.name} has no settings for {near(optimizer, configs)}")
        return configs[optimizer]


PRESETS: dict[str, Preset] = {}


def preset(name: str, title: str, data: str = NO_DATA, notes: str = "") -> Callable[[Make], Make]:
    """Register the decorated function as an experiment. Its docstring and ``notes`` become the notes."""

    def register(make: Make) -> Make:
        if name in PRESETS and PRESETS[name].make.__module__ != make.__module__:
            raise ConfigError(f"There is a task {name} already. Choose another name for the preset.")
        paragraphs = filter(None, map(cleandoc, (make.__doc__ or "", notes)))
        PRESETS[name] = Preset(name=name, title=title, data=data, notes="\n\n".join(paragraphs), make=make)
        return make

    return register


def find_preset(name: str) -> Preset:
    """Return the preset of a name, or raise ConfigError if it does not exist."""
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

    They use AdamW's weight decay and learning rate, but Sophia's learning rate is a third. None were searched.
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
    optimizers: Mapping[str, OptimizerConfig], task: TaskConfig, *, epochs: int = 1, **options: Any
) -> Configs:
    """Return a RunConfig for each optimizer, with the same task, epochs and other ``options`` of a run."""
    return {
        name: RunConfig(task=task, optimizer=optimizer, epochs=epochs, **options)
        for name, optimizer in optimizers.items()
    }
