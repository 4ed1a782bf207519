"""``adahessian study``: the paper's sweeps, and some it did not make, over any task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Generic, Literal, get_args

import tyro
from rich.console import Console

from adahessian.lab.processes import is_first
from adahessian.lab.settings import OptimizerName, Settings, SettingsError, SettingsT
from adahessian.lab.tasks.registry import experiment_named
from adahessian.lab.train import DEFAULT_TASK, Session, default_settings, option, plan_run, run_one, wants_economy

StudyName = Literal[
    "delay",
    "block-size",
    "learning-rate",
    "averaging",
    "probes",
    "batch-fraction",
    "hessian-power",
    "beta2",
]
STUDY_NAMES: tuple[StudyName, ...] = get_args(StudyName)

# The paper measures at every step of the first five of 160 epochs, and then at every second, third, fourth or fifth.
DELAYS = (1, 2, 3, 4, 5, 10, 20)
DELAY_MEASURED_SHARE = 5 / 160
LR_FACTORS = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 10.0)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
PROBES = (1, 2, 4)
FRACTIONS = (0.125, 0.25, 0.5, 1.0)
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
BETA2S = (0.9, 0.98, 0.99, 0.999)


@dataclass(frozen=True)
class Variant:
    """One run of a study."""

    optimizer: OptimizerName
    settings: Settings


def variants(study: StudyName, base: Settings, adamw: Settings | None) -> list[Variant]:
    """What a study runs.

    Args:
        study: Which one.
        base: The settings of AdaHessian that it varies.
        adamw: Those of AdamW, which the study of learning rates sets beside it; None where the task has none.
    """

    def each(**changes: Sequence[Any]) -> list[Variant]:
        (name, values), *_ = changes.items()
        return [Variant("adahessian", replace(base, **{name: value})) for value in values]

    if study == "delay":
        measured_epochs = DELAY_MEASURED_SHARE * base.epochs
        return [
            Variant(
                "adahessian",
                replace(base, update_every=delay, measured_epochs=measured_epochs if delay > 1 else 0.0),
            )
            for delay in DELAYS
        ]
    if study == "learning-rate":
        around: list[tuple[OptimizerName, Settings | None]] = [("adahessian", base), ("adamw", adamw)]
        return [
            Variant(name, replace(settings, lr=factor * settings.lr))
            for name, settings in around
            if settings is not None
            for factor in LR_FACTORS
        ]
    if study == "beta2":
        return each(betas=[(base.betas[0], beta2) for beta2 in BETA2S])
    if study == "block-size":
        return each(block_size=BLOCK_SIZES)
    if study == "averaging":
        return each(averaging=("magnitude", "signed"))
    if study == "probes":
        return each(num_probes=PROBES)
    if study == "batch-fraction":
        return each(batch_fraction=FRACTIONS)
    return each(hessian_power=POWERS)


@dataclass(frozen=True, kw_only=True)
class Study(Generic[SettingsT]):
    """Sweep one setting of AdaHessian over a task. What is finished is passed over, what was interrupted goes on."""

    study: Annotated[StudyName, tyro.conf.Positional]
    """What to vary."""

    task: str = DEFAULT_TASK
    """The task, as `adahessian tasks` lists them."""

    seeds: tuple[int, ...] = (1,)
    """Seeds, one run each."""

    economical: bool = False
    """Vary around the economical settings of `adahessian train`, not around the paper's. Their learning rate and weight
    decay stay as they are for a quarter of the batch and one probe, whatever is varied."""

    session: Annotated[Session, tyro.conf.arg(name="")] = field(default_factory=Session)

    settings: Annotated[SettingsT, tyro.conf.arg(name="")]

    def run(self) -> None:
        """Run all variants, seed after seed."""
        console = Console(quiet=not is_first())
        experiment = experiment_named(self.task)
        session = replace(self.session, resume=not self.session.overwrite)
        adamw = experiment.defaults.get("adamw")
        if adamw is not None:
            adamw = replace(adamw, epochs=self.settings.epochs, batch_size=self.settings.batch_size)
        for seed in self.seeds:
            for variant in variants(self.study, self.settings, adamw):
                name = experiment.label(variant.optimizer, variant.settings)
                plan = plan_run(experiment, variant.optimizer, variant.settings, seed, name, session)
                run_one(plan, resume=session.resume, console=console)
        console.print(f"now: adahessian report {session.output}", highlight=False, soft_wrap=True)


def parse_study(arguments: Sequence[str]) -> Study[Any]:
    """Parse the arguments after ``adahessian study``. Settings default to the paper's for the task."""
    task = option(arguments, "--task", DEFAULT_TASK)
    settings = default_settings(task, "adahessian", economical=wants_economy(arguments), command="study")
    kind: Any = Study[type(settings)]  # type: ignore[misc]
    # Only the study itself must be named.
    default = Study(study=tyro.MISSING, task=task, settings=settings)
    try:
        parsed: Study[Any] = tyro.cli(kind, args=list(arguments), default=default, prog="adahessian study")
    except SettingsError as error:
        raise SystemExit(f"adahessian study: {error}") from error
    return parsed
