"""What a run is, and where it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from adahessian.lab.configs.checks import at_least, positive
from adahessian.lab.configs.optimizers import OptimizerConfig
from adahessian.lab.configs.schedule import ScheduleConfig
from adahessian.lab.errors import ConfigError

# Fields that say how to compute a run. Their values do not change its result.
NOT_IDENTITY = frozenset({"workers", "cache_gib"})


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that says how good a model is."""

    name: str
    """Its key in the results of evaluations, such as ``"test_accuracy"``."""

    title: str
    """Its title in tables and plots, with the unit: ``"test accuracy, %"``."""

    higher_is_better: bool = True
    digits: int = 2
    """Decimal places in tables."""

    def on(self, part: str) -> Metric:
        """Return the metric on a part of the data, such as ``"test"``."""
        return replace(self, name=f"{part}_{self.name}", title=f"{part.replace('_', ' ')} {self.title}")


class TaskConfig(Protocol):
    """The options of a task family."""

    default_holdout: ClassVar[int]
    """Training examples that ``adahessian sweep`` holds out. 0 where there is validation data."""

    @property
    def batch_size(self) -> int:
        """Examples per batch, over all processes (tokens, in translation)."""

    @property
    def holdout(self) -> int:
        """Training examples that are kept for validation."""

    @property
    def metric(self) -> Metric:
        """The metric of the final weights, on the test set."""

    @property
    def validation_metric(self) -> Metric:
        """The metric of every evaluation: for plateaus, best weights and tuning.

        It is on the test set only where the paper's protocol has no validation data and ``holdout`` is 0.
        """


@dataclass(frozen=True, kw_only=True)
class WithHoldout:
    """A family without validation data, which can hold out training examples."""

    score: ClassVar[Metric]
    """The metric, without the part of the data."""

    holdout: int = 0
    """Training examples to keep for validation. 0 evaluates on the test set."""

    def __post_init__(self) -> None:
        at_least(0, holdout=self.holdout)

    @property
    def metric(self) -> Metric:
        """The metric of the final weights, on the test set."""
        return self.score.on("test")

    @property
    def validation_metric(self) -> Metric:
        """The metric on the examples that are held out, or else on the test set."""
        return self.score.on("validation" if self.holdout else "test")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run, except its task's data and its seed."""

    task: Any
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    epochs: int
    """Passes over the training data."""

    steps: int | None = None
    """Length in steps. None trains for the epochs."""

    eval_every: int | None = None
    """Steps between two evaluations. None evaluates after every epoch."""

    final_weights: Literal["last", "best", "average"] = "last"
    """Which weights are tested: the last, those of the best evaluation, or the mean of the last epochs."""

    average_epochs: int = 1
    """Epochs whose weights are averaged, with final_weights=average."""

    def __post_init__(self) -> None:
        at_least(
            1, epochs=self.epochs, steps=self.steps, eval_every=self.eval_every, average_epochs=self.average_epochs
        )
        at_least(1, batch_size=self.task.batch_size)


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where and how runs are computed. Nothing here changes what is computed, except the precision."""

    data_dir: Path = Path("data")
    """Folder with the data, in its owner's format."""

    output: Path = Path("runs")
    """Folder for runs: one JSON file and one folder per run."""

    device: str | None = None
    """Device to train on. None takes a GPU if there is one."""

    precision: Literal["float32", "tf32", "bfloat16"] = "tf32"
    """Precision of matrix products. bfloat16 is autocast."""

    compile: bool | None = None
    """Compile derivatives and, on a GPU, capture them. None compiles on a GPU."""

    exclusive: bool = False
    """Nothing else uses the device, so the recorded times count."""

    resume: bool = False
    """Resume interrupted runs, and skip finished ones."""

    overwrite: bool = False
    """Start over where a run of this name exists."""

    checkpoint_minutes: float = 10.0
    """Minutes between two checkpoints. Every evaluation writes one, too."""

    stop_after_epochs: int | None = None
    """Stop after this many more epochs, to resume later."""

    stop_after_steps: int | None = None
    """Stop after this many more steps, to resume later."""

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise ConfigError("--resume and --overwrite exclude each other. Pass one of them.")
        positive(checkpoint_minutes=self.checkpoint_minutes)
        at_least(1, stop_after_epochs=self.stop_after_epochs, stop_after_steps=self.stop_after_steps)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: a configuration with a seed and a name."""

    task: str
    """Name of the preset, such as ``"cifar10-resnet20"``."""

    optimizer: str
    """Name of the optimizer, such as ``"adahessian-kron"``."""

    config: RunConfig
    seed: int
    label: str
    """What the run is called: :func:`label`, or the user's ``--name``."""


def options_of(config: RunConfig) -> dict[str, Any]:
    """Return the options of a run as a flat dict, as they are typed (with underscores)."""
    return dict(_flat(config))


def _flat(config: Any) -> Iterator[tuple[str, Any]]:
    for option in fields(config):
        value = getattr(config, option.name)
        if option.name in ("task", "optimizer", "schedule") and isinstance(config, RunConfig):
            yield from _flat(value)
        else:
            yield option.name, value


def difference(config: RunConfig, other: RunConfig) -> dict[str, Any]:
    """Return the options of ``config`` that differ from those of ``other``.

    Options that only say how to compute a run are left out.
    """
    before = options_of(other)
    return {
        name: value
        for name, value in options_of(config).items()
        if name not in NOT_IDENTITY and value != before.get(name)
    }


def label(optimizer: str, config: RunConfig, preset: RunConfig) -> str:
    """Return the name of a run: its optimizer, and the options that differ from the preset's.

    Example: ``"adahessian lr=0.3 curvature-every=10"``.
    """
    said = [f"{name.replace('_', '-')}={short(value)}" for name, value in difference(config, preset).items()]
    return " ".join([optimizer, *said])


def short(value: Any) -> str:
    """Return an option's value as it stands in labels and file names."""
    if isinstance(value, tuple):
        return "+".join(map(short, value))
    text = f"{value:.12g}" if isinstance(value, float) else str(value)
    return "".join(character if character.isalnum() or character in ".+-" else "-" for character in text)


def as_json(config: RunConfig) -> dict[str, Any]:
    """Return a config as nested dicts, as run files store it."""
    return asdict(config)
