"""What a run is, and where it is computed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from adahessian.lab.configs.checks import Count, Natural, Options, Positive
from adahessian.lab.configs.optimizers import OptimizerConfig
from adahessian.lab.errors import ConfigError

# Fields that say how to compute a run. Their values do not change its result.
NOT_IDENTITY = frozenset({"workers", "cache_gib"})


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that says how good a model is."""

    name: str  # its key in the results of evaluations, such as "test_accuracy"
    title: str  # its title in tables and plots, with the unit: "test accuracy, %"
    higher_is_better: bool = True
    digits: int = 2  # decimal places in tables

    def on(self, part: str) -> Metric:
        """Return the metric on a part of the data, such as ``"test"``."""
        return replace(self, name=f"{part}_{self.name}", title=f"{part.replace('_', ' ')} {self.title}")


VALID_LOSS = Metric(name="valid_loss", title="validation loss, nats per token", higher_is_better=False, digits=3)


class TaskConfig(Protocol):
    """The options of a task family."""

    @property
    def holdout(self) -> int:
        """Training examples that are kept for validation."""

    @property
    def metric(self) -> Metric:
        """The metric of the final weights, on the test set."""

    @property
    def validation_metric(self) -> Metric:
        """The metric of every evaluation. It decides on plateaus, best weights and tuning."""


class WithValidation(Options):
    """A family with validation data."""

    holdout: ClassVar[int] = 0
    default_holdout: ClassVar[int] = 0


class WithHoldout(Options):
    """A family without validation data, which can hold out training examples."""

    default_holdout: ClassVar[int]  # training examples that `adahessian sweep` holds out
    score: ClassVar[Metric] = Metric(name="accuracy", title="accuracy, %")  # without the part of the data

    holdout: Natural = 0  # Training examples to keep for validation. 0 evaluates on the test set.

    @property
    def metric(self) -> Metric:
        """The metric of the final weights, on the test set."""
        return self.score.on("test")

    @property
    def validation_metric(self) -> Metric:
        """The metric on the examples that are held out, or else on the test set."""
        return self.score.on("validation" if self.holdout else "test")


Decay = Literal["constant", "steps", "plateau", "inverse-sqrt", "cosine", "linear"]


class ScheduleConfig(Options):
    """The learning rate of each step as a multiple of the optimizer's."""

    schedule: Decay = "constant"  # Learning-rate schedule after warm-up.
    lr_warmup_steps: Natural = 0  # Linear warm-up, in steps.
    decay_epochs: tuple[int, ...] = ()  # Epochs after which the schedule `steps` decays.
    decay_factor: Positive = 0.1  # Factor of each decay (steps and plateau).
    plateau_patience: Natural = 3  # Evaluations without improvement before `plateau` decays.


class RunConfig(Options):
    """Everything that decides a run, except its task's data and its seed."""

    task: Any
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    epochs: Count  # Passes over the training data.
    steps: Count | None = None  # Length in steps. None trains for --epochs.
    eval_every: Count | None = None  # Steps between evaluations. None evaluates after every epoch.
    final_weights: Literal["last", "best", "average"] = "last"  # Weights to test: last, best, or mean of several.
    average_epochs: Count = 1  # Number of final epochs to average, with final_weights=average.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.final_weights == "best" and getattr(self.task, "default_holdout", False) and not self.task.holdout:
            raise ConfigError("--final-weights best would choose them on the test set. Pass --holdout, too.")


class Session(Options):
    """Where and how runs are computed. Except for the precision, nothing here changes what is computed."""

    data_dir: Path = Path("data")  # Folder with the data, in its owner's format.
    output: Path = Path("runs")  # Folder for runs: one JSON file and one folder per run.
    device: str | None = None  # Device to train on. None uses a GPU if there is one.
    precision: Literal["float32", "tf32", "bfloat16"] = "tf32"  # Precision of matrix products. bfloat16 is autocast.
    compile: bool | None = None  # Compile derivatives and, on a GPU, capture them. None compiles on a GPU.
    exclusive: bool = False  # Declare that nothing else uses the device, so that reports show the times.
    resume: bool = False  # Resume interrupted runs, and skip finished ones.
    overwrite: bool = False  # Start over if a run of this name exists.
    checkpoint_minutes: Positive = 10.0  # Minutes between checkpoints. Every evaluation also writes one.
    stop_after_epochs: Count | None = None  # Stop after this many more epochs, to resume later.
    stop_after_steps: Count | None = None  # Stop after this many more steps, to resume later.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume and self.overwrite:
            raise ConfigError("--resume and --overwrite cannot be combined. Pass one of them.")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: a configuration with a seed and a name."""

    task: str  # name of the preset, such as "cifar10-resnet20"
    optimizer: str  # name of the optimizer, such as "adahessian-kron"
    config: RunConfig
    seed: int
    label: str  # what the run is called: label(), or the user's --name


def options_of(config: RunConfig) -> dict[str, Any]:
    """Return the options of a run as a flat dict, as they are typed (with underscores)."""
    options = asdict(config)
    return {**options.pop("task"), **options.pop("optimizer"), **options.pop("schedule"), **options}


def difference(config: RunConfig, other: RunConfig) -> dict[str, Any]:
    """Return the options of ``config`` that differ from those of ``other``, except for :data:`NOT_IDENTITY`."""
    before, options = options_of(other), options_of(config).items()
    return {name: value for name, value in options if name not in NOT_IDENTITY and value != before.get(name)}


def label(optimizer: str, config: RunConfig, preset: RunConfig) -> str:
    """Return the name of a run: its optimizer and the options it changes: "adahessian lr=0.3 curvature-every=10"."""
    changed = [f"{name.replace('_', '-')}={short(value)}" for name, value in difference(config, preset).items()]
    return " ".join([optimizer, *changed])


def short(value: Any) -> str:
    """Return an option's value as it stands in labels and file names."""
    if isinstance(value, tuple):
        return "+".join(map(short, value))
    text = f"{value:.12g}" if isinstance(value, float) else str(value)
    return "".join(character if character.isalnum() or character in ".+-" else "-" for character in text)
